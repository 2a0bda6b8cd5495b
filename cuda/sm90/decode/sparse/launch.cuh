// Launches the kernels of one dtype and kind of row.
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

// A kernel, with its number of threads and its shared memory. Narrow is for tiles of up to N heads,
// and Wide for tiles of up to 64.
template <typename T, int N, class R>
struct Narrow {
    static constexpr int kThreads = Threads<N, R>::kAll;
    static constexpr int kSharedBytes = Layout<N, R>::kBytes;
    static constexpr auto kKernel = &sparse_kernel<T, N, R>;
};
template <typename T, int rope>
struct Wide {
    static constexpr int kThreads = WideThreads::kAll;
    static constexpr int kSharedBytes = WideLayout<rope>::kBytes;
    static constexpr auto kKernel = &wide_kernel<T, rope>;
};

template <class K>
cudaLaunchConfig_t configuration(int blocks, int splits, cudaStream_t stream,
                                 ClusterAttributes& attributes) {
    return early_clusters(blocks, splits, K::kThreads, K::kSharedBytes, stream, attributes);
}

// For each number of CTAs in a cluster, 1 to kMaxSplits: the number of clusters of a kernel that a
// device runs at the same time. It is 0 for a size that is not tried.
struct ActiveClusters {
    std::atomic<bool> known{false};
    std::atomic<int> clusters[kMaxSplits + 1];
};

template <class K>
cudaError_t query_active_clusters(const Launch& l, ActiveClusters& active) {
    cudaError_t e = cudaFuncSetAttribute(K::kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         K::kSharedBytes);
    if (e != cudaSuccess) return e;
    // A device may refuse clusters of more than 8 CTAs.
    const bool large =
        cudaFuncSetAttribute(K::kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) ==
        cudaSuccess;
    active.clusters[1] = l.multiprocessors;
    for (int splits = 2; splits <= kMaxSplits; ++splits) {
        ClusterAttributes attributes = {};
        const cudaLaunchConfig_t config = configuration<K>(splits, splits, l.stream, attributes);
        int clusters = 0;
        if (!is_split(splits) || (splits > 8 && !large) ||
            cudaOccupancyMaxActiveClusters(&clusters, K::kKernel, &config) != cudaSuccess)
            clusters = 0;
        active.clusters[splits] = clusters;
    }
    // Clears the error of a refusal above: it is not an error of this launch.
    cudaGetLastError();
    active.known = true;
    return cudaSuccess;
}

// The clusters of a kernel that a device runs at the same time; queried once.
template <class K>
cudaError_t active_clusters(const Launch& l, const ActiveClusters*& active) {
    static ActiveClusters all[kMaxDevices];
    ActiveClusters& own = all[l.device];
    active = &own;
    return own.known ? cudaSuccess : query_active_clusters<K>(l, own);
}

template <class K>
cudaError_t launch(const Launch& l, const KernelParams& p, const LaunchPlans& launches) {
    const ActiveClusters* active;
    cudaError_t e = active_clusters<K>(l, active);
    for (int i = 0; i < launches.count && e == cudaSuccess; ++i) {
        const LaunchPlan& launch = launches.all[i];
        KernelParams own = p;
        own.first_item = launch.first;
        own.items = launch.end;
        ClusterAttributes attributes = {};
        const cudaLaunchConfig_t config =
            configuration<K>(launch.blocks, launch.splits, l.stream, attributes);
        e = cudaLaunchKernelEx(&config, K::kKernel, own);
    }
    return e;
}

template <typename T, class R>
cudaError_t launch_rows(const Launch& l, const KernelParams& unplanned) {
    // A CTA of every kernel has an SM to itself, so the number of clusters is the same
    // for all kernels.
    const ActiveClusters* active;
    const cudaError_t e = active_clusters<Narrow<T, 16, R>>(l, active);
    if (e != cudaSuccess) return e;
    const SplitPlan own =
        split_plan(unplanned.tokens, unplanned.heads, unplanned.width, R::kConverts,
                   [&](int splits) { return active->clusters[splits].load(); });
    KernelParams p = unplanned;
    p.head_tiles = own.head_tiles;
    p.token_factor = ((uint32_t(1) << 31) + p.head_tiles - 1) / p.head_tiles;
    p.tile_heads = own.tile_heads;
    switch (rows_of(own.tile_heads)) {
        case 16: return launch<Narrow<T, 16, R>>(l, p, own.launches);
        case 32: return launch<Narrow<T, 32, R>>(l, p, own.launches);
        default:
            if constexpr (!R::kConverts)
                return launch<Wide<T, R::kRope>>(l, p, own.launches);
            else
                return launch<Narrow<T, 64, R>>(l, p, own.launches);
    }
}

#define MLA_SPARSE_DECLARE(T, rope)                                                     \
    extern template cudaError_t launch_rows<T, SameRows<T, rope>>(const Launch&,        \
                                                                  const KernelParams&); \
    extern template cudaError_t launch_rows<T, E4m3Rows<rope>>(const Launch&,           \
                                                               const KernelParams&);    \
    extern template cudaError_t launch_rows<T, DsMlaRows<rope>>(const Launch&,          \
                                                                const KernelParams&);   \
    extern template cudaError_t launch_rows<T, PerTokenRows<rope>>(const Launch&,       \
                                                                   const KernelParams&);
MLA_SPARSE_DECLARE(__nv_bfloat16, 64)
MLA_SPARSE_DECLARE(__nv_bfloat16, 0)
MLA_SPARSE_DECLARE(__half, 64)
MLA_SPARSE_DECLARE(__half, 0)
#undef MLA_SPARSE_DECLARE

}  // namespace mla::sm90::sparse
