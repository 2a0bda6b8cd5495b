// How many CTAs share a row, and the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "../../../common/device.cuh"
#include "kernel.cuh"

namespace mla::sm90::topk {

// Keys of a CTA of which two run on an SM at a time.
constexpr int kFairKeys = 16384;
// Fewer are not worth another CTA's waiting for the others.
constexpr int kLeastKeys = 4096;

// The keys of each of so many CTAs.
inline int keys_each(int columns, int ctas) { return int(ceil_div(columns, 4 * ctas)) * 4; }

// As many CTAs as keep a row's parts small, and more where there are too few rows for all SMs.
inline int choose_ctas(int rows, int columns, int multiprocessors, int most) {
    int ctas = 1;
    while (ctas < most && keys_each(columns, ctas) > kFairKeys) ctas *= 2;
    while (ctas < most && int64_t(rows) * ctas * 2 <= multiprocessors * 2 &&
           keys_each(columns, ctas * 2) >= kLeastKeys)
        ctas *= 2;
    return ctas;
}

inline cudaLaunchConfig_t configuration(int rows, int ctas, int keys, cudaStream_t stream,
                                        cudaLaunchAttribute& cluster) {
    cudaLaunchConfig_t config = {};
    config.gridDim = {unsigned(rows) * unsigned(ctas), 1, 1};
    config.blockDim = {unsigned(kThreads), 1, 1};
    config.dynamicSmemBytes = size_t(shared_bytes(keys));
    config.stream = stream;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = unsigned(ctas);
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
    config.attrs = &cluster;
    config.numAttrs = 1;
    return config;
}

// Readies the kernel on a device; the most CTAs that a cluster of it may have there.
inline cudaError_t ready(int device, int& most) {
    static std::atomic<int> known[kMaxDevices];
    most = known[device].load(std::memory_order_relaxed);
    if (most > 0) return cudaSuccess;
    cudaError_t e = cudaFuncSetAttribute(&topk_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         shared_bytes(kMostKeys));
    if (e != cudaSuccess) return e;
    most = 8;
    // Clusters of 16 are an offer that a device may refuse.
    if (cudaFuncSetAttribute(&topk_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) ==
        cudaSuccess) {
        cudaLaunchAttribute cluster = {};
        const cudaLaunchConfig_t config = configuration(1, 16, kMostKeys, nullptr, cluster);
        int clusters = 0;
        if (cudaOccupancyMaxActiveClusters(&clusters, &topk_kernel, &config) == cudaSuccess &&
            clusters > 0)
            most = 16;
    }
    // What was refused is no error of this launch.
    cudaGetLastError();
    known[device].store(most, std::memory_order_relaxed);
    return cudaSuccess;
}

inline cudaError_t launch(const KernelParams& p, int rows, int ctas, cudaStream_t stream) {
    cudaLaunchAttribute cluster = {};
    const cudaLaunchConfig_t config =
        configuration(rows, ctas, keys_each(p.rows.columns, ctas), stream, cluster);
    return cudaLaunchKernelEx(&config, &topk_kernel, p);
}

}  // namespace mla::sm90::topk
