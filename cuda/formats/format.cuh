// The description of a cache format. Each format has a file here, named after it, with its Row: the
// layout of one token's row in memory, and how it is written, read and dequantised, an octet at a
// time. formats.cuh lists them all.
#pragma once

#include "../common/octet.cuh"
#include "../include/mla.h"

namespace mla {

// DeepSeek's widths: kernels that know them unroll.
constexpr int kR1Latent = 512;
constexpr int kR1Rope = 64;

// Facts about a row for the host: its bytes, the offset of its rotary part, and the alignments of
// its accesses.
struct RowShape {
    int64_t bytes;
    int64_t rope_offset;
    int64_t octet_alignment;
    int64_t element_alignment;
};

// One over a scale in two parts. `high` is rounded down, and `low` = 1 / scale - high is rounded
// up. `low` is never below high * 2^-60.
struct Inverse {
    float high, low;
};

// x / scale, close enough to round to the same e4m3 byte as the quotient in f32 does. For values of
// 16 bits, this takes two instructions. All significands of x and of the scale were tried. No
// quotient and its approximation here lie on two sides of a number of five significant bits. Such
// numbers are the borders between e4m3 codes. `low` has the sign of `high` and is not zero. Zeros
// therefore keep their sign, infinity stays infinity, and a quotient too large for f32 becomes
// infinity. e4m3 saturates all of them.
template <typename Source>
__device__ __forceinline__ float quotient(float x, float scale, const Inverse& inverse) {
    if constexpr (sizeof(Source) == 2) return __fmaf_rn(x, inverse.high, __fmul_rn(x, inverse.low));
    return __fdiv_rn(x, scale);
}

// Divisor of a latent value that becomes a byte.
struct Scale {
    float value;
    Inverse inverse;
};

// Specialised by each format:
//
//   shape(L, R)          its RowShape for L latent and R rotary values
//   kTensorScale         true if the whole cache has one scale, `cache_scale`
//   kTokenScale          true if each latent has one scale. token_scale(amax) gives it for the
//                        latent's largest magnitude, and put_scale() writes it
//   kSplits              true if rotary keys may lie in a tensor of their own
//   kLatentMultiple      L must be a multiple of this
//   latent_scale(...)    the scale of a latent octet; called by all lanes of a warp together
//   put_latent, put_rope write an octet of a latent, and of a rotary key
//   latent, rope         read an octet of a latent, and of a rotary key, as it is stored
//   value                dequantises such an octet
template <MlaCacheFormat>
struct Row;

// Offset of a slot's row. Unsigned 32-bit division is several times cheaper than 64-bit; the host
// makes sure that a cache has fewer than 2^31 slots.
__device__ __forceinline__ int64_t row_offset(uint32_t slot, uint32_t page_size,
                                              int64_t page_stride, int64_t slot_stride) {
    return slot / page_size * page_stride + slot % page_size * slot_stride;
}

}  // namespace mla
