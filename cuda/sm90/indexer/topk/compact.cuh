// The chosen positions in ascending order, as slots.
#pragma once

#include "../../../ptx/sm90.cuh"
#include "params.cuh"
#include "threshold.cuh"

namespace mla::sm90::topk {

// Keys of a warp at a time: four of each lane.
constexpr int kStep = 128;

// The keys of a warp, one behind the other: `begin .. end` of the CTA's.
struct Part {
    int begin, end;
};

__device__ __forceinline__ Part part_of(int warp, int count) {
    const int each = (count + kWarps * kStep - 1) / (kWarps * kStep) * kStep;
    return {min(warp * each, count), min((warp + 1) * each, count)};
}

// Of a lane's four keys, a bit for each above the threshold, and for each equal to it.
struct Marks {
    uint32_t above, equal;
};

__device__ __forceinline__ Marks marks(const uint32_t* keys, int at, int end, uint32_t threshold) {
    if (at >= end) return {0, 0};
    // What lies behind the last key is in shared memory all the same.
    const uint4 key = *reinterpret_cast<const uint4*>(keys + at);
    const uint32_t valid = end - at >= 4 ? 15u : (1u << (end - at)) - 1;
    const uint32_t above = uint32_t(key.x > threshold) | uint32_t(key.y > threshold) << 1 |
                           uint32_t(key.z > threshold) << 2 | uint32_t(key.w > threshold) << 3;
    const uint32_t equal = uint32_t(key.x == threshold) | uint32_t(key.y == threshold) << 1 |
                           uint32_t(key.z == threshold) << 2 | uint32_t(key.w == threshold) << 3;
    return {above & valid, equal & valid};
}

__device__ __forceinline__ uint2 add(uint2 a, uint2 b) { return {a.x + b.x, a.y + b.y}; }

__device__ __forceinline__ uint2 sum_of_warp(uint2 x) {
    return {__reduce_add_sync(~0u, x.x), __reduce_add_sync(~0u, x.y)};
}

// How many keys above the threshold and equal to it lie before this CTA's, before this warp's, and
// before the next CTA's, in the whole row.
struct Counts {
    uint2 cta, warp, next;
};

// The cluster's CTAs have to wait for each other before they end.
__device__ __forceinline__ Counts counts_before(const Cluster& cluster, Shared& s,
                                                const uint32_t* keys, Part part,
                                                uint32_t threshold) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint2 own = {0, 0};
    for (int at = part.begin + lane * 4; at < part.end; at += kStep) {
        const Marks m = marks(keys, at, part.end, threshold);
        own = add(own, {uint32_t(__popc(m.above)), uint32_t(__popc(m.equal))});
    }
    own = sum_of_warp(own);
    if (lane == 0) s.warp_counts[warp] = own;
    __syncthreads();
    const uint2 of_warp = lane < kWarps ? s.warp_counts[lane] : uint2{0, 0};
    const uint2 of_cta = sum_of_warp(of_warp);
    if (threadIdx.x == 0) s.counts = of_cta;
    const uint2 before = sum_of_warp(lane < warp ? of_warp : uint2{0, 0});
    cluster.sync();
    uint2 of_others = {0, 0};
    if (lane < int(cluster.rank))
        of_others = ptx::ld_shared_cluster_v2_u32(ptx::mapa(ptx::shared_address(&s.counts), lane));
    of_others = sum_of_warp(of_others);
    return {of_others, add(of_others, before), add(of_others, of_cta)};
}

// Where in the list the chosen ones of those before stand, above the threshold or equal to it.
__device__ __forceinline__ uint32_t place_of(uint2 before, uint32_t ties) {
    return before.x + min(before.y, ties);
}

// Writes the positions of a warp's chosen keys. `first` is the position of the CTA's first key.
__device__ __forceinline__ void write_positions(int32_t* list, const uint32_t* keys, int first,
                                                Part part, Threshold threshold, uint2 before) {
    const int lane = threadIdx.x % 32;
    for (int base = part.begin; base < part.end; base += kStep) {
        const int at = base + lane * 4;
        const Marks m = marks(keys, at, part.end, threshold.key);
        if (!__any_sync(~0u, m.above | m.equal)) continue;
        // Both counts in one word: at most 128 of each.
        const uint32_t own = __popc(m.above) | __popc(m.equal) << 16;
        uint32_t inclusive = own;
        for (int delta = 1; delta < 32; delta *= 2) {
            const uint32_t x = __shfl_up_sync(~0u, inclusive, delta);
            if (lane >= delta) inclusive += x;
        }
        const uint32_t exclusive = inclusive - own;
        uint2 rank = add(before, {exclusive & 0xffffu, exclusive >> 16});
        for (uint32_t rest = m.above | m.equal; rest; rest &= rest - 1) {
            const int i = __ffs(rest) - 1;
            const bool above = m.above >> i & 1;
            if (above || rank.y < threshold.ties)
                list[place_of(rank, threshold.ties)] = first + at + i;
            rank.x += above;
            rank.y += !above;
        }
        const uint32_t all = __shfl_sync(~0u, inclusive, 31);
        before = add(before, {all & 0xffffu, all >> 16});
    }
}

// Makes slots of the positions that this CTA has written, from its first place in the list on: all
// threads at once, since every one waits for the block table.
__device__ __forceinline__ void translate(const Requests& p, const Row& row, int32_t* list,
                                          uint32_t begin, uint32_t end) {
    constexpr int kBatch = 4;
    for (uint32_t base = begin + threadIdx.x; base < end; base += kBatch * kThreads) {
        int32_t slots[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (base + i * kThreads < end)
                slots[i] = indexer::slot_of(p, row, __ldcg(list + base + i * kThreads));
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (base + i * kThreads < end) list[base + i * kThreads] = slots[i];
    }
}

}  // namespace mla::sm90::topk
