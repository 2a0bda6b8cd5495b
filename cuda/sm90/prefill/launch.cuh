// Launches one tile shape and dtype.
#pragma once

#include <cuda_runtime.h>

#include "kernel.cuh"

namespace mla::sm90::prefill {

struct Launch {
    int blocks;
    int multiprocessors;
    cudaStream_t stream;
};

// Warpgroups take turns where a block's exponentials are short against its products.
template <typename Tile, bool alternate>
cudaError_t launch(const Launch& l, const KernelParams& p, const Maps& maps) {
    auto* kernel = &prefill_kernel<Tile, alternate>;
    const size_t bytes = sizeof(Shared<Tile>) + p.levels * sizeof(int) + 1024;
    // Set each time: it is cheap, and the size depends on the longest request.
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
    if (e != cudaSuccess) return e;
    kernel<<<l.blocks, kThreads, bytes, l.stream>>>(p, maps);
    return cudaGetLastError();
}

template <typename Tile>
constexpr size_t max_levels() {
    return (232448 - 1024 - sizeof(Shared<Tile>)) / sizeof(int);
}

template <typename T>
using TileR1 = Tile<T, 128, 64, 128, 128>;
template <typename T>
using TileWide = Tile<T, 192, 64, 256, 64>;
template <typename T>
using TileSmall = Tile<T, 64, 32, 64, 128>;

}  // namespace mla::sm90::prefill
