// The key above which everything is chosen, by histograms of ever narrower ranges of keys.
//
// The first range goes from the least key of the row to its largest, so clustered logits spread
// over the bins as others do. Each further one is the bin in which the last chosen key lies: after
// at most three histograms it is a single key, or ends where a bin does.
#pragma once

#include "../../../ptx/sm90.cuh"
#include "keys.cuh"
#include "params.cuh"

namespace mla::sm90::topk {

// What is chosen: every key above `key`, and the first `ties` of those equal to it.
struct Threshold {
    uint32_t key;
    uint32_t ties;
};

struct Cluster {
    uint32_t rank, ctas;

    __device__ __forceinline__ void sync() const {
        ptx::barrier_cluster_arrive();
        ptx::barrier_cluster_wait();
    }
};

// The range of the whole row's keys, in every thread.
__device__ __forceinline__ Range row_range(const Cluster& cluster, Shared& s, Range range) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    range.reduce();
    if (lane == 0) s.warp_range[warp] = {range.least, range.largest};
    __syncthreads();
    if (warp == 0) {
        Range own;
        if (lane < kWarps) own = {s.warp_range[lane].x, s.warp_range[lane].y};
        own.reduce();
        if (lane == 0) s.range = {own.least, own.largest};
    }
    cluster.sync();
    Range all;
    if (lane < int(cluster.ctas)) {
        const uint32_t address = ptx::mapa(ptx::shared_address(&s.range), lane);
        const uint2 of_cta = ptx::ld_shared_cluster_v2_u32(address);
        all = {of_cta.x, of_cta.y};
    }
    all.reduce();
    return all;
}

// Counts this CTA's keys of a range by bins of 2^shift.
__device__ __forceinline__ void count_bins(Shared& s, const uint32_t* keys, int count,
                                           uint32_t least, uint32_t width, int shift) {
    for (int i = threadIdx.x; i < kBins; i += kThreads) s.bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads) {
        const uint32_t above = keys[i] - least;
        if (above <= width) atomicAdd(&s.bins[above >> shift], 1u);
    }
}

// Adds up the histograms of the cluster's CTAs in `totals` of each: a CTA adds up bins of its own
// and gives the sums to all. Lanes next to each other read the same four bins of different CTAs.
__device__ __forceinline__ void add_bins(const Cluster& cluster, Shared& s) {
    cluster.sync();
    const uint32_t ctas = cluster.ctas;
    const uint32_t source = threadIdx.x % ctas, group = threadIdx.x / ctas;
    const uint32_t bin = cluster.rank * (kBins / ctas) + group * 4;
    uint4 sum = ptx::ld_shared_cluster_v4_u32(ptx::mapa(ptx::shared_address(&s.bins[bin]), source));
    for (uint32_t mask = 1; mask < ctas; mask *= 2) {
        sum.x += __shfl_xor_sync(~0u, sum.x, mask);
        sum.y += __shfl_xor_sync(~0u, sum.y, mask);
        sum.z += __shfl_xor_sync(~0u, sum.z, mask);
        sum.w += __shfl_xor_sync(~0u, sum.w, mask);
    }
    ptx::st_shared_cluster_v4_u32(ptx::mapa(ptx::shared_address(&s.totals[bin]), source), sum);
    cluster.sync();
}
static_assert(kBins == 4 * kThreads, "one group of four bins for each thread");

// Finds the bin, from the last one down, in which the key number `wanted` lies: s.bin, how many
// keys are in bins above it, and how many in it.
__device__ __forceinline__ void find_bin(Shared& s, uint32_t wanted) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int last = kBins - 1 - 4 * int(threadIdx.x);
    uint32_t own[4], sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += own[i] = s.totals[last - i];
    uint32_t inclusive = sum;
    for (int delta = 1; delta < 32; delta *= 2) {
        const uint32_t before = __shfl_up_sync(~0u, inclusive, delta);
        if (lane >= delta) inclusive += before;
    }
    if (lane == 31) s.warp_sums[warp] = inclusive;
    __syncthreads();
    uint32_t above = inclusive - sum;
    for (int i = 0; i < warp; ++i) above += s.warp_sums[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // In one bin of one thread.
        if (above < wanted && wanted <= above + own[i]) {
            s.bin = last - i;
            s.above = above;
            s.inside = own[i];
        }
        above += own[i];
    }
    __syncthreads();
}

// The threshold for the row's `topk` largest keys, of which it has more.
__device__ __forceinline__ Threshold find_threshold(const Cluster& cluster, Shared& s,
                                                    const uint32_t* keys, int count, Range range,
                                                    uint32_t topk) {
    uint32_t least = range.least, width = range.largest - range.least, wanted = topk;
    while (width > 0) {
        const int shift = max(0, 32 - __clz(width) - kBinBits);
        count_bins(s, keys, count, least, width, shift);
        add_bins(cluster, s);
        find_bin(s, wanted);
        const uint32_t below = s.bin << shift;
        least += below;
        width = min(width - below, (1u << shift) - 1);
        wanted -= s.above;
        // All of the bin: what equals its least key, and what is above.
        if (s.inside == wanted) return {least, ~0u};
    }
    return {least, wanted};
}

}  // namespace mla::sm90::topk
