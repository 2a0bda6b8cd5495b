// Launches one dtype's kernels.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "kernel.cuh"

namespace mla::sm90::decode {

// How a launch divides the device, chosen from what the host knows.
struct Shape {
    int rows;    // N
    int pair;    // blocks that do different rows of the same tiles
    bool quantised;
};

struct Launch {
    Shape shape;
    int multiprocessors;
    int device;
    cudaStream_t stream;
};

constexpr int kMaxDevices = 64;

template <typename T, int N, int pair, bool quantised = false>
cudaError_t launch(const Launch& l, const KernelParams& p, const TensorMaps& maps) {
    auto* kernel = &decode_kernel<T, N, pair, quantised>;
    using L = Layout<N, quantised>;
    // Whether the kernel may use all shared memory on this device. Setting it twice does no harm.
    static std::atomic<bool> prepared[kMaxDevices];
    if (!prepared[l.device].load(std::memory_order_relaxed)) {
        const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes);
        if (e != cudaSuccess) return e;
        prepared[l.device].store(true, std::memory_order_relaxed);
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = {unsigned(std::min(l.multiprocessors, kCounters) / pair * pair), 1, 1};
    config.blockDim = {unsigned(quantised ? kQuantisedThreads : kThreads), 1, 1};
    config.dynamicSmemBytes = L::kBytes;
    config.stream = l.stream;
    return cudaLaunchKernelEx(&config, kernel, p, maps);
}

template <typename T>
cudaError_t launch_dtype(const Launch& l, const KernelParams& p, const TensorMaps& maps) {
    if (l.shape.quantised) {
        if (l.shape.pair == 2) return launch<T, 32, 2, true>(l, p, maps);
        return l.shape.rows == 16 ? launch<T, 16, 1, true>(l, p, maps) : launch<T, 32, 1, true>(l, p, maps);
    }
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
