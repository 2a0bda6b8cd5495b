// The launch of one tile shape and dtype.
#pragma once

#include <cuda_runtime.h>

#include "kernel.cuh"
#include "launch.cuh"

namespace mla::sm90::prefill {

template <typename Tile>
cudaError_t launch(const Launch& l, const KernelParams& p, const Maps& maps) {
    auto* kernel = &prefill_kernel<Tile>;
    const size_t bytes = sizeof(Shared<Tile>) + p.levels * sizeof(int) + 1024;
    // The same whatever this launch needs, since threads that launch at the same time share the attribute.
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes);
    if (e != cudaSuccess) return e;
    cudaLaunchConfig_t config = {};
    config.gridDim = l.blocks;
    config.blockDim = kThreads;
    config.dynamicSmemBytes = bytes;
    config.stream = l.stream;
    return cudaLaunchKernelEx(&config, kernel, p, maps);
}

template <typename Tile>
cudaError_t load() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, &prefill_kernel<Tile>);
}

}  // namespace mla::sm90::prefill
