// One instantiation of the kernel, and where things lie in its shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>

#include "params.cuh"

namespace mla::sm80::prefill {

// What a CTA works on, in shared memory: there it occupies no registers from one use to the next.
struct Item {
    // The request's first key and value of the head.
    const char *key_nope, *key_rope, *value;
    // The request's first query row among all, and the CTA's within the request.
    int query_begin, first_row;
    int queries, head;
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
    static constexpr int kItemOffset = kValueOffset + 2 * kValueBytes;
    static constexpr int kSharedBytes = kItemOffset + static_cast<int>(sizeof(Item));
};

}  // namespace mla::sm80::prefill
