// The launch of one tile shape and dtype.
#pragma once

#include <cuda_runtime.h>

#include "kernel.cuh"
#include "launch.cuh"

namespace mla::sm90::prefill {

template <typename Config>
cudaError_t launch(const Launch& l, const KernelParams& p, const Maps& maps) {
    auto* kernel = &prefill_kernel<Config>;
    static_assert(kSharedBytes<Config> <= kMaxSharedBytes);
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         kSharedBytes<Config>);
    if (e != cudaSuccess) return e;
    cudaLaunchConfig_t config = {};
    config.gridDim = l.ctas;
    config.blockDim = kThreads;
    config.dynamicSmemBytes = kSharedBytes<Config>;
    config.stream = l.stream;
    return cudaLaunchKernelEx(&config, kernel, p, maps);
}

template <typename Config>
cudaError_t load() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, &prefill_kernel<Config>);
}

// Both kernels of a tile shape: one that may split the keys of a query tile, one that never does.
#define MLA_PREFILL_INSTANTIATE(Config)                                                            \
    template cudaError_t launch<Config>(const Launch&, const KernelParams&, const Maps&);          \
    template cudaError_t launch<Config::Unsplit>(const Launch&, const KernelParams&, const Maps&); \
    template cudaError_t load<Config>();                                                           \
    template cudaError_t load<Config::Unsplit>();

}  // namespace mla::sm90::prefill
