// One instantiation of the kernel, and where things lie in its shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>

#include "params.cuh"
#include "sm80/split_combine.cuh"

namespace mla::sm80::prefill {

// What a CTA works on, in shared memory: there it occupies no registers from one use to the next.
// Each of the four takes the place of a chunk.
struct TileItem {
    // The request's first query row among all, and how many it has; the CTA's first one.
    int query_begin, query_count, first_row;
    int head;
};
struct KeyItem {
    // The request's first key of the head.
    const char *nope, *rope;
};
struct ValueItem {
    const char* rows;
    // Keys that some row of the CTA sees, and those that its first row would if there were enough.
    int needed, seen;
};

struct SplitItem {
    // Among all tiles; among the CTAs that divide its keys.
    int tile, split;
};

// A CTA has Warps * WarpTiles * 16 query rows of one head; Keys: keys per tile.
template <typename Element_, int QkDim, int VDim, int WarpTiles, int Warps, int Keys>
struct Config {
    using Element = Element_;
    static constexpr int kQkDim = QkDim;
    static constexpr int kVDim = VDim;
    static constexpr int kWarpTiles = WarpTiles;
    static constexpr int kKeys = Keys;
    static constexpr int kThreads = 32 * Warps;
    static constexpr int kRows = 16 * WarpTiles * Warps;

    // An odd number of 16-byte chunks: the same chunks of eight rows lie in different banks.
    static constexpr int kQkPitch = QkDim * 2 + 16;
    static constexpr int kVPitch = VDim * 2 + 16;
    static constexpr int kKeyOffset = kRows * kQkPitch;
    static constexpr int kValueOffset = kKeyOffset + Keys * kQkPitch;
    static constexpr int kSharedBytes = kValueOffset + Keys * kVPitch;
    // Behind the first query rows: what makes the number of chunks odd is not used otherwise.
    static constexpr int kTileItemOffset = QkDim * 2;
    static constexpr int kKeyItemOffset = kTileItemOffset + kQkPitch;
    static constexpr int kValueItemOffset = kKeyItemOffset + kQkPitch;
    static constexpr int kSplitItemOffset = kValueItemOffset + kQkPitch;

    // Where the keys were, once there are none.
    static constexpr int kStatisticsOffset = kKeyOffset;
    static constexpr int kExchangeOffset = kStatisticsOffset + int(sizeof(SplitShared<kRows>));
    static_assert(kStatisticsOffset % 16 == 0 && sizeof(SplitShared<kRows>) % 16 == 0);
    static_assert(kExchangeOffset + kThreads * 16 <= kSharedBytes);

    // Columns of a key that the head has for itself; 0 where more than one number is possible.
    static constexpr int kNopeDim = QkDim == 192 ? 128 : QkDim == 256 ? 0 : 64;
};

}  // namespace mla::sm80::prefill
