// Launches the kernels of one dtype.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "../../../common/clusters.cuh"
#include "../../../common/device.cuh"
#include "kernel.cuh"
#include "split_plan.cuh"
#include "wide/kernel.cuh"

namespace mla::sm90::sparse {

struct Launch {
    int multiprocessors;
    int device;
    cudaStream_t stream;
};

// A kernel, its threads and its shared memory: for tiles of up to N heads, and of up to 64.
template <typename T, int N, Format format>
struct Narrow {
    static constexpr int kThreads = Threads<N, Rows<T, format>>::kAll;
    static constexpr int kSharedBytes = Layout<N, Rows<T, format>>::kBytes;
    static constexpr auto kKernel = &sparse_kernel<T, N, format>;
};
template <typename T>
struct Wide {
    static constexpr int kThreads = WideThreads::kAll;
    static constexpr int kSharedBytes = WideLayout::kBytes;
    static constexpr auto kKernel = &wide_kernel<T>;
};

template <class K>
cudaLaunchConfig_t configuration(int blocks, int splits, cudaStream_t stream,
                                 ClusterAttributes& attributes) {
    return early_clusters(blocks, splits, K::kThreads, K::kSharedBytes, stream, attributes);
}

// Number of clusters of 1 to kMaxSplits CTAs of a kernel that a device runs at the same time; 0 for
// a size that is not tried.
struct Resident {
    std::atomic<bool> known{false};
    std::atomic<int> clusters[kMaxSplits + 1];
};

template <class K>
cudaError_t ask_resident(const Launch& l, Resident& resident) {
    cudaError_t e = cudaFuncSetAttribute(K::kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         K::kSharedBytes);
    if (e != cudaSuccess) return e;
    // Clusters of more than 8 are an offer that a device may refuse.
    const bool large =
        cudaFuncSetAttribute(K::kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) ==
        cudaSuccess;
    resident.clusters[1] = l.multiprocessors;
    for (int splits = 2; splits <= kMaxSplits; ++splits) {
        ClusterAttributes attributes = {};
        const cudaLaunchConfig_t config = configuration<K>(splits, splits, l.stream, attributes);
        int clusters = 0;
        if (!is_split(splits) || (splits > 8 && !large) ||
            cudaOccupancyMaxActiveClusters(&clusters, K::kKernel, &config) != cudaSuccess)
            clusters = 0;
        resident.clusters[splits] = clusters;
    }
    // A refusal above is no error of this launch.
    cudaGetLastError();
    resident.known = true;
    return cudaSuccess;
}

// The resident clusters of a kernel on a device; asked for once.
template <class K>
cudaError_t resident_clusters(const Launch& l, const Resident*& resident) {
    static Resident all[kMaxDevices];
    Resident& own = all[l.device];
    resident = &own;
    return own.known ? cudaSuccess : ask_resident<K>(l, own);
}

template <class K>
cudaError_t launch(const Launch& l, const KernelParams& p, const Divisions& divisions) {
    const Resident* resident;
    cudaError_t e = resident_clusters<K>(l, resident);
    for (int i = 0; i < divisions.count && e == cudaSuccess; ++i) {
        const Division& division = divisions.all[i];
        KernelParams own = p;
        own.first_item = division.first;
        own.items = division.end;
        ClusterAttributes attributes = {};
        const cudaLaunchConfig_t config =
            configuration<K>(division.blocks, division.splits, l.stream, attributes);
        e = cudaLaunchKernelEx(&config, K::kKernel, own);
    }
    return e;
}

template <typename T, Format format>
cudaError_t launch_format(const Launch& l, const KernelParams& undivided) {
    // A CTA of every kernel has an SM to itself, so that all kernels' clusters are as many.
    const Resident* resident;
    const cudaError_t e = resident_clusters<Narrow<T, 16, format>>(l, resident);
    if (e != cudaSuccess) return e;
    const Plan own =
        plan(undivided.tokens, undivided.heads, undivided.width, format != Format::same,
             [&](int splits) { return resident->clusters[splits].load(); });
    KernelParams p = undivided;
    p.head_tiles = own.head_tiles;
    p.token_factor = ((uint32_t(1) << 31) + p.head_tiles - 1) / p.head_tiles;
    p.tile_heads = own.tile_heads;
    switch (rows_of(own.tile_heads)) {
        case 16: return launch<Narrow<T, 16, format>>(l, p, own.divisions);
        case 32: return launch<Narrow<T, 32, format>>(l, p, own.divisions);
        default:
            if constexpr (format == Format::same)
                return launch<Wide<T>>(l, p, own.divisions);
            else
                return launch<Narrow<T, 64, format>>(l, p, own.divisions);
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
