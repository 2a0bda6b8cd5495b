// Sparse absorbed MLA for Hopper: every query token attends to the cache rows that its lists name.
//
// A CTA works on up to N heads of one query token at a time; its warpgroups share the work:
//
//   load     four warps walk the lists, compact their valid entries (list_walk.cuh) and have TMA
//            fetch their rows, a bulk copy for each, to a ring of stages of 16 rows (producer.cuh);
//   scores   one warpgroup, or two in pingpong: S^T = K Q^T for a KV tile of 64 keys
//            (score_gemm.cuh), softmax, P to shared memory (scores.cuh);
//   output   two warpgroups, each 256 of the 512 latent values: O^T = O^T + V^T P^T (output.cuh).
//
// Both GEMMs take the cache as operand A from registers, so rows may stay as the cache has them.
// Heads are on N, so few heads need no padding (rows.cuh).
//
//   for each item of this CTA (scheduler.cuh, split_plan.cuh):
//       load Q
//       for each 64 valid entries of the lists:
//           load      four stages arrive
//           scores    S^T = K Q^T
//                     mask, lazy maximum
//                     P = exp2(S - m) -> shared
//           output    O^T = O^T * factor
//                     O^T += V^T P^T, and each stage is released
//       O / l -> out; in a cluster first the partial results of all CTAs are added
//
// Barriers have one phase for each use of what they guard. For each pair of barriers, the list says
// what they guard, and who arrives: first who arrives at the first barrier, and behind the
// semicolon who arrives at the second one.
//
//   tile_full[i], tile_empty[i]       the number of keys of a tile: lane 0 of each loading warp;
//                                     lane 0 of each warp of the scores and the output
//   full[i], empty[i]                 a stage's rows: the copies; all of the output. The scores
//                                     have read them before the probabilities are there.
//   scores_full[i], scores_empty[i]   a tile's probabilities, factors and ratios: all of its scores
//                                     warpgroup; all of the output
//   maxima_published[i]               a tile's maxima: all of its scores warpgroup, for the other
//   stats_full, stats_empty           an item's maxima and sums: all of the first scores warpgroup;
//                                     of the output
//   merged_stats, merged              maxima and sums, and values, of all CTAs of a cluster: one
//                                     thread, and what is sent
//
// Tiles of more than 32 heads of a cache of the queries' dtype have a kernel of their own
// (wide/kernel.cuh).
#pragma once

#include "barriers.cuh"
#include "dependent_launch.cuh"
#include "output.cuh"
#include "producer.cuh"

namespace mla::sm90::sparse {

// Number of threads of a CTA, and registers per thread of its warpgroups. All warpgroups begin with
// the even share. Some then give registers to others.
template <int N, class R>
struct Threads {
    static constexpr int kGroups = Layout<N, R>::kScoreGroups;
    static constexpr int kAll = 128 + 128 * kGroups + kOutputThreads;
    static constexpr int kEvenShare = 65536 / kAll / 8 * 8, kShares = kEvenShare * kAll / 128;
    // With 64 rows, scales of the keys need a second set of accumulators for the
    // scores.
    static constexpr int kLoad = N == 64 ? 24 : 40;
    static constexpr int kScores = N == 16 ? 96 : N == 32 ? 136 : R::kScales ? 136 : 120;
    static constexpr int kOutput = (kShares - kLoad - kGroups * kScores) / 16 * 8;
};

template <typename T, int N, class R>
__global__ __launch_bounds__(Threads<N, R>::kAll,
                             1) void sparse_kernel(const __grid_constant__ KernelParams p) {
    using L = Layout<N, R>;
    using Share = Threads<N, R>;
    extern __shared__ __align__(1024) char shared[];
    typename L::Control& s = *reinterpret_cast<typename L::Control*>(shared + L::kControlOffset);
    const uint32_t base = ptx::shared_address(shared);

    // A thread that has nothing else to do yet initialises the barriers.
    if (threadIdx.x == Share::kAll - 1) initialise<L::kScoreGroups>(s);
    wait_at_start(p);
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    Entries first;
    if (L::kShort && warp < 4) first.read_first(p, TileScheduler::first(p), lane);
    __syncthreads();

    if (warp < 4) {
        ptx::setmaxnreg_dec<Share::kLoad>();
        Producer<L, R>{{p, s, warp, lane, first}, base + L::kRingOffset}.run();
    } else if (warp < 4 + 4 * L::kScoreGroups) {
        if constexpr (Share::kScores > Share::kEvenShare)
            ptx::setmaxnreg_inc<Share::kScores>();
        else if constexpr (Share::kScores < Share::kEvenShare)
            ptx::setmaxnreg_dec<Share::kScores>();
        Scores<T, N, R>(p, s, base).run();
    } else {
        ptx::setmaxnreg_inc<Share::kOutput>();
        Output<T, N, R>(p, s, base).run();
        wait_at_end(p);
    }
}

}  // namespace mla::sm90::sparse
