// Launches one dtype's kernels.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "kernel.cuh"
#include "quantised.cuh"

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

// Teams of a launch: a team is `pair` blocks, of which each multiprocessor has one.
inline int teams_of(int multiprocessors, int pair) { return std::min(multiprocessors, kCounters) / pair; }

// `kernel` has blocks of `threads` and may use `shared_bytes` of shared memory; `prepared` remembers on which devices it was allowed to.
// Setting it twice does no harm.
template <typename K>
cudaError_t launch(const Launch& l, K* kernel, int threads, int shared_bytes, std::atomic<bool>* prepared, const KernelParams& p,
                   const TensorMaps& maps) {
    if (!prepared[l.device].load(std::memory_order_relaxed)) {
        const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        if (e != cudaSuccess) return e;
        prepared[l.device].store(true, std::memory_order_relaxed);
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = {unsigned(teams_of(l.multiprocessors, l.shape.pair) * l.shape.pair), 1, 1};
    config.blockDim = {unsigned(threads), 1, 1};
    config.dynamicSmemBytes = shared_bytes;
    config.stream = l.stream;
    cudaLaunchAttribute dependence = {};
    dependence.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependence.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &dependence;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, p, maps);
}

template <typename T, int N, int pair>
cudaError_t launch_rows(const Launch& l, const KernelParams& p, const TensorMaps& maps) {
    static std::atomic<bool> prepared[kMaxDevices];
    return launch(l, &decode_kernel<T, N, pair>, Kernel<T, N, pair>::kThreads, Kernel<T, N, pair>::L::kBytes, prepared, p, maps);
}

template <typename T, int N, int pair>
cudaError_t launch_quantised(const Launch& l, const KernelParams& p, const TensorMaps& maps) {
    static std::atomic<bool> prepared[kMaxDevices];
    return launch(l, &quantised_kernel<T, N, pair>, QuantisedKernel<T, N, pair>::kThreads, QuantisedLayout<N>::kBytes, prepared, p, maps);
}

template <typename T>
cudaError_t launch_dtype(const Launch& l, const KernelParams& p, const TensorMaps& maps) {
    if (l.shape.quantised) {
        if (l.shape.pair == 2) return launch_quantised<T, 64, 2>(l, p, maps);
        switch (l.shape.rows) {
            case 16: return launch_quantised<T, 16, 1>(l, p, maps);
            case 32: return launch_quantised<T, 32, 1>(l, p, maps);
            default: return launch_quantised<T, 64, 1>(l, p, maps);
        }
    }
    if (l.shape.pair == 2) return launch_rows<T, 64, 2>(l, p, maps);
    switch (l.shape.rows) {
        case 8: return launch_rows<T, 8, 1>(l, p, maps);
        case 16: return launch_rows<T, 16, 1>(l, p, maps);
        case 32: return launch_rows<T, 32, 1>(l, p, maps);
        default: return launch_rows<T, 64, 1>(l, p, maps);
    }
}

extern template cudaError_t launch_dtype<__nv_bfloat16>(const Launch&, const KernelParams&, const TensorMaps&);
extern template cudaError_t launch_dtype<__half>(const Launch&, const KernelParams&, const TensorMaps&);

}  // namespace mla::sm90::decode
