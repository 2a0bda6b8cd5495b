// A bitmap of a row's positions, and the list of those that are set.
#pragma once

#include "../../../ptx/lanes.cuh"
#include "params.cuh"

namespace mla::sm90::topk {

using ptx::inclusive_sum;

__device__ __forceinline__ void mark(uint32_t* bitmap, uint32_t position) {
    atomicOr(&bitmap[position / 32], 1u << position % 32);
}

// Calls `visit` for each word with its index, the word, and the number of set bits in earlier
// words. Returns the number of all set bits. Each thread has an odd number of consecutive words.
// The words that a warp reads together are therefore in different banks.
template <typename S, typename Visit>
__device__ __forceinline__ int for_each_word(S& s, const uint32_t* bitmap, int words,
                                             const Visit& visit) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int each = (words + S::kThreads - 1) / S::kThreads | 1;
    const int begin = min(int(threadIdx.x) * each, words), end = min(begin + each, words);
    uint32_t own = 0;
    for (int i = begin; i < end; ++i) own += __popc(bitmap[i]);
    const uint32_t inclusive = inclusive_sum(own);
    if (lane == 31) s.warp_sums[warp] = inclusive;
    __syncthreads();
    const uint32_t of_warp = lane < S::kWarps ? s.warp_sums[lane] : 0;
    const uint32_t all = __reduce_add_sync(~0u, of_warp);
    uint32_t before = __reduce_add_sync(~0u, lane < warp ? of_warp : 0) + inclusive - own;
    for (int i = begin; i < end; ++i) {
        const uint32_t bits = bitmap[i];
        visit(i, bits, before);
        before += __popc(bits);
    }
    __syncthreads();
    return int(all);
}

// The lowest `count` of the bits that are set.
__device__ __forceinline__ uint32_t first_bits(uint32_t bits, uint32_t count) {
    while (uint32_t(__popc(bits)) > count) bits ^= 0x80000000u >> __clz(bits);
    return bits;
}

// Writes the slots of `count` positions. All threads take part, because each load depends on a load
// from the block table.
template <int kThreads, bool kPower>
__device__ __forceinline__ void translate(const Requests& requests, const Row& row,
                                          const int32_t* positions, int count, int32_t* list) {
    // A thread's part of a list of 2048.
    constexpr int kBatch = 2048 / kThreads;
    for (int base = threadIdx.x; base < count; base += kBatch * kThreads) {
        int32_t slots[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (base + i * kThreads < count)
                slots[i] = indexer::slot_of<kPower>(requests, row, positions[base + i * kThreads]);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (base + i * kThreads < count) list[base + i * kThreads] = slots[i];
    }
}

// Writes the slots of the set positions in ascending order. The first bit is that of position
// `begin`. `positions` is a buffer with room for all set positions. If it is null, the list itself
// is the buffer.
template <typename S>
__device__ __forceinline__ void write_list(S& s, const Requests& requests, const Row& row,
                                           const uint32_t* bitmap, int words, int begin,
                                           int32_t* positions, int32_t* list) {
    if (!positions) positions = list;
    const int set = for_each_word(s, bitmap, words, [&](int word, uint32_t bits, uint32_t before) {
        for (; bits; bits &= bits - 1) positions[before++] = begin + word * 32 + __ffs(bits) - 1;
    });
    if (requests.page_shift >= 0)
        translate<S::kThreads, true>(requests, row, positions, set, list);
    else
        translate<S::kThreads, false>(requests, row, positions, set, list);
}

}  // namespace mla::sm90::topk
