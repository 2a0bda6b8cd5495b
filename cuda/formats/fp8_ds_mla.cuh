// Rows of L bytes of e4m3, an f32 scale for each 128 of them (a power of two), R values of bf16.
#pragma once

#include "e4m3.cuh"
#include "format.cuh"

namespace mla {

// Latent values that share a scale: sixteen octets, half a warp.
constexpr int kScaleGroup = 128;

// The smallest power of two that is at least amax / 448. Since 448 = 1.75 * 2^8, it is 2^(e - 8)
// for an amax of m * 2^e with m up to 1.75, and twice that for a larger m. For a larger m, and only
// then, the addition carries into the exponent.
__device__ __forceinline__ float power_of_two_scale(float amax) {
    const uint32_t bits = __float_as_uint(fmaxf(amax, 1e-4f));
    return __uint_as_float((((bits + 0x1fffff) >> 23) - 8) << 23);
}

template <>
struct Row<MLA_CACHE_FP8_DS_MLA> {
    static constexpr bool kTensorScale = false;
    static constexpr bool kTokenScale = false;
    static constexpr bool kSplits = false;
    static constexpr int64_t kLatentMultiple = kScaleGroup;
    static constexpr RowShape shape(int64_t latent_dim, int64_t rope_dim) {
        const int64_t rope_offset = latent_dim + latent_dim / kScaleGroup * 4;
        return {rope_offset + 2 * rope_dim, rope_offset, 16, 4};
    }

    // The scale of the octet's group, which half a warp computes together. Every lane of the warp
    // must call this, even a lane without an octet (`mine` is false).
    template <typename Source>
    static __device__ __forceinline__ Scale latent_scale(const Octet<Source>& x, bool mine,
                                                         const Scale&) {
        float amax = 0.f;
        if (mine) amax = largest_magnitude(x, amax);
#pragma unroll
        for (int step = 8; step > 0; step /= 2)
            amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
        const float scale = power_of_two_scale(amax);
        return {scale, {__uint_as_float(0x7f000000 - __float_as_uint(scale)), 0.f}};
    }

    // The latent consists of whole groups, so its octets are whole. A scale is a power of two, so
    // its inverse is one, too, and the product is exact.
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
    static __device__ __forceinline__ void put_rope(char* rope, int octet, const Octet<Source>& x,
                                                    const Scale&, int rope_dim) {
        store<Wide>(reinterpret_cast<__nv_bfloat16*>(rope) + octet * kOctet,
                    convert<__nv_bfloat16>(x), rope_dim - octet * kOctet);
    }

    struct Latent {
        Octet<uint8_t> bytes;
        float scale;
    };
    using Rope = Octet<__nv_bfloat16>;

    template <bool Wide>
    static __device__ __forceinline__ Latent latent(const char* row, int octet, int latent_dim,
                                                    int) {
        return {load<Wide>(reinterpret_cast<const uint8_t*>(row) + octet * kOctet, kOctet),
                reinterpret_cast<const float*>(row + latent_dim)[octet / (kScaleGroup / kOctet)]};
    }

    template <bool Wide>
    static __device__ __forceinline__ Rope rope(const char* rope, int octet, int rope_dim) {
        return load<Wide>(reinterpret_cast<const __nv_bfloat16*>(rope) + octet * kOctet,
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
};

}  // namespace mla
