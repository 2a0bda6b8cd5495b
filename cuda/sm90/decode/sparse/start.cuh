// What the kernels do before anything else.
#pragma once

#include "../../../ptx/sm90.cuh"

namespace mla::sm90::sparse {

// Called by every thread before its first access to global memory: lists, queries and rows may be
// what the kernel before makes, and it may still read what is written here. That one may have let
// this one go at its own start; but it ends behind its own wait, so when it has ended, all that
// came before it has.
//
// The next kernel is let go behind the wait, no earlier. So when it starts, all that was enqueued
// before this one is complete, and before its own wait it may read whatever this one does not
// write: W_UV does so with constant weights. The second launch of a divided batch begins here too,
// and waits for the first. What is launched without the attribute (merging, kernels of sm80,
// cuBLAS, copies) begins when this kernel has ended; a captured graph has the same edges.
__device__ __forceinline__ void begin_behind_others() {
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
}

}  // namespace mla::sm90::sparse
