// Rows of L + R bytes of e4m3 with one scale for the whole tensor: stored = value / scale.
#pragma once

#include "e4m3.cuh"
#include "format.cuh"

namespace mla {

template <>
struct Row<MLA_CACHE_FP8> {
    static constexpr bool kTensorScale = true;
    static constexpr bool kTokenScale = false;
    static constexpr bool kSplits = true;
    static constexpr int64_t kLatentMultiple = 1;
    static constexpr RowShape shape(int64_t latent_dim, int64_t rope_dim) {
        return {latent_dim + rope_dim, latent_dim, 8, 1};
    }

    template <typename Source>
    static __device__ __forceinline__ Scale latent_scale(const Octet<Source>&, bool,
                                                         const Scale& cache_scale) {
        return cache_scale;
    }

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
    static __device__ __forceinline__ void put_rope(char* rope, int octet, const Octet<Source>& x,
                                                    const Scale& scale, int rope_dim) {
        put<Wide>(reinterpret_cast<uint8_t*>(rope) + octet * kOctet, x, scale,
                  rope_dim - octet * kOctet);
    }

    using Latent = Octet<uint8_t>;
    using Rope = Octet<uint8_t>;

    template <bool Wide>
    static __device__ __forceinline__ Latent latent(const char* row, int octet, int latent_dim,
                                                    int) {
        return load<Wide>(reinterpret_cast<const uint8_t*>(row) + octet * kOctet,
                          latent_dim - octet * kOctet);
    }

    template <bool Wide>
    static __device__ __forceinline__ Rope rope(const char* rope, int octet, int rope_dim) {
        return load<Wide>(reinterpret_cast<const uint8_t*>(rope) + octet * kOctet,
                          rope_dim - octet * kOctet);
    }

    template <typename To>
    static __device__ __forceinline__ Octet<To> value(const Octet<uint8_t>& x, float scale) {
        return scaled<To>(x, scale);
    }
};

}  // namespace mla
