// What every cache format says of itself. Each has a file here, named after it, with its Row: how
// one token's row lies in memory, how it is written, read and dequantised, an octet at a time.
// formats.cuh lists them all.
#pragma once

#include "../common/octet.cuh"
#include "../include/mla.h"

namespace mla {

// DeepSeek's widths: kernels that know them unroll.
constexpr int kR1Latent = 512;
constexpr int kR1Rope = 64;

// What the host needs to know about a row: its bytes, where its rotary part begins, and what its
// accesses are aligned to.
struct RowShape {
    int64_t bytes;
    int64_t rope_offset;
    int64_t octet_alignment;
    int64_t element_alignment;
};

// One over a scale in two parts: `high` rounded down, and `low` = 1 / scale - high rounded up,
// never below high * 2^-60.
struct Inverse {
    float high, low;
};

// x / scale, near enough to round to the same e4m3 byte as the quotient in f32 does. For values of
// 16 bits that takes two instructions: over all significands of x and of the scale, no quotient and
// no result of theirs lie on two sides of a number of five significant bits, which is where e4m3
// changes. As `low` has the sign of `high` and is not zero, zeros keep their sign, infinity stays
// infinity, and a quotient too large for f32 becomes infinity: e4m3 saturates all of them.
template <typename Source>
__device__ __forceinline__ float quotient(float x, float scale, const Inverse& inverse) {
    if constexpr (sizeof(Source) == 2) return __fmaf_rn(x, inverse.high, __fmul_rn(x, inverse.low));
    return __fdiv_rn(x, scale);
}

// What a latent value is divided by before it becomes a byte.
struct Scale {
    float value;
    Inverse inverse;
};

// Specialised by each format:
//
//   shape(L, R)          its RowShape for L latent and R rotary values
//   kTensorScale         whether the whole cache has one scale, `cache_scale`
//   kLatentMultiple      what L must be a multiple of
//   latent_scale(...)    the scale of a latent octet; asked by all lanes of a warp together
//   put_latent, put_rope write an octet
//   latent, rope, value  read an octet, and dequantise it
template <MlaCacheFormat>
struct Row;

// Where a slot's row begins. Unsigned 32-bit division is several times cheaper than 64-bit; the
// host makes sure that a cache has fewer than 2^31 slots.
__device__ __forceinline__ int64_t row_offset(uint32_t slot, uint32_t page_size,
                                              int64_t page_stride, int64_t slot_stride) {
    return slot / page_size * page_stride + slot % page_size * slot_stride;
}

}  // namespace mla
