// A bit set over 1024 consecutive items, kept by a warp: lane l has the bits of the items from 32 l
// on. The rank of a marked item is the number of marked items before it. All lanes call each
// function.
#pragma once

#include "lanes.cuh"

namespace mla {

#ifdef __CUDA_ARCH__
struct WarpBitset {
    static constexpr int kMax = 32 * Lanes::kCount;
    int count = 0;

    // Marks those of the items 0, 1, ... for which `is_marked` holds. `is_marked` is also called
    // for some items beyond the last of `things`.
    template <typename F>
    __device__ void set(int things, const F& is_marked) {
        own = 0;
#pragma unroll 1
        for (int from = 0; from < things && from < kMax; from += 2 * Lanes::kCount) {
            // The loads of both calls are in flight at the same time.
            bool marked[2];
#pragma unroll
            for (int i = 0; i < 2; i++)
                marked[i] = is_marked(from + i * Lanes::kCount + Lanes::own());
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const unsigned word = Lanes::ballot(marked[i]);
                if (from / Lanes::kCount + i == Lanes::own()) own = word;
            }
        }
        const int upto = Lanes::running_sum(__popc(own));
        before = upto - __popc(own);
        count = Lanes::last(upto);
    }

    // First item of the block of 32 items that contains the item of a rank below `count`.
    __device__ int block_of(int rank) const {
        return 32 * (__popc(Lanes::ballot(before <= rank)) - 1);
    }

    // True if the lane's item of the block that begins with `block` is marked and its rank is at
    // least `first` and below `end`.
    __device__ bool has(int block, int first, int end) const {
        const unsigned word = Lanes::of(int(own), block / 32);
        const int rank = Lanes::of(before, block / 32) + Lanes::before(word);
        return word >> Lanes::own() & 1 && rank >= first && rank < end;
    }

    // The item of a rank below `count`.
    __device__ int at(int rank) const {
        const int block = block_of(rank);
        return block + Lanes::first(has(block, rank, rank + 1));
    }

  private:
    // The lane's 32 bits, and the number of marked items before them.
    unsigned own = 0;
    int before = 0;
};
#else
struct WarpBitset {
    static constexpr int kMax = 1024;
    int count = 0;

    template <typename F>
    void set(int things, const F& is_marked) {
        count = 0;
        for (int at = 0; at < things && at < kMax; at++) {
            ranks[at] = is_marked(at) ? count : -1;
            if (ranks[at] >= 0) marked[count++] = at;
        }
    }

    // On the host, a block is one item.
    int block_of(int rank) const { return marked[rank]; }
    bool has(int block, int first, int end) const {
        return ranks[block] >= first && ranks[block] < end;
    }
    int at(int rank) const { return marked[rank]; }

  private:
    int marked[kMax], ranks[kMax];
};
#endif

}  // namespace mla
