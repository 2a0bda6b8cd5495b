// Removal of values that are not finite. A probability of 0 times such a value is NaN, so these
// values are zeroed in a KV tile if some query rows do not see them.
//
// Numbers come as words of two values of 16 bits, or of four of e4m3.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "../ptx/sm80.cuh"

namespace mla {

// All bits of a type's exponent, in both halves of a word.
template <typename T>
constexpr uint32_t kExponents = std::is_same_v<T, __half> ? 0x7c007c00u : 0x7f807f80u;

// Sets the bits of those values of a word that are NaN or infinite.
template <typename T>
__device__ __forceinline__ uint32_t not_finite(uint32_t word) {
    constexpr uint32_t low = kExponents<T> & 0xffff, high = kExponents<T> & 0xffff0000u;
    return ((word & low) == low ? 0xffffu : 0u) | ((word & high) == high ? 0xffff0000u : 0u);
}

// e4m3 has no infinities.
template <>
__device__ __forceinline__ uint32_t not_finite<__nv_fp8_e4m3>(uint32_t word) {
    const uint32_t nan = ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
    return (nan >> 7) * 0xffu;
}

// Zeroes the values that are not finite among the 16 bytes at `at` in shared memory. There hardly
// ever are any, so they are handled a word at a time, in few registers.
template <typename T>
__device__ __forceinline__ void clear_not_finite(uint32_t at) {
    const uint4 v = ptx::ld_shared_v4(at);
    if (not_finite<T>(v.x) | not_finite<T>(v.y) | not_finite<T>(v.z) | not_finite<T>(v.w)) {
#pragma unroll 1
        for (uint32_t word = at; word < at + 16; word += 4) {
            const uint32_t x = ptx::ld_shared_s32(word);
            ptx::st_shared(word, x & ~not_finite<T>(x));
        }
    }
}

}  // namespace mla
