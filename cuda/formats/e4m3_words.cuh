// e4m3 bytes become 16-bit floats by shifts and one multiplication, which every GPU has: from sm_89
// on there is an instruction, but PTX for Ampere cannot name it.
#pragma once

#include "ptx/sm80.cuh"

namespace mla {

template <typename T>
struct E4m3Fields;

// The exponent and mantissa of a byte, moved to where T has them, are its value times 2^-120.
template <>
struct E4m3Fields<__nv_bfloat16> {
    static constexpr int kShift = 4;
    static constexpr uint32_t kMask = 0x07f007f0, kUnit = 0x7b807b80;
};

// The same, times 2^-8.
template <>
struct E4m3Fields<__half> {
    static constexpr int kShift = 1;
    static constexpr uint32_t kMask = 0x3f803f80, kUnit = 0x5c005c00;
};

// The values of bytes 0 and 2 of a word.
template <typename T>
__device__ __forceinline__ uint32_t e4m3_even(uint32_t word) {
    using F = E4m3Fields<T>;
    const uint32_t bits = ((word << 8) & 0x80008000u) | ((word << (8 - F::kShift)) & F::kMask);
    return ptx::mul_rn_x2<T>(bits, F::kUnit);
}

// The values of bytes 1 and 3.
template <typename T>
__device__ __forceinline__ uint32_t e4m3_odd(uint32_t word) {
    using F = E4m3Fields<T>;
    const uint32_t bits = (word & 0x80008000u) | ((word >> F::kShift) & F::kMask);
    return ptx::mul_rn_x2<T>(bits, F::kUnit);
}

// Collects in the highest bit of each byte whether one of the words had a NaN there, which the
// functions above take for 480.
__device__ __forceinline__ void e4m3_note_nan(uint32_t& seen, uint32_t word) {
    seen |= (word & 0x7f7f7f7fu) + 0x01010101u;
}

}  // namespace mla
