// The kernels' waits for the kernels before them, at their start and at their end.
#pragma once

#include "params.cuh"
#include "ptx/sm90.cuh"

namespace mla::sm90::sparse {

// Called by every thread before its first access to global memory. The previous kernel may produce
// lists, queries and rows, and may still read memory that is written here. It may have released
// this kernel at its own start. But it ends only after its own wait, so when it has ended,
// everything before it has, too.
//
// The next kernel is released behind the wait, no earlier. When it starts, everything enqueued
// before this kernel is therefore complete, and before its own wait it may read whatever this
// kernel does not write: W_UV reads constant weights then. A kernel launched without the attribute
// (merging, kernels of sm80, cuBLAS, copies) begins when this kernel has ended. A captured graph
// has the same edges.
//
// A batch may take two launches (LaunchPlans). The second one does not need the results of the
// first, so it does not wait for it at its start but at its end. A kernel that waits for the second
// launch has then waited for both.
__device__ __forceinline__ void wait_at_start(const KernelParams& p) {
    if (p.first_item == 0) ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
}

// Called by the output's threads behind their last access to global memory: a grid ends with its
// last thread. Threads of other roles exit before, since the barriers of a cluster count all that
// have not, and a merge would wait there for the first launch.
__device__ __forceinline__ void wait_at_end(const KernelParams& p) {
    if (p.first_item != 0) ptx::griddepcontrol_wait();
}

}  // namespace mla::sm90::sparse
