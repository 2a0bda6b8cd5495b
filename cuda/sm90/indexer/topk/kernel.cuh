// Top-k: the largest logits of each row, exact and deterministic, as slots of the cache.
//
//   estimate  a sample of the row gives a bound below which, almost certainly, nothing is chosen
//   collect   the row is read once, and logits that are not below the bound are kept in shared
//             memory
//   choose    the largest of these are marked in a bitmap of positions; if the sample was
//             misleading, the whole row is searched, so the result never depends on the sample
//   list      the marked positions are translated to slots, in ascending order
//
// Each row has one CTA, or a cluster if rows are few. Each CTA of a cluster collects from its part
// of the row, and the first one does the rest.
#pragma once

#include <type_traits>

#include "../../../ptx/sm90.cuh"
#include "candidates.cuh"
#include "choose.cuh"
#include "shared_resident.cuh"

namespace mla::sm90::topk {

// Chooses all positions of a row that sees at most `topk` positions.
template <int kThreads>
__device__ __forceinline__ void choose_all(const KernelParams& p, const Row& row, int32_t* list,
                                           const Cluster& cluster) {
    const int first = cluster.rank * kThreads + threadIdx.x;
    for (int i = first; i < p.topk; i += cluster.ctas * kThreads)
        list[i] = i < row.seen ? indexer::slot_of(p.rows, row, i) : -1;
}

// Waits for the previous kernel, which computes the logits, and then lets the next kernel start.
// Every CTA calls this, even if its row needs no logits. When the next kernel starts, everything
// but the lists is therefore complete. It must not read the lists before its own wait. Sparse
// attention reads nothing before that wait, the indexer's own kernels only keys and lengths, and a
// GEMM only constant weights. A kernel without programmatic dependent launch starts when this
// kernel has ended.
__device__ __forceinline__ void wait_for_logits() {
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
}

// Each row is done by one CTA, or by a cluster if `kCluster`. An SM has room for `kCtas` CTAs.
template <int kThreads, int kCtas, bool kCluster>
__global__ void __launch_bounds__(kThreads, kCtas)
    topk_kernel(const __grid_constant__ KernelParams p) {
    using S = std::conditional_t<kCluster, Shared, SharedOf<kThreads>>;
    S& s = *reinterpret_cast<S*>(ptx::dynamic_shared());
    const Buffers buffers(s, p.rows.columns);
    const Cluster cluster =
        kCluster ? Cluster{ptx::cluster_ctarank(), ptx::cluster_nctarank()} : Cluster{0, 1};
    const int number = blockIdx.x / cluster.ctas;

    // With rows_ahead, the lengths were written before the kernel that computes the logits began.
    if (!p.rows_ahead) ptx::griddepcontrol_wait();
    const Row row = indexer::find_row(p.rows, number, threadIdx.x % 32);
    int32_t* list = p.lists + number * p.list_stride;
    if (row.seen <= p.topk) {
        wait_for_logits();
        choose_all<kThreads>(p, row, list, cluster);
        return;
    }
    // Each part begins at a multiple of four, as vectors do.
    const int each = (row.seen + 4 * int(cluster.ctas) - 1) / (4 * int(cluster.ctas)) * 4;
    const int begin = min(int(cluster.rank) * each, row.seen), end = min(begin + each, row.seen);
    const bool shared_resident = kCluster && each <= p.shared_resident;
    const int words = ((shared_resident ? end - begin : row.seen) + 31) / 32;
    *reinterpret_cast<uint4*>(&s.bins[4 * threadIdx.x]) = {0, 0, 0, 0};
    if (threadIdx.x == 0) s.candidates = s.pairs = 0;
    if (shared_resident || cluster.rank == 0)
        for (int i = threadIdx.x; i < words; i += kThreads) buffers.chosen[i] = 0;
    if constexpr (kCluster) {
        if (threadIdx.x == 0) {
            s.counts.x = s.counts.y = 0;
            s.arrived.init(1);
            ptx::fence_mbarrier_init();
        }
        if (shared_resident)
            for (int i = threadIdx.x; i < words; i += kThreads)
                buffers.tied(p.shared_resident)[i] = 0;
    }
    __syncthreads();
    wait_for_logits();

    const float* logits = p.logits + number * p.logits_stride;
    if constexpr (kCluster)
        if (shared_resident) {
            choose_shared_resident(s, buffers, p, row, cluster, logits, begin, end - begin, list);
            return;
        }
    // The first step of the row is in flight while the sample is evaluated.
    const bool samples = row.seen > p.candidates;
    float4 sample[S::kSampledEach], first[kTogether];
    if (samples) load_sample<kThreads>(sample, logits, row.seen, p.vectors);
    load_step<kThreads>(first, logits, begin, end, p.vectors);
    SampleEstimate estimate = {logit_of(0), 0};
    if (samples) {
        estimate = estimate_from(s, sample, row.seen, p.topk);
        clear_bins(s);
    }
    collect(s, buffers.candidates, p.candidates, logits, begin, end, p.vectors, estimate.lowest,
            first);
    __syncthreads();
    uint32_t found = s.candidates;
    if constexpr (kCluster)
        if (cluster.ctas > 1) {
            cluster.sync();
            if (cluster.rank == 0) found = gather(cluster, s, buffers.candidates, p.candidates);
            // After this barrier of the cluster, no CTA reads another's shared memory.
            __syncthreads();
            ptx::barrier_cluster_arrive();
            ptx::barrier_cluster_wait();
            if (cluster.rank != 0) return;
        }
    const uint32_t topk = p.topk;
    if (found < topk || found > p.candidates)
        choose_row(s, buffers, logits, row.seen, topk);
    else
        choose_candidates(s, buffers, estimate, found, row.seen, topk);
    const bool fits = p.topk <= 2 * p.candidates;
    write_list(s, p.rows, row, buffers.chosen, words, 0, fits ? buffers.positions() : nullptr,
               list);
}

}  // namespace mla::sm90::topk
