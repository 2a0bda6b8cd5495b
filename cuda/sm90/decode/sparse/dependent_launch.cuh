// The kernels' waits for the kernels before them, at their start and at their end.
#pragma once

#include "params.cuh"
#include "ptx/sm90.cuh"

namespace mla::sm90::sparse {

// Called by every thread before its first access to global memory. The previous kernel may produce
// lists, queries and rows, and may still read memory that is written here. It may have released
// this kernel at its own start. But it ends only after its own wait, so when it has ended,
// everything before it has ended, too.
//
// The next kernel is released only after this wait. When it starts, everything enqueued before this
// kernel is therefore complete. Before its own wait, it may read whatever this kernel does not
// write: the GEMM with W_UV reads its constant weights then. A kernel launched without the
// attribute (merging, kernels of sm80, cuBLAS, copies) begins when this kernel has ended. A
// captured graph has the same edges.
//
// A batch may take two launches (LaunchPlans). The second one does not need the results of the
// first, so it does not wait for it at its start but at its end. A kernel that waits for the second
// launch has then waited for both.
__device__ __forceinline__ void wait_at_start(const KernelParams& p) {
    if (p.first_item == 0) ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
}

// The output's threads call this after their last access to global memory: a grid ends with its
// last thread. Threads of other roles exit earlier. The barriers of a cluster wait for all threads
// that have not exited. If those threads waited here, a merge would wait for the first launch.
__device__ __forceinline__ void wait_at_end(const KernelParams& p) {
    if (p.first_item != 0) ptx::griddepcontrol_wait();
}

}  // namespace mla::sm90::sparse
