// One instantiation of the kernel, and where things lie in its shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>

#include "params.cuh"
#include "sm80/split_combine.cuh"

namespace mla::sm80::prefill {

// What a CTA works on, in shared memory: there it occupies no registers from one use to the next.
struct Item {
    // The request's first query row among all; the CTA's first one among the request's, and how
    // many there are from it on.
    int query_begin, first_row, rows;
    int head;
    // The request's first key of the head, and its value.
    const char *nope, *rope, *values;
    // Its first tile of keys.
    int first_tile;
    // Keys that some row of the CTA sees, those that its first row would if there were enough, and
    // the last tile that has needed ones alone.
    int needed, seen, last_whole;
    // The end of the tiles behind which there is another whole one, or none.
    int whole_end;
    // Of the CTAs that divide these keys: how many there are, which one this is, which counters they
    // have, where the first one's partial result lies, and how long they wait for each other.
    int splits, split, counter, place;
    int64_t patience;
    // The last tile of keys whose values were found to hold one that is no finite number.
    int nonfinite;
};

// Rows of 16-bit numbers in shared memory. The same chunks (of 16 bytes) of eight rows lie in
// different banks: rows of whole 128 bytes have theirs exchanged, as `swizzled` does, and of others
// the number of chunks is made odd. They start at a multiple of 128 bytes.
template <int kColumns>
struct Rows {
    static constexpr int kChunks = kColumns / 8;
    static constexpr bool kSwizzled = kChunks % 8 == 0;
    static constexpr int kPitch = kSwizzled ? kColumns * 2 : kColumns * 2 + 16;
    static_assert(kSwizzled || kChunks % 2 == 0);

    // In bytes from the first row. `chunk` is one of the first eight.
    __device__ static constexpr int at(unsigned row, unsigned chunk) {
        return row * kPitch + (kSwizzled ? chunk ^ row % 8 : chunk) * 16;
    }
    // What is so many chunks, an even number, right of one of a row's first two.
    __device__ static constexpr uint32_t right(uint32_t at, int chunks) {
        return kSwizzled ? (at ^ chunks % 8 * 16) + chunks / 8 * 128 : at + chunks * 16;
    }
};

// A CTA has Warps * WarpTiles * 16 query rows of one head; Keys: keys per tile.
template <typename Element_, int QkDim, int VDim, int WarpTiles, int Warps, int Keys>
struct Config {
    using Element = Element_;
    using QkRows = Rows<QkDim>;
    using VRows = Rows<VDim>;
    static constexpr int kQkDim = QkDim;
    static constexpr int kVDim = VDim;
    static constexpr int kWarpTiles = WarpTiles;
    static constexpr int kKeys = Keys;
    static constexpr int kThreads = 32 * Warps;
    static constexpr int kWarpRows = 16 * WarpTiles;
    static constexpr int kRows = kWarpRows * Warps;
    // CTAs of an SM that there are registers for.
    static constexpr int kResident = WarpTiles == 1 && VDim <= 128 ? 3 : 2;

    static constexpr int kKeyOffset = kRows * QkRows::kPitch;
    static constexpr int kValueOffset = kKeyOffset + Keys * QkRows::kPitch;
    static constexpr int kItemOffset = kValueOffset + Keys * VRows::kPitch;
    static constexpr int kSharedBytes = kItemOffset + int(sizeof(Item));
    static_assert(kKeyOffset % 128 == 0 && kValueOffset % 128 == 0);

    // Where the keys were, once there are none.
    static constexpr int kStatisticsOffset = kKeyOffset;
    static constexpr int kExchangeOffset = kStatisticsOffset + int(sizeof(SplitShared<kRows>));
    static_assert(kStatisticsOffset % 16 == 0 && sizeof(SplitShared<kRows>) % 16 == 0);
    static_assert(kExchangeOffset + kThreads * 16 <= kItemOffset);

    // Columns of a key that the head has for itself; 0 where more than one number is possible.
    static constexpr int kNopeDim = QkDim == 192 ? 128 : QkDim == 256 ? 0 : 64;
};

}  // namespace mla::sm80::prefill
