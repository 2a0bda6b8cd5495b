// Rows of L + R values of one type, without scales: those of f32, f16 and bf16 caches.
#pragma once

#include "format.cuh"

namespace mla {

template <typename T>
struct PlainRow {
    static constexpr bool kTensorScale = false;
    static constexpr bool kTokenScale = false;
    static constexpr bool kSplits = true;
    static constexpr int64_t kLatentMultiple = 1;
    static constexpr RowShape shape(int64_t latent_dim, int64_t rope_dim) {
        return {int64_t(sizeof(T)) * (latent_dim + rope_dim), int64_t(sizeof(T)) * latent_dim, 16,
                int64_t(sizeof(T))};
    }

    template <typename Source>
    static __device__ __forceinline__ Scale latent_scale(const Octet<Source>&, bool,
                                                         const Scale& cache_scale) {
        return cache_scale;
    }

    template <bool Wide, typename Source>
    static __device__ __forceinline__ void put_latent(char* row, int octet, const Octet<Source>& x,
                                                      const Scale&, int latent_dim) {
        store<Wide>(reinterpret_cast<T*>(row) + octet * kOctet, convert<T>(x),
                    latent_dim - octet * kOctet);
    }

    template <bool Wide, typename Source>
    static __device__ __forceinline__ void put_rope(char* rope, int octet, const Octet<Source>& x,
                                                    const Scale&, int rope_dim) {
        store<Wide>(reinterpret_cast<T*>(rope) + octet * kOctet, convert<T>(x),
                    rope_dim - octet * kOctet);
    }

    using Latent = Octet<T>;
    using Rope = Octet<T>;

    template <bool Wide>
    static __device__ __forceinline__ Latent latent(const char* row, int octet, int latent_dim,
                                                    int) {
        return load<Wide>(reinterpret_cast<const T*>(row) + octet * kOctet,
                          latent_dim - octet * kOctet);
    }

    template <bool Wide>
    static __device__ __forceinline__ Rope rope(const char* rope, int octet, int rope_dim) {
        return load<Wide>(reinterpret_cast<const T*>(rope) + octet * kOctet,
                          rope_dim - octet * kOctet);
    }

    template <typename To>
    static __device__ __forceinline__ Octet<To> value(const Octet<T>& x, float) {
        return convert<To>(x);
    }
};

}  // namespace mla
