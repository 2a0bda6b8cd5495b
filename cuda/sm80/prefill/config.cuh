// One instantiation of the kernel, and where things lie in its shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>

#include "params.cuh"

namespace mla::sm80::prefill {

// What a CTA works on, in shared memory: there it occupies no registers from one use to the next.
// Each of the three takes the place of a chunk.
struct KeyItem {
    // The request's first key of the head.
    const char *nope, *rope;
};
struct ValueItem {
    const char* rows;
    // Keys that some row of the CTA sees, and those that its first row would if there were enough.
    int needed, seen;
};
struct QueryItem {
    // The request's first query row among all, and how many it has; the CTA's first one.
    int begin, count, first;
    int head;
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
    static constexpr int kKeyBytes = Keys * kQkPitch;
    static constexpr int kValueBytes = Keys * kVPitch;
    static constexpr int kKeyOffset = kRows * kQkPitch;
    static constexpr int kValueOffset = kKeyOffset + 2 * kKeyBytes;
    static constexpr int kSharedBytes = kValueOffset + 2 * kValueBytes;
    // Behind the first query rows: what makes the number of chunks odd is not used otherwise.
    static constexpr int kKeyItemOffset = QkDim * 2;
    static constexpr int kValueItemOffset = kKeyItemOffset + kQkPitch;
    static constexpr int kQueryItemOffset = kValueItemOffset + kQkPitch;
};

}  // namespace mla::sm80::prefill
