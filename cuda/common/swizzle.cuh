// The place of a row's 16-byte chunks in a swizzled tile of shared memory.
//
// The chunks of a row are permuted by the row's number. Eight neighbouring rows therefore have
// their chunks of one column in eight different groups of four banks. With rows of 128 and 64
// bytes, TMA writes this order with SWIZZLE_128B and SWIZZLE_64B, and wgmma reads it. A tile begins
// at a multiple of 1024 bytes.
#pragma once

#include <cstdint>

namespace mla {

// Offset in bytes from the tile's start.
template <uint32_t row_bytes>
__host__ __device__ constexpr uint32_t swizzled(uint32_t row, uint32_t chunk) {
    static_assert(row_bytes >= 32 && (row_bytes & (row_bytes - 1)) == 0, "whole chunks");
    if constexpr (row_bytes < 128) {
        constexpr uint32_t rows = 128 / row_bytes;  // of 128 bytes
        return row * row_bytes + ((chunk ^ (row / rows % (row_bytes / 16))) << 4);
    } else {
        return row * row_bytes + ((chunk ^ (row & 7)) << 4);
    }
}

}  // namespace mla
