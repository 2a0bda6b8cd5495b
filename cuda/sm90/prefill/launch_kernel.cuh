// The launch of one tile shape and dtype.
#pragma once

#include <cuda_runtime.h>

#include "kernel.cuh"
#include "launch.cuh"

namespace mla::sm90::prefill {

template <typename Tile>
cudaError_t launch(const Launch& l, const KernelParams& p, const Maps& maps) {
    auto* kernel = &prefill_kernel<Tile>;
    static_assert(kSharedBytes<Tile> <= kMaxSharedBytes);
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         kSharedBytes<Tile>);
    if (e != cudaSuccess) return e;
    cudaLaunchConfig_t config = {};
    config.gridDim = l.ctas;
    config.blockDim = kThreads;
    config.dynamicSmemBytes = kSharedBytes<Tile>;
    config.stream = l.stream;
    return cudaLaunchKernelEx(&config, kernel, p, maps);
}

template <typename Tile>
cudaError_t load() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, &prefill_kernel<Tile>);
}

// Both kernels of a tile shape: one that may divide the keys of a query tile, one that never does.
#define MLA_PREFILL_INSTANTIATE(Tile)                                                          \
    template cudaError_t launch<Tile>(const Launch&, const KernelParams&, const Maps&);        \
    template cudaError_t launch<Tile::Whole>(const Launch&, const KernelParams&, const Maps&); \
    template cudaError_t load<Tile>();                                                         \
    template cudaError_t load<Tile::Whole>();

}  // namespace mla::sm90::prefill
