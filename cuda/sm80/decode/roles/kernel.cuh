// Absorbed MLA decode on mma.sync with roles for warps: one launch for a batch, scheduled on the
// device.
//
// Score warps make P of a KV tile while output warps multiply P of the previous tile by that tile's
// values. No sum crosses warps. Neither role waits for the other, unless that is a tile behind.
#pragma once

#include "config.cuh"
#include "output.cuh"
#include "scores.cuh"

namespace mla::sm80::decode {

template <class C>
__global__ __launch_bounds__(C::kCtaThreads, C::kCtasPerSm) void roles_kernel(
    const __grid_constant__ KernelParams p) {
    char* shared = ptx::dynamic_shared();
    const ThreadPosition position;
    auto& own = *reinterpret_cast<typename C::WarpShared*>(
        shared + position.hide(C::kWarpOffset +
                               position.thread() / 32 * unsigned(sizeof(typename C::WarpShared))));
    auto& statistics = *reinterpret_cast<typename C::Statistics*>(shared + C::kStatisticsOffset);
    if (threadIdx.x < 4) statistics.zeros[threadIdx.x] = 0;
    typename C::Scheduler scheduler(p, own.scheduler);
    scheduler.plan();
    if (threadIdx.x == 0) statistics.params = p;
    __syncthreads();
    if (position.thread() >= C::kThreads)
        ScoreWarp<C>(p, shared, scheduler).run();
    else
        OutputWarp<C>(p, position, scheduler, own).run();
}

}  // namespace mla::sm80::decode
