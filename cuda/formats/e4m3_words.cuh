// Conversion of e4m3 bytes to 16-bit floats. Code for sm_89 and later has an instruction for f16.
// Shifts do the same on any GPU, and also convert to bf16.
//
// Shifts move a byte's exponent and mantissa to their places in T, which gives its value times a
// power of two. The missing factor is not applied to these values, but to the MMA's sums, and for
// bf16 in part to the other operand. This takes fewer instructions.
#pragma once

#include "ptx/sm80.cuh"
#include "ptx/sm89.cuh"

namespace mla {

// The driver may compile PTX of compute_80 for any later GPU, but this PTX cannot contain the
// instruction.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr bool kE4m3Instruction = true;
#else
constexpr bool kE4m3Instruction = false;
#endif

template <typename T>
struct E4m3Fields;

// Shifted fields are a byte's value times 2^-120. Sums in f32 would have no bits for such products.
// The MMA's other operand is therefore multiplied by 2^60, and the sums by the remaining 2^60.
template <>
struct E4m3Fields<__nv_bfloat16> {
    static constexpr int kShift = 4;
    static constexpr uint32_t kMask = 0x07f007f0;
    static constexpr int kLift = 60;
    // 2^kLift, twice.
    static constexpr uint32_t kLiftWord = 0x5d805d80;
    static constexpr float kRest = 0x1p60f;
};

// Shifted fields are a byte's value times 2^-8, so the other operand needs no factor.
template <>
struct E4m3Fields<__half> {
    static constexpr int kShift = 1;
    static constexpr uint32_t kMask = 0x3f803f80;
    static constexpr int kLift = 0;
    static constexpr float kRest = 0x1p8f;
};

// The shifted fields of bytes 0 and 2 of a word.
template <typename T>
__device__ __forceinline__ uint32_t e4m3_even(uint32_t word) {
    using F = E4m3Fields<T>;
    return ((word << 8) & 0x80008000u) | ((word << (8 - F::kShift)) & F::kMask);
}

// The shifted fields of bytes 1 and 3.
template <typename T>
__device__ __forceinline__ uint32_t e4m3_odd(uint32_t word) {
    using F = E4m3Fields<T>;
    return (word & 0x80008000u) | ((word >> F::kShift) & F::kMask);
}

// Sets the highest bit of each byte of `seen` if one of the words had a NaN in that byte. The
// functions above convert NaN to 480.
__device__ __forceinline__ void e4m3_note_nan(uint32_t& seen, uint32_t word) {
    seen |= (word & 0x7f7f7f7fu) + 0x01010101u;
}

// For f16: the factor that is left for the operands below, and its logarithm to the base of 2.
constexpr float kE4m3HalfRest = kE4m3Instruction ? 1.f : E4m3Fields<__half>::kRest;
constexpr int kE4m3HalfRestLog2 = kE4m3Instruction ? 0 : 8;

// Converts bytes 0 and 2, and bytes 1 and 3.
__device__ __forceinline__ void e4m3_halves(uint32_t word, uint32_t& even, uint32_t& odd) {
    if constexpr (kE4m3Instruction) {
        const uint2 halves = ptx::cvt_f16x4_e4m3x4(__byte_perm(word, 0, 0x3120));
        even = halves.x;
        odd = halves.y;
    } else {
        even = e4m3_even<__half>(word);
        odd = e4m3_odd<__half>(word);
    }
}

}  // namespace mla
