// Launches one dtype's kernels.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "kernel.cuh"

namespace mla::sm90::decode {

// How a launch divides the device, chosen from what the host knows.
struct Shape {
    int rows;    // N
    int pair;    // blocks that share their cache tiles
    int splits;  // blocks that share a piece's tokens
};

struct Launch {
    Shape shape;
    int multiprocessors;
    int device;
    cudaStream_t stream;
};

constexpr int kMaxDevices = 64;

template <typename T, int N, int pair>
cudaError_t launch(const Launch& l, const KernelParams& p, const TensorMaps& maps) {
    auto* kernel = &decode_kernel<T, N, pair>;
    const unsigned blocks = l.shape.splits * pair;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {blocks, 1, 1};
    cudaLaunchConfig_t config = {};
    config.blockDim = {kThreads, 1, 1};
    config.gridDim = {blocks, 1, 1};
    config.dynamicSmemBytes = Layout<N>::kBytes;
    config.stream = l.stream;
    config.attrs = &attribute;
    config.numAttrs = 1;

    // How many clusters fit the device at once; 0 = not asked yet. Both answers that a race could store are the same.
    static std::atomic<int> resident[kMaxDevices][4];
    const int size_class = blocks == 1 ? 0 : blocks == 2 ? 1 : blocks == 4 ? 2 : 3;
    int clusters = resident[l.device][size_class].load(std::memory_order_relaxed);
    if (clusters == 0) {
        cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout<N>::kBytes);
        if (e != cudaSuccess) return e;
        e = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
        if (e != cudaSuccess) return e;
        if (clusters == 0) return cudaErrorLaunchOutOfResources;
        clusters = min(clusters, l.multiprocessors / int(blocks));
        resident[l.device][size_class].store(clusters, std::memory_order_relaxed);
    }
    config.gridDim.x = clusters * blocks;
    return cudaLaunchKernelEx(&config, kernel, p, maps);
}

template <typename T>
cudaError_t launch_dtype(const Launch& l, const KernelParams& p, const TensorMaps& maps) {
    if (l.shape.pair == 2) return launch<T, 64, 2>(l, p, maps);
    switch (l.shape.rows) {
        case 8: return launch<T, 8, 1>(l, p, maps);
        case 16: return launch<T, 16, 1>(l, p, maps);
        case 32: return launch<T, 32, 1>(l, p, maps);
        default: return launch<T, 64, 1>(l, p, maps);
    }
}

extern template cudaError_t launch_dtype<__nv_bfloat16>(const Launch&, const KernelParams&, const TensorMaps&);
extern template cudaError_t launch_dtype<__half>(const Launch&, const KernelParams&, const TensorMaps&);

}  // namespace mla::sm90::decode
