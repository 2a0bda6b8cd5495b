// A bit for each position of a row, and the list of those that are set.
#pragma once

#include "params.cuh"

namespace mla::sm90::topk {

__device__ __forceinline__ void mark(uint32_t* bitmap, uint32_t position) {
    atomicOr(&bitmap[position / 32], 1u << position % 32);
}

__device__ __forceinline__ uint32_t inclusive_sum(uint32_t x) {
    const int lane = threadIdx.x % 32;
    for (int delta = 1; delta < 32; delta *= 2) {
        const uint32_t before = __shfl_up_sync(~0u, x, delta);
        if (lane >= delta) x += before;
    }
    return x;
}

// Calls `visit` with the number of each word, the word, and how many bits are set before it. A warp
// has words that follow each other.
template <typename Visit>
__device__ __forceinline__ void for_each_word(Shared& s, const uint32_t* bitmap, int words,
                                              const Visit& visit) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int each = (words + kThreads - 1) / kThreads * 32;
    const int begin = warp * each, end = min(begin + each, words);
    uint32_t own = 0;
    for (int i = begin + lane; i < end; i += 32) own += __popc(bitmap[i]);
    own = __reduce_add_sync(~0u, own);
    if (lane == 0) s.warp_sums[warp] = own;
    __syncthreads();
    uint32_t before = __reduce_add_sync(~0u, lane < warp ? s.warp_sums[lane] : 0);
    for (int base = begin; base < end; base += 32) {
        const uint32_t bits = base + lane < end ? bitmap[base + lane] : 0;
        const uint32_t count = __popc(bits), inclusive = inclusive_sum(count);
        if (base + lane < end) visit(base + lane, bits, before + inclusive - count);
        before += __shfl_sync(~0u, inclusive, 31);
    }
    __syncthreads();
}

// Writes the slots of the set positions in ascending order, of which there are `topk`. `positions`
// is room for as many, if there is such a place, or null.
__device__ __forceinline__ void write_list(Shared& s, const Requests& requests, const Row& row,
                                           const uint32_t* bitmap, int words, int topk,
                                           int32_t* positions, int32_t* list) {
    if (!positions) positions = list;
    for_each_word(s, bitmap, words, [&](int word, uint32_t bits, uint32_t before) {
        for (; bits; bits &= bits - 1) positions[before++] = word * 32 + __ffs(bits) - 1;
    });
    // All threads at once, since every one waits for the block table.
    constexpr int kBatch = 4;
    for (int base = threadIdx.x; base < topk; base += kBatch * kThreads) {
        int32_t slots[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (base + i * kThreads < topk)
                slots[i] = indexer::slot_of(requests, row, positions[base + i * kThreads]);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (base + i * kThreads < topk) list[base + i * kThreads] = slots[i];
    }
}

}  // namespace mla::sm90::topk
