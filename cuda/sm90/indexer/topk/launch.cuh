// How many CTAs share a row, and the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "../../../common/device.cuh"
#include "kernel.cuh"

namespace mla::sm90::topk {

// Fewer logits are not worth another CTA's waiting for the others.
constexpr int kLeastKeys = 8192;
// What a CTA may have of shared memory.
constexpr int kMostBytes = 227 * 1024;

// Room for what the guess leaves of a row, and five standard deviations more.
inline int room_for(int columns, int topk) {
    const double each = double(columns) / kSamples;
    const double expected = topk / each, wanted = expected + 4 * std::sqrt(expected) + 8;
    const double room = std::min(double(columns), (wanted + 5 * std::sqrt(wanted)) * each);
    const int most =
        (kMostBytes - int(sizeof(Shared)) - bitmap_words(columns) * 4) / int(sizeof(Candidate));
    return int(std::min(double(most), std::max(room, 4096.))) / 32 * 32;
}

// More than one if there are too few rows for all SMs.
inline int choose_ctas(int rows, int columns, int multiprocessors, int most) {
    int ctas = 1;
    while (ctas < most && int64_t(rows) * ctas * 2 <= multiprocessors &&
           columns / (ctas * 2) >= kLeastKeys)
        ctas *= 2;
    return ctas;
}

inline cudaLaunchConfig_t configuration(int rows, int ctas, int bytes, cudaStream_t stream,
                                        cudaLaunchAttribute& cluster) {
    cudaLaunchConfig_t config = {};
    config.gridDim = {unsigned(rows) * unsigned(ctas), 1, 1};
    config.blockDim = {unsigned(kThreads), 1, 1};
    config.dynamicSmemBytes = size_t(bytes);
    config.stream = stream;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = unsigned(ctas);
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
    config.attrs = &cluster;
    config.numAttrs = 1;
    return config;
}

using Kernel = void (*)(KernelParams);

// Many rows hide each other's waits; of few, each has more loads in flight.
inline Kernel kernel_for(bool many) { return many ? &topk_kernel<2, 3> : &topk_kernel<8, 1>; }

// Readies the kernels on a device; the most CTAs that a cluster of them may have there.
inline cudaError_t ready(int device, int& most) {
    static std::atomic<int> known[kMaxDevices];
    most = known[device].load(std::memory_order_relaxed);
    if (most > 0) return cudaSuccess;
    most = 16;
    for (const bool many : {false, true}) {
        const Kernel kernel = kernel_for(many);
        const cudaError_t e =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes);
        if (e != cudaSuccess) return e;
        // Clusters of 16 are an offer that a device may refuse.
        cudaLaunchAttribute cluster = {};
        const cudaLaunchConfig_t config = configuration(1, 16, kMostBytes, nullptr, cluster);
        int clusters = 0;
        if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) !=
                cudaSuccess ||
            cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess ||
            clusters == 0)
            most = 8;
    }
    // What was refused is no error of this launch.
    cudaGetLastError();
    known[device].store(most, std::memory_order_relaxed);
    return cudaSuccess;
}

inline cudaError_t launch(KernelParams p, int rows, int ctas, Kernel kernel, cudaStream_t stream) {
    p.candidates = room_for(p.rows.columns, p.topk);
    cudaLaunchAttribute cluster = {};
    const cudaLaunchConfig_t config =
        configuration(rows, ctas, shared_bytes(p.rows.columns, p.candidates), stream, cluster);
    return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace mla::sm90::topk
