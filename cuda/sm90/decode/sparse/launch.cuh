// Launches the kernels of one dtype.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "../../../common/device.cuh"
#include "kernel.cuh"
#include "schedule.cuh"

namespace mla::sm90::sparse {

struct Launch {
    int multiprocessors;
    int device;
    cudaStream_t stream;
};

template <int N, class Rows>
cudaLaunchConfig_t configuration(int blocks, int splits, cudaStream_t stream,
                                 cudaLaunchAttribute& cluster) {
    cudaLaunchConfig_t config = {};
    config.gridDim = {unsigned(blocks), 1, 1};
    config.blockDim = {unsigned(Threads<N, Rows>::kAll), 1, 1};
    config.dynamicSmemBytes = size_t(Layout<N, Rows>::kBytes);
    config.stream = stream;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = unsigned(splits);
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
    config.attrs = &cluster;
    config.numAttrs = 1;
    return config;
}

// How many clusters of 1, 2, 4, 8 and 16 blocks of a kernel a device runs at
// the same time.
struct Resident {
    std::atomic<bool> known{false};
    std::atomic<int> clusters[5];

    static int index(int splits) { return splits == 1 ? 0 : 1 + index(splits / 2); }
};

template <typename T, int N, Format format>
cudaError_t resident_clusters(const Launch& l, Resident& resident) {
    using L = Layout<N, Rows<T, format>>;
    const auto kernel = &sparse_kernel<T, N, format>;
    cudaError_t e =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes);
    if (e != cudaSuccess) return e;
    // Clusters of 16 are an offer that a device may refuse.
    const bool large = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed,
                                            1) == cudaSuccess;
    resident.clusters[0] = l.multiprocessors;
    for (int splits = 2; splits <= kMaxSplits; splits *= 2) {
        cudaLaunchAttribute cluster = {};
        const cudaLaunchConfig_t config =
            configuration<N, Rows<T, format>>(splits, splits, l.stream, cluster);
        int clusters = 0;
        if ((splits <= 8 || large) &&
            cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess)
            clusters = 0;
        resident.clusters[Resident::index(splits)] = clusters;
    }
    // What was refused is no error of this launch.
    cudaGetLastError();
    resident.known = true;
    return cudaSuccess;
}

template <typename T, int N, Format format>
cudaError_t launch(const Launch& l, const KernelParams& p) {
    using L = Layout<N, Rows<T, format>>;
    static Resident resident[kMaxDevices];
    Resident& of_device = resident[l.device];
    if (!of_device.known) {
        const cudaError_t e = resident_clusters<T, N, format>(l, of_device);
        if (e != cudaSuccess) return e;
    }
    const Division division = divide(p.items, p.width, [&](int splits) {
        return of_device.clusters[Resident::index(splits)].load();
    });
    cudaLaunchAttribute cluster = {};
    const cudaLaunchConfig_t config =
        configuration<N, Rows<T, format>>(division.blocks, division.splits, l.stream, cluster);
    return cudaLaunchKernelEx(&config, &sparse_kernel<T, N, format>, p);
}

template <typename T, Format format>
cudaError_t launch_format(const Launch& l, const KernelParams& p) {
    switch (rows_of(p.tile_heads)) {
        case 16: return launch<T, 16, format>(l, p);
        case 32: return launch<T, 32, format>(l, p);
        default: return launch<T, 64, format>(l, p);
    }
}

#define MLA_SPARSE_DECLARE(T, format)                                           \
    extern template cudaError_t launch_format<T, Format::format>(const Launch&, \
                                                                 const KernelParams&);
MLA_SPARSE_DECLARE(__nv_bfloat16, same)
MLA_SPARSE_DECLARE(__nv_bfloat16, e4m3)
MLA_SPARSE_DECLARE(__nv_bfloat16, ds_mla)
MLA_SPARSE_DECLARE(__half, same)
MLA_SPARSE_DECLARE(__half, e4m3)
MLA_SPARSE_DECLARE(__half, ds_mla)
#undef MLA_SPARSE_DECLARE

}  // namespace mla::sm90::sparse
