// A bit set over 1024 consecutive items, kept by a warp: lane l has the bits of the items from 32 l
// on. The place of a marked item is the number of marked items before it. All lanes call each
// function.
#pragma once

#include "lanes.cuh"

namespace mla {

#ifdef __CUDA_ARCH__
struct Marks {
    static constexpr int kMost = 32 * Lanes::kCount;
    int count = 0;

    // Marks those of 0, 1, ... for which `is_marked` holds. It is called for some items beyond the
    // last of `things`, too.
    template <typename F>
    __device__ void set(int things, const F& is_marked) {
        own = 0;
#pragma unroll 1
        for (int from = 0; from < things && from < kMost; from += 2 * Lanes::kCount) {
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

    // First item of the block of 32 items that contains the item at `place`, which is below
    // `count`.
    __device__ int block_of(int place) const {
        return 32 * (__popc(Lanes::ballot(before <= place)) - 1);
    }

    // True if the lane's item of the block that begins with `block` is marked and its place is at
    // least `first` and below `end`.
    __device__ bool has(int block, int first, int end) const {
        const unsigned word = Lanes::of(int(own), block / 32);
        const int place = Lanes::of(before, block / 32) + Lanes::before(word);
        return word >> Lanes::own() & 1 && place >= first && place < end;
    }

    // The item at a place below `count`.
    __device__ int at(int place) const {
        const int block = block_of(place);
        return block + Lanes::first(has(block, place, place + 1));
    }

  private:
    // The lane's 32 bits, and the number of marked items before them.
    unsigned own = 0;
    int before = 0;
};
#else
struct Marks {
    static constexpr int kMost = 1024;
    int count = 0;

    template <typename F>
    void set(int things, const F& is_marked) {
        count = 0;
        for (int at = 0; at < things && at < kMost; at++) {
            places[at] = is_marked(at) ? count : -1;
            if (places[at] >= 0) marked[count++] = at;
        }
    }

    // A block is one item.
    int block_of(int place) const { return marked[place]; }
    bool has(int block, int first, int end) const {
        return places[block] >= first && places[block] < end;
    }
    int at(int place) const { return marked[place]; }

  private:
    int marked[kMost], places[kMost];
};
#endif

}  // namespace mla
