// Top-k of a row that fits into the shared memory of its CTAs. The row is read once, and no
// candidates are kept.
//
// Each CTA of the cluster has a range of positions. A sample gives an estimate of the last chosen
// key. Histograms of the keys from the estimate on, added up over all CTAs, give it exactly. If
// rows are few, an SM has nothing else to do while it waits, even for instructions. Loops are
// therefore short and not unrolled.
#pragma once

#include "candidates.cuh"

namespace mla::sm90::topk {

// Loads `count` logits to shared memory. TMA loads the whole vectors, and completes s.arrived.
__device__ __forceinline__ void start_row(Shared& s, float* to, const float* logits, int count,
                                          bool vectors) {
    const int whole = vectors ? count / 4 * 4 : 0;
    if (threadIdx.x == 0) {
        s.arrived.expect(whole * 4);
        if (whole > 0)
            ptx::cp_async_bulk(ptx::shared_address(to), logits, whole * 4, s.arrived.address());
    }
    for (int i = whole + threadIdx.x; i < count; i += kThreads) to[i] = logits[i];
}

// Calls `visit` with four of this thread's keys at a time, and with the position of the first one.
// A key behind the end is 0. No other key is 0: NaN has the lowest one, 1.
template <typename Visit>
__device__ __forceinline__ void each_vector(const float* row, int count, const Visit& visit) {
#pragma unroll 1
    for (int at = 4 * int(threadIdx.x); at < count; at += 4 * kThreads) {
        const float4 x = *reinterpret_cast<const float4*>(row + at);
        const float of[4] = {x.x, x.y, x.z, x.w};
        uint32_t keys[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) keys[i] = at + i < count ? max(key_of(of[i]), 1u) : 0;
        visit(keys, at);
    }
}

// Adds up the histograms of all CTAs of the cluster. Each CTA has its histogram in `bins` of its
// shared memory. Every CTA gets the sum in s.totals.
__device__ __forceinline__ void add_up(const Cluster& cluster, Shared& s, const uint32_t* bins) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x < kClusterBins)
        s.totals[threadIdx.x] = cluster.ctas > 1 ? 0 : bins[threadIdx.x];
    __syncthreads();
    if (cluster.ctas == 1) return;
    cluster.sync();
    if (warp < int(cluster.ctas)) {
        const uint32_t from = ptx::mapa(ptx::shared_address(bins), warp);
        uint32_t of[kClusterBins / 32];
#pragma unroll
        for (int i = 0; i < kClusterBins / 32; ++i)
            of[i] = ptx::ld_shared_cluster_u32(from + (i * 32 + lane) * 4);
#pragma unroll
        for (int i = 0; i < kClusterBins / 32; ++i)
            if (of[i]) atomicAdd(&s.totals[i * 32 + lane], of[i]);
    }
    __syncthreads();
}

// Finds the threshold of the cluster's keys. It is a single key, or a range with so few keys that
// they are compared pair by pair.
__device__ __forceinline__ Threshold find_threshold(const Cluster& cluster, Shared& s,
                                                    const float* own, int count, uint32_t topk,
                                                    uint32_t seen, const SampleEstimate& estimate) {
    // At first, all keys from the estimate on are inside, however large they are.
    const uint32_t lowest = max(estimate.key(), 1u);
    Threshold t = {lowest, ~0u - lowest, topk, seen};
    uint32_t range = estimate.range ? estimate.range : t.width;
    // Each round has bins of its own: other CTAs may still read those of the previous round.
    for (uint32_t* bins = s.bins;; bins += kClusterBins) {
        const int shift = shift_for(range, kClusterBinBits);
        each_vector(own, count, [&](const uint32_t (&keys)[4], int) {
#pragma unroll
            for (const uint32_t key : keys)
                if (t.is_inside(key)) atomicAdd(&bins[t.bin_of(key, shift, kClusterBins)], 1u);
        });
        __syncthreads();
        add_up(cluster, s, bins);
        if (threadIdx.x == 0) s.bin = kClusterBins;
        __syncthreads();
        find_bin(s, s.totals, kClusterBins, t.wanted);
        if (s.bin < kClusterBins)
            t.enter(s, shift, kClusterBins);
        else  // The estimate was too high.
            t = {1, ~0u - 1, topk, seen};
        if (t.width == 0 || t.inside <= kMaxInside || t.inside == t.wanted) return t;
        range = t.width;
        __syncthreads();
    }
}

// Numbers of keys in the CTAs before this one: keys above the threshold's range, and those inside
// it. If all keys inside are chosen, they count as keys above.
struct Before {
    uint32_t above, inside;
};

// Exchanges the counts of all CTAs of the cluster. Once all CTAs have arrived at the cluster's next
// barrier, none of them reads another's shared memory any more.
__device__ __forceinline__ Before exchange(const Cluster& cluster, Shared& s) {
    const int lane = threadIdx.x % 32;
    cluster.sync();
    uint2 of = {0, 0};
    if (lane < int(cluster.rank))
        of = ptx::ld_shared_cluster_v2_u32(ptx::mapa(ptx::shared_address(&s.counts), lane));
    return {__reduce_add_sync(~0u, of.x), __reduce_add_sync(~0u, of.y)};
}

// Copies the pairs of all CTAs to s.all.
__device__ __forceinline__ void share_pairs(const Cluster& cluster, Shared& s,
                                            const uint64_t* pairs) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp < int(cluster.ctas)) {
        uint32_t own = 0;
        if (lane < int(cluster.ctas))
            own = ptx::ld_shared_cluster_v2_u32(ptx::mapa(ptx::shared_address(&s.counts), lane)).y;
        const uint32_t before = __reduce_add_sync(~0u, lane < warp ? own : 0);
        const uint32_t count = __shfl_sync(~0u, own, warp);
        const uint32_t from = ptx::mapa(ptx::shared_address(pairs), warp);
        for (uint32_t i = lane; i < count; i += 32) {
            const uint2 pair = ptx::ld_shared_cluster_v2_u32(from + i * 8);
            s.all[before + i] = uint64_t(pair.y) << 32 | pair.x;
        }
    }
    __syncthreads();
}

// Chooses from a row, and writes the slots that this CTA has. Shared memory holds the CTA's `count`
// logits from position `begin` on. Bins, bitmaps and counts are zero at entry.
__device__ __forceinline__ void choose_kept(Shared& s, const Buffers& buffers,
                                            const KernelParams& p, const Row& row,
                                            const Cluster& cluster, const SampleEstimate& estimate,
                                            int begin, int count, int32_t* list) {
    float* own = buffers.row();
    const Threshold t = find_threshold(cluster, s, own, count, p.topk, row.seen, estimate);

    // All keys above the threshold's range are chosen. If only some keys inside the range are,
    // there are two cases. Few keys become pairs of key and position, and the largest pairs are
    // chosen. Many keys are all equal; a bitmap marks them, and those of the lowest positions are
    // chosen.
    const bool whole = t.inside == t.wanted, tied = !whole && t.inside > kMaxInside;
    uint64_t* pairs = reinterpret_cast<uint64_t*>(s.bins + kBins) - kMaxInside;
    uint32_t* equal = buffers.tied(p.shared_resident);
    const int words = (count + 31) / 32;
    uint32_t above = 0, inside = 0;
    each_vector(own, count, [&](const uint32_t (&keys)[4], int at) {
        uint32_t marks = 0, ties = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (keys[j] >= t.lowest) marks |= 1u << j;
        if (marks == 0) return;
        if (!whole) {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (t.is_inside(keys[j])) ties |= 1u << j;
            marks ^= ties;
        }
        above += __popc(marks);
        if (marks) atomicOr(&buffers.chosen[at / 32], marks << at % 32);
        if (ties == 0) return;
        if (tied) {
            inside += __popc(ties);
            atomicOr(&equal[at / 32], ties << at % 32);
            return;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (ties >> j & 1)
                pairs[atomicAdd(&s.counts.y, 1u)] =
                    uint64_t(keys[j]) << 32 | uint32_t(~(begin + at + j));
    });
    above = __reduce_add_sync(~0u, above);
    inside = __reduce_add_sync(~0u, inside);
    if (threadIdx.x % 32 == 0) {
        atomicAdd(&s.counts.x, above);
        if (tied) atomicAdd(&s.counts.y, inside);
    }
    __syncthreads();
    const Before before = exchange(cluster, s);
    uint32_t ahead = before.above;
    if (tied) {
        const uint32_t skipped = min(before.inside, t.wanted), wanted = t.wanted - skipped;
        ahead += skipped;
        for_each_word(s, equal, words, [&](int word, uint32_t bits, uint32_t earlier) {
            buffers.chosen[word] |= first_bits(bits, earlier < wanted ? wanted - earlier : 0);
        });
    } else if (!whole) {
        share_pairs(cluster, s, pairs);
        bool earlier = false;
        if (threadIdx.x < t.inside) {
            const uint64_t pair = s.all[threadIdx.x];
            uint32_t rank = 0;
            for (uint32_t i = 0; i < t.inside; ++i) rank += s.all[i] > pair;
            const int position = int(~uint32_t(pair));
            earlier = rank < t.wanted && position < begin;
            if (rank < t.wanted && position >= begin && position < begin + count)
                mark(buffers.chosen, position - begin);
        }
        ahead += __syncthreads_count(earlier);
    }
    if (cluster.ctas > 1) ptx::barrier_cluster_arrive();
    // The buffer is large enough: no CTA has more positions than logits.
    write_list(s, p.rows, row, buffers.chosen, words, begin, buffers.positions(), list + ahead);
    if (cluster.ctas > 1) ptx::barrier_cluster_wait();
}

// Loads this CTA's logits, takes the sample, and calls choose_kept.
__device__ __forceinline__ void choose_shared_resident(Shared& s, const Buffers& buffers,
                                                       const KernelParams& p, const Row& row,
                                                       const Cluster& cluster, const float* logits,
                                                       int begin, int count, int32_t* list) {
    start_row(s, buffers.row(), logits + begin, count, p.vectors);
    float4 sample[Shared::kSampledEach];
    load_sample<kThreads>(sample, logits, row.seen, p.vectors);
    const SampleEstimate estimate = estimate_from(s, sample, row.seen, p.topk);
    clear_bins(s);
    s.arrived.wait(0);
    __syncthreads();
    choose_kept(s, buffers, p, row, cluster, estimate, begin, count, list);
}

}  // namespace mla::sm90::topk
