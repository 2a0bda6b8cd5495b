// Sparse absorbed MLA for Hopper, for more than 32 heads. Heads are the rows of both GEMMs, and a
// CTA has 64 of them. Keys and values come from panels in shared memory. The cache has values of
// the queries' dtype.
//
//   load     four warps walk the lists, and copy rows to the ring by cp.async (producer.cuh);
//   scores   S = Q K^T for a KV tile of 64 keys, softmax, P over the tile's rope panel
//            (scores.cuh);
//   output   two warpgroups, each 256 of the 512 latent values: O = O + P V (output.cuh). Half of
//            a tile's output waits until the next tile's scores have been issued, and then runs
//            during their softmax.
//
// config.cuh lists the barriers and who arrives. The output does not wait for the stages of a tile,
// because the scores have waited for them.
#pragma once

#include "../dependent_launch.cuh"
#include "output.cuh"
#include "producer.cuh"

namespace mla::sm90::sparse {

// Threads of a CTA, and registers per thread of its warpgroups.
struct WideThreads {
    static constexpr int kAll = 512, kLoad = 48, kScores = 144, kOutput = 160;
};

template <class Control>
__device__ __forceinline__ void initialise_wide(Control& s) {
    const auto init = [](uint64_t& bar, uint32_t count) {
        ptx::mbarrier_init(ptx::shared_address(&bar), count);
    };
    constexpr int output_warps = kOutputThreads / 32;
    for (uint64_t& bar : s.latent_full) init(bar, 128);
    for (uint64_t& bar : s.latent_empty) init(bar, output_warps);
    for (uint64_t& bar : s.rope_full) init(bar, 128);
    for (uint64_t& bar : s.rope_empty) init(bar, kOutputThreads);
    for (uint64_t& bar : s.tile_full) init(bar, kLoadWarps);
    for (uint64_t& bar : s.tile_empty) init(bar, 4 + output_warps);
    for (uint64_t& bar : s.scores_full) init(bar, 32);
    for (uint64_t& bar : s.scores_issued) init(bar, 4);
    init(s.stats_full, 32);
    init(s.stats_empty, kOutputThreads);
    s.ends.initialise();
    ptx::fence_mbarrier_init();
}

template <typename T, int rope>
__global__ __launch_bounds__(WideThreads::kAll,
                             1) void wide_kernel(const __grid_constant__ KernelParams p) {
    using L = WideLayout<rope>;
    using Share = WideThreads;
    extern __shared__ __align__(1024) char shared[];
    auto& s = *reinterpret_cast<typename L::Control*>(shared + L::kControlOffset);
    const uint32_t base = ptx::shared_address(shared);

    if (threadIdx.x == 0) initialise_wide(s);
    __syncthreads();
    wait_at_start(p);

    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    if (warp < 4) {
        ptx::setmaxnreg_dec<Share::kLoad>();
        WideProducer<rope>{{p, s, warp, lane}, base}.run();
    } else if (warp < 8) {
        ptx::setmaxnreg_inc<Share::kScores>();
        WideScores<T, rope>{p, s, base, warp - 4, lane}.run();
    } else {
        ptx::setmaxnreg_inc<Share::kOutput>();
        WideOutput<T, rope>{p, s, base, int(threadIdx.x) - 256, warp >> 2 & 1}.run();
        wait_at_end(p);
    }
}

}  // namespace mla::sm90::sparse
