// Launches the kernels of one dtype and row.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "../../../common/device.cuh"
#include "kernel.cuh"

namespace mla::sm90::decode {

// The shape of a launch, which the host chooses from what it knows.
struct Shape {
    int rows;        // N
    int group_ctas;  // CTAs for different rows of the same query tile
    bool fp8;        // the cache is e4m3
    bool by_token;   // each token of e4m3 has a scale
    bool by_rows;    // PlainConfig::kByRows
};

struct Launch {
    Shape shape;
    int multiprocessors;
    int device;
    cudaStream_t stream;
};

// Number of CTA groups of a launch. Each SM has one CTA.
inline int groups_of(int multiprocessors, int group_ctas) {
    return std::min(multiprocessors, kCounters) / group_ctas;
}

template <class C>
cudaError_t launch(const Launch& l, const KernelParams& p, const TensorMaps& maps) {
    // True for devices on which the kernel was allowed its shared memory. Setting it twice does no
    // harm.
    static std::atomic<bool> prepared[kMaxDevices];
    if (!prepared[l.device].load(std::memory_order_relaxed)) {
        const cudaError_t e = cudaFuncSetAttribute(
            &decode_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::L::kBytes);
        if (e != cudaSuccess) return e;
        prepared[l.device].store(true, std::memory_order_relaxed);
    }
    cudaLaunchConfig_t config = {};
    const int group_ctas = l.shape.group_ctas, groups = groups_of(l.multiprocessors, group_ctas);
    config.gridDim =
        C::kGroupCtas == kAnyGroup ? dim3(group_ctas, groups) : dim3(groups * group_ctas);
    config.blockDim = {unsigned(C::kThreads), 1, 1};
    config.dynamicSmemBytes = C::L::kBytes;
    config.stream = l.stream;
    cudaLaunchAttribute dependence = {};
    dependence.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependence.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &dependence;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, &decode_kernel<C>, p, maps);
}

// There is a kernel for each number of rows. With an e4m3 cache, fewer than 16 rows are padded to
// 16, because with 8 rows the conversions would take the same time.
template <template <typename, int, int> class Config, typename T>
cudaError_t launch_quantised(const Launch& l, const KernelParams& p, const TensorMaps& maps) {
    const int group_ctas = l.shape.group_ctas;
    switch (l.shape.rows) {
        case 16: return launch<Config<T, 16, 1>>(l, p, maps);
        case 32: return launch<Config<T, 32, 1>>(l, p, maps);
        default:
            return group_ctas == 1   ? launch<Config<T, 64, 1>>(l, p, maps)
                   : group_ctas == 2 ? launch<Config<T, 64, 2>>(l, p, maps)
                                     : launch<Config<T, 64, kAnyGroup>>(l, p, maps);
    }
}

// Caches of e4m3 with a scale for each token.
template <typename T>
cudaError_t launch_token_scales(const Launch& l, const KernelParams& p, const TensorMaps& maps) {
    return launch_quantised<TokenScalesConfig, T>(l, p, maps);
}

// All other caches.
template <typename T, class Dims>
cudaError_t launch_rows(const Launch& l, const KernelParams& p, const TensorMaps& maps) {
    const int group_ctas = l.shape.group_ctas;
    // Groups of one or two CTAs have kernels of their own; all others share one.
    if constexpr (std::is_same_v<Dims, R1Row>) {
        if (l.shape.fp8) return launch_quantised<Fp8Config, T>(l, p, maps);
    }
    switch (l.shape.rows) {
        case 8: return launch<PlainConfig<T, Dims, 8, 1>>(l, p, maps);
        case 16: return launch<PlainConfig<T, Dims, 16, 1>>(l, p, maps);
        case 32: return launch<PlainConfig<T, Dims, 32, 1>>(l, p, maps);
        default:
            return group_ctas == 1   ? launch<PlainConfig<T, Dims, 64, 1>>(l, p, maps)
                   : group_ctas > 2  ? launch<PlainConfig<T, Dims, 64, kAnyGroup>>(l, p, maps)
                   : l.shape.by_rows ? launch<PlainConfig<T, Dims, 64, 2>>(l, p, maps)
                                     : launch<PlainConfig<T, Dims, 64, 2, false>>(l, p, maps);
    }
}

#define MLA_DECODE_DECLARE(latent, rope)                                           \
    extern template cudaError_t launch_rows<__nv_bfloat16, RowDims<latent, rope>>( \
        const Launch&, const KernelParams&, const TensorMaps&);                    \
    extern template cudaError_t launch_rows<__half, RowDims<latent, rope>>(        \
        const Launch&, const KernelParams&, const TensorMaps&);
MLA_DECODE_DECLARE(512, 64)
MLA_DECODE_DECLARE(512, 0)
MLA_DECODE_DECLARE(256, 64)
MLA_DECODE_DECLARE(256, 32)
#undef MLA_DECODE_DECLARE
extern template cudaError_t launch_token_scales<__nv_bfloat16>(const Launch&, const KernelParams&,
                                                               const TensorMaps&);
extern template cudaError_t launch_token_scales<__half>(const Launch&, const KernelParams&,
                                                        const TensorMaps&);

}  // namespace mla::sm90::decode
