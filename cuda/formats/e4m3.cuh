// Octets of e4m3 bytes, which the formats of fp8 are made of.
#pragma once

#include <cuda_fp8.h>

#include "../common/octet.cuh"

namespace mla {

__device__ __forceinline__ Octet<uint8_t> e4m3_octet(const float (&x)[kOctet]) {
    Octet<uint8_t> to;
    uint32_t* words = reinterpret_cast<uint32_t*>(&to);
#pragma unroll
    for (int i = 0; i < kOctet; i += 4) {
        const uint32_t low = __nv_cvt_float2_to_fp8x2({x[i], x[i + 1]}, __NV_SATFINITE, __NV_E4M3);
        const uint32_t high =
            __nv_cvt_float2_to_fp8x2({x[i + 2], x[i + 3]}, __NV_SATFINITE, __NV_E4M3);
        words[i / 4] = low | high << 16;
    }
    return to;
}

__device__ __forceinline__ void from_e4m3_octet(const Octet<uint8_t>& from, float (&x)[kOctet]) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&from);
#pragma unroll
    for (int i = 0; i < kOctet; i += 2) {
        const auto bytes = __nv_fp8x2_storage_t(words[i / 4] >> 8 * (i % 4));
        const float2 pair = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(bytes, __NV_E4M3)));
        x[i] = pair.x;
        x[i + 1] = pair.y;
    }
}

// The larger of `before` and the largest magnitude of an octet. NaN is ignored.
template <typename Source>
__device__ __forceinline__ float largest_magnitude(const Octet<Source>& x, float before) {
    float y[kOctet];
    to_floats(x, y);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) before = fmaxf(before, fabsf(y[i]));
    return before;
}

// Dequantises an octet, rounding once.
template <typename To>
__device__ __forceinline__ Octet<To> scaled(const Octet<uint8_t>& from, float scale) {
    float x[kOctet];
    from_e4m3_octet(from, x);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) x[i] = __fmul_rn(x[i], scale);
    return from_floats<To>(x);
}

}  // namespace mla
