// How many CTAs share a row, and the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "../../../common/clusters.cuh"
#include "../../../common/device.cuh"
#include "kernel.cuh"

namespace mla::sm90::topk {

// Fewer logits are not worth another CTA's waiting for the others.
constexpr int kLeastKeys = 4096;
// The most logits of a row that a CTA of a cluster keeps as a whole.
constexpr int kMostResident = 32768;
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

// Room for a CTA's part of a row as a whole. A CTA that has a row alone is faster with candidates.
inline int resident_for(int columns, int ctas) {
    if (ctas == 1) return 0;
    const int each = (columns + 4 * ctas - 1) / (4 * ctas) * 4;
    const int most = kMostBytes - int(sizeof(Shared)) - bitmap_words(columns) * 4;
    int logits = std::min(each, kMostResident) / 128 * 128 + 128;
    while (logits > 0 && resident_bytes(logits) > most) logits -= 128;
    return logits;
}

inline int shared_bytes(int columns, int candidates, int resident) {
    const int bitmap = bitmap_words(columns) * 4;
    const int behind = std::max(candidates * int(sizeof(Candidate)), resident_bytes(resident));
    return int(sizeof(Shared)) + bitmap + std::max(behind, bitmap);
}

// More than one if there are few rows. Clusters of many CTAs find room in half of the SMs; with
// fewer than four, waiting for each other takes what they save.
inline int choose_ctas(int rows, int columns, int multiprocessors, int most) {
    int ctas = 1;
    while (ctas < most && int64_t(rows) * ctas * 4 <= multiprocessors &&
           columns / (ctas * 2) >= kLeastKeys)
        ctas *= 2;
    return ctas < 4 ? 1 : ctas;
}

using Kernel = void (*)(KernelParams);

// Many rows hide each other's waits; of few, each has more loads in flight.
inline Kernel kernel_for(bool many) {
    return many ? &topk_kernel<2, 3, false> : &topk_kernel<8, 1, true>;
}

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
        ClusterAttributes attributes = {};
        const cudaLaunchConfig_t config =
            early_clusters(16, 16, kThreads, kMostBytes, nullptr, attributes);
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
    p.resident = resident_for(p.rows.columns, ctas);
    ClusterAttributes attributes = {};
    const cudaLaunchConfig_t config = early_clusters(
        rows * ctas, ctas, kThreads, shared_bytes(p.rows.columns, p.candidates, p.resident), stream,
        attributes);
    return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace mla::sm90::topk
