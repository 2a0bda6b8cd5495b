// How a row of the cache is written and read, an octet at a time, for each format of mla.h.
#pragma once

#include <cuda_fp8.h>

#include "../common/octet.cuh"
#include "../include/mla.h"

namespace mla {

// DeepSeek's widths: kernels that know them unroll.
constexpr int kR1Latent = 512;
constexpr int kR1Rope = 64;

// Latent values that share a scale in MLA_CACHE_FP8_DS_MLA: sixteen octets, half a warp.
constexpr int kScaleGroup = 128;

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

// The smallest power of two that is at least amax / 448. As 448 = 1.75 * 2^8, it is 2^(e - 8) for
// an amax of m * 2^e with m up to 1.75, and twice that above: the addition carries into the
// exponent exactly then.
__device__ __forceinline__ float power_of_two_scale(float amax) {
    const uint32_t bits = __float_as_uint(fmaxf(amax, 1e-4f));
    return __uint_as_float((((bits + 0x1fffff) >> 23) - 8) << 23);
}

// The scale of an octet of the latent: the cache's own, or that of the octet's group, which half a
// warp finds out together. Every lane of the warp must ask, also those without an octet (`mine` is
// false).
template <int Format, typename Source>
__device__ __forceinline__ Scale latent_scale(const Octet<Source>& x, bool mine,
                                              const Scale& cache_scale) {
    if constexpr (Format != MLA_CACHE_FP8_DS_MLA) {
        return cache_scale;
    } else {
        float amax = 0.f;
        if (mine) {
            float y[kOctet];
            to_floats(x, y);
#pragma unroll
            for (int i = 0; i < kOctet; ++i) amax = fmaxf(amax, fabsf(y[i]));
        }
#pragma unroll
        for (int step = 8; step > 0; step /= 2)
            amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
        const float scale = power_of_two_scale(amax);
        return {scale, {__uint_as_float(0x7f000000 - __float_as_uint(scale)), 0.f}};
    }
}

// Rows of L + R equal elements.
template <typename T>
struct PlainRow {
    template <bool Wide, typename Source>
    static __device__ __forceinline__ void put_latent(char* row, int octet, const Octet<Source>& x,
                                                      const Scale&, int latent_dim) {
        store<Wide>(reinterpret_cast<T*>(row) + octet * kOctet, convert<T>(x),
                    latent_dim - octet * kOctet);
    }

    template <bool Wide, typename Source>
    static __device__ __forceinline__ void put_rope(char* row, int octet, const Octet<Source>& x,
                                                    const Scale&, int latent_dim, int rope_dim) {
        store<Wide>(reinterpret_cast<T*>(row) + latent_dim + octet * kOctet, convert<T>(x),
                    rope_dim - octet * kOctet);
    }

    using Latent = Octet<T>;
    using Rope = Octet<T>;

    template <bool Wide>
    static __device__ __forceinline__ Latent latent(const char* row, int octet, int latent_dim) {
        return load<Wide>(reinterpret_cast<const T*>(row) + octet * kOctet,
                          latent_dim - octet * kOctet);
    }

    template <bool Wide>
    static __device__ __forceinline__ Rope rope(const char* row, int octet, int latent_dim,
                                                int rope_dim) {
        return load<Wide>(reinterpret_cast<const T*>(row) + latent_dim + octet * kOctet,
                          rope_dim - octet * kOctet);
    }

    template <typename To>
    static __device__ __forceinline__ Octet<To> value(const Octet<T>& x, float) {
        return convert<To>(x);
    }
};

template <typename To>
__device__ __forceinline__ Octet<To> scaled(const Octet<uint8_t>& from, float scale) {
    float x[kOctet];
    from_e4m3_octet(from, x);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) x[i] = __fmul_rn(x[i], scale);
    return from_floats<To>(x);
}

template <int Format>
struct Row;
template <>
struct Row<MLA_CACHE_F32> : PlainRow<float> {};
template <>
struct Row<MLA_CACHE_F16> : PlainRow<__half> {};
template <>
struct Row<MLA_CACHE_BF16> : PlainRow<__nv_bfloat16> {};

template <>
struct Row<MLA_CACHE_FP8> {
    template <bool Wide, typename Source>
    static __device__ __forceinline__ void put(uint8_t* to, const Octet<Source>& x,
                                               const Scale& scale, int count) {
        float y[kOctet];
        to_floats(x, y);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) y[i] = quotient<Source>(y[i], scale.value, scale.inverse);
        store<Wide>(to, e4m3_octet(y), count);
    }

    template <bool Wide, typename Source>
    static __device__ __forceinline__ void put_latent(char* row, int octet, const Octet<Source>& x,
                                                      const Scale& scale, int latent_dim) {
        put<Wide>(reinterpret_cast<uint8_t*>(row) + octet * kOctet, x, scale,
                  latent_dim - octet * kOctet);
    }

    template <bool Wide, typename Source>
    static __device__ __forceinline__ void put_rope(char* row, int octet, const Octet<Source>& x,
                                                    const Scale& scale, int latent_dim,
                                                    int rope_dim) {
        put<Wide>(reinterpret_cast<uint8_t*>(row) + latent_dim + octet * kOctet, x, scale,
                  rope_dim - octet * kOctet);
    }

    using Latent = Octet<uint8_t>;
    using Rope = Octet<uint8_t>;

    template <bool Wide>
    static __device__ __forceinline__ Latent latent(const char* row, int octet, int latent_dim) {
        return load<Wide>(reinterpret_cast<const uint8_t*>(row) + octet * kOctet,
                          latent_dim - octet * kOctet);
    }

    template <bool Wide>
    static __device__ __forceinline__ Rope rope(const char* row, int octet, int latent_dim,
                                                int rope_dim) {
        return load<Wide>(reinterpret_cast<const uint8_t*>(row) + latent_dim + octet * kOctet,
                          rope_dim - octet * kOctet);
    }

    template <typename To>
    static __device__ __forceinline__ Octet<To> value(const Octet<uint8_t>& x, float scale) {
        return scaled<To>(x, scale);
    }
};

template <>
struct Row<MLA_CACHE_FP8_DS_MLA> {
    // The latent is whole groups, so its octets are whole; a scale is a power of two, so its
    // inverse is one, and the product is exact.
    template <bool Wide, typename Source>
    static __device__ __forceinline__ void put_latent(char* row, int octet, const Octet<Source>& x,
                                                      const Scale& scale, int latent_dim) {
        float y[kOctet];
        to_floats(x, y);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) y[i] *= scale.inverse.high;
        store<Wide>(reinterpret_cast<uint8_t*>(row) + octet * kOctet, e4m3_octet(y), kOctet);
        constexpr int octets = kScaleGroup / kOctet;
        if (octet % octets == 0) {
            reinterpret_cast<float*>(row + latent_dim)[octet / octets] = scale.value;
        }
    }

    template <bool Wide, typename Source>
    static __device__ __forceinline__ void put_rope(char* row, int octet, const Octet<Source>& x,
                                                    const Scale&, int latent_dim, int rope_dim) {
        __nv_bfloat16* to = rope_of(row, latent_dim);
        store<Wide>(to + octet * kOctet, convert<__nv_bfloat16>(x), rope_dim - octet * kOctet);
    }

    struct Latent {
        Octet<uint8_t> bytes;
        float scale;
    };
    using Rope = Octet<__nv_bfloat16>;

    template <bool Wide>
    static __device__ __forceinline__ Latent latent(const char* row, int octet, int latent_dim) {
        return {load<Wide>(reinterpret_cast<const uint8_t*>(row) + octet * kOctet, kOctet),
                reinterpret_cast<const float*>(row + latent_dim)[octet / (kScaleGroup / kOctet)]};
    }

    template <bool Wide>
    static __device__ __forceinline__ Rope rope(const char* row, int octet, int latent_dim,
                                                int rope_dim) {
        return load<Wide>(rope_of(const_cast<char*>(row), latent_dim) + octet * kOctet,
                          rope_dim - octet * kOctet);
    }

    template <typename To>
    static __device__ __forceinline__ Octet<To> value(const Latent& x, float) {
        return scaled<To>(x.bytes, x.scale);
    }

    template <typename To>
    static __device__ __forceinline__ Octet<To> value(const Rope& x, float) {
        return convert<To>(x);
    }

  private:
    static __device__ __forceinline__ __nv_bfloat16* rope_of(char* row, int latent_dim) {
        return reinterpret_cast<__nv_bfloat16*>(row + latent_dim +
                                                latent_dim / kScaleGroup * int(sizeof(float)));
    }
};

// What the host needs to know about a format: bytes of a row, where its rotary part begins, and
// what its accesses are aligned to.
struct RowShape {
    int64_t bytes;
    int64_t rope_offset;
    int64_t octet_alignment;
    int64_t element_alignment;
};

constexpr RowShape row_shape(int format, int64_t latent_dim, int64_t rope_dim) {
    switch (format) {
        case MLA_CACHE_F32: return {4 * (latent_dim + rope_dim), 4 * latent_dim, 16, 4};
        case MLA_CACHE_FP8: return {latent_dim + rope_dim, latent_dim, 8, 1};
        case MLA_CACHE_FP8_DS_MLA: {
            const int64_t rope_offset = latent_dim + latent_dim / kScaleGroup * 4;
            return {rope_offset + 2 * rope_dim, rope_offset, 16, 4};
        }
        default: return {2 * (latent_dim + rope_dim), 2 * latent_dim, 16, 2};
    }
}

// Where a slot's row begins. Unsigned 32-bit division is several times cheaper than 64-bit; the
// host makes sure that a cache has fewer than 2^31 slots.
__device__ __forceinline__ int64_t row_offset(uint32_t slot, uint32_t page_size,
                                              int64_t page_stride, int64_t slot_stride) {
    return slot / page_size * page_stride + slot % page_size * slot_stride;
}

}  // namespace mla
