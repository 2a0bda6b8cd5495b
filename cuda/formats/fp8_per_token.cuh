// Rows of L bytes of e4m3, R values of bf16, and the f32 scale of the L bytes.
#pragma once

#include <cfloat>

#include "e4m3.cuh"
#include "format.cuh"

namespace mla {

template <>
struct Row<MLA_CACHE_FP8_PER_TOKEN> {
    static constexpr bool kTensorScale = false;
    static constexpr bool kTokenScale = true;
    static constexpr bool kSplits = false;
    static constexpr int64_t kLatentMultiple = 4;
    static constexpr int64_t scale_offset(int64_t latent_dim, int64_t rope_dim) {
        return latent_dim + (rope_dim + 1) / 2 * 4;
    }
    // Rows consist of whole units of 16 bytes, in which they are copied.
    static constexpr RowShape shape(int64_t latent_dim, int64_t rope_dim) {
        return {(scale_offset(latent_dim, rope_dim) + 4 + 15) / 16 * 16, latent_dim, 16, 16};
    }

    // The scale of a row is amax / 448. amax is bounded, so that rows of zeros and rows with an
    // infinity have a scale, too. All lanes of a warp call this together, each with the largest
    // magnitude of its own octets.
    static __device__ __forceinline__ float token_scale(float amax) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
        return __fdiv_rn(fminf(fmaxf(amax, 1e-4f), FLT_MAX), 448.f);
    }

    static __device__ __forceinline__ void put_scale(char* row, float scale, int latent_dim,
                                                     int rope_dim) {
        if (rope_dim % 2)
            *reinterpret_cast<uint16_t*>(row + latent_dim + 2 * int64_t(rope_dim)) = 0;
        *reinterpret_cast<float*>(row + scale_offset(latent_dim, rope_dim)) = scale;
    }

    template <typename Source>
    static __device__ __forceinline__ Scale latent_scale(const Octet<Source>&, bool,
                                                         const Scale& row_scale) {
        return row_scale;
    }

    template <bool Wide, typename Source>
    static __device__ __forceinline__ void put_latent(char* row, int octet, const Octet<Source>& x,
                                                      const Scale& scale, int latent_dim) {
        float y[kOctet];
        to_floats(x, y);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) y[i] = __fdiv_rn(y[i], scale.value);
        store<Wide>(reinterpret_cast<uint8_t*>(row) + octet * kOctet, e4m3_octet(y),
                    latent_dim - octet * kOctet);
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
                                                    int rope_dim) {
        return {load<Wide>(reinterpret_cast<const uint8_t*>(row) + octet * kOctet,
                           latent_dim - octet * kOctet),
                *reinterpret_cast<const float*>(row + scale_offset(latent_dim, rope_dim))};
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
