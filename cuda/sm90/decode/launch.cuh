// Launches one dtype's kernels.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "../../common/device.cuh"
#include "kernel.cuh"
#include "quantised.cuh"

namespace mla::sm90::decode {

// How a launch divides the device, chosen from what the host knows.
struct Shape {
    int rows;  // N
    int pair;  // blocks that do different rows of the same tiles
    bool quantised;
};

struct Launch {
    Shape shape;
    int multiprocessors;
    int device;
    cudaStream_t stream;
};

// Teams of a launch: a team is `pair` blocks, of which each multiprocessor has one.
inline int teams_of(int multiprocessors, int pair) {
    return std::min(multiprocessors, kCounters) / pair;
}

template <class K>
cudaError_t launch(const Launch& l, const KernelParams& p, const TensorMaps& maps) {
    // On which devices the kernel was allowed its shared memory. Setting it twice does no harm.
    static std::atomic<bool> prepared[kMaxDevices];
    if (!prepared[l.device].load(std::memory_order_relaxed)) {
        const cudaError_t e = cudaFuncSetAttribute(
            &decode_kernel<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, K::L::kBytes);
        if (e != cudaSuccess) return e;
        prepared[l.device].store(true, std::memory_order_relaxed);
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = {unsigned(teams_of(l.multiprocessors, K::kPair) * K::kPair), 1, 1};
    config.blockDim = {unsigned(K::kThreads), 1, 1};
    config.dynamicSmemBytes = K::L::kBytes;
    config.stream = l.stream;
    cudaLaunchAttribute dependence = {};
    dependence.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependence.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &dependence;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, &decode_kernel<K>, p, maps);
}

template <typename T>
cudaError_t launch_dtype(const Launch& l, const KernelParams& p, const TensorMaps& maps) {
    if (l.shape.quantised) {
        if (l.shape.pair == 2) return launch<QuantisedKernel<T, 64, 2>>(l, p, maps);
        switch (l.shape.rows) {
            case 16: return launch<QuantisedKernel<T, 16, 1>>(l, p, maps);
            case 32: return launch<QuantisedKernel<T, 32, 1>>(l, p, maps);
            default: return launch<QuantisedKernel<T, 64, 1>>(l, p, maps);
        }
    }
    if (l.shape.pair == 2) return launch<Kernel<T, 64, 2>>(l, p, maps);
    switch (l.shape.rows) {
        case 8: return launch<Kernel<T, 8, 1>>(l, p, maps);
        case 16: return launch<Kernel<T, 16, 1>>(l, p, maps);
        case 32: return launch<Kernel<T, 32, 1>>(l, p, maps);
        default: return launch<Kernel<T, 64, 1>>(l, p, maps);
    }
}

extern template cudaError_t launch_dtype<__nv_bfloat16>(const Launch&, const KernelParams&,
                                                        const TensorMaps&);
extern template cudaError_t launch_dtype<__half>(const Launch&, const KernelParams&,
                                                 const TensorMaps&);

}  // namespace mla::sm90::decode
