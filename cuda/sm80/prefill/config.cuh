// One instantiation of the kernel, and where things lie in its shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>

#include "params.cuh"

namespace mla::sm80::prefill {

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
};

}  // namespace mla::sm80::prefill
