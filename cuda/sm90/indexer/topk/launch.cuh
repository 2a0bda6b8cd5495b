// The number of CTAs that share a row, and the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "../../../common/clusters.cuh"
#include "../../../common/device.cuh"
#include "kernel.cuh"
#include "register_resident.cuh"

namespace mla::sm90::topk {

// Minimum number of logits for another CTA. Fewer are not worth the time that the others wait for
// it.
constexpr int kMinKeys = 4096;
// Maximum number of logits of which a CTA of a cluster keeps all in shared memory.
constexpr int kMaxSharedResident = 32768;
// Maximum shared memory of a CTA.
constexpr int kMaxBytes = 227 * 1024;
// Shared memory of an SM, and the part of it that is reserved for each CTA.
constexpr int kBytesOfSm = 228 * 1024;
constexpr int kReservedBytes = 1024;

// Number of candidates to make room for: the expected number, and five standard deviations more.
inline int room_for(int columns, int topk) {
    const double each = double(columns) / kSamples;
    const double expected = topk / each, wanted = expected + 4 * std::sqrt(expected) + 8;
    const double room = std::min(double(columns), (wanted + 5 * std::sqrt(wanted)) * each);
    const int max_candidates =
        (kMaxBytes - int(sizeof(Shared)) - bitmap_words(columns) * 4) / int(sizeof(Candidate));
    return int(std::min(double(max_candidates), std::max(room, 4096.))) / 32 * 32;
}

// Number of logits in a CTA's part of a row, if the CTA keeps all of them; otherwise 0. A CTA that
// has a row to itself is faster with candidates.
inline int shared_resident_for(int columns, int ctas) {
    if (ctas == 1) return 0;
    const int each = (columns + 4 * ctas - 1) / (4 * ctas) * 4;
    const int max_bytes = kMaxBytes - int(sizeof(Shared)) - bitmap_words(columns) * 4;
    int logits = std::min(each, kMaxSharedResident) / 128 * 128 + 128;
    while (logits > 0 && shared_resident_bytes(logits) > max_bytes) logits -= 128;
    return logits;
}

template <typename S>
int shared_bytes(int columns, int candidates, int shared_resident) {
    const int bitmap = bitmap_words(columns) * 4;
    const int behind =
        std::max(candidates * int(sizeof(Candidate)), shared_resident_bytes(shared_resident));
    return int(sizeof(S)) + bitmap + std::max(behind, bitmap);
}

// A row has more than one CTA if rows are few and their clusters fit into half of the SMs. With
// fewer than four CTAs, waiting for one another costs more than they save.
inline int choose_ctas(int rows, int columns, int multiprocessors, int max_ctas) {
    int ctas = 1;
    while (ctas < max_ctas && int64_t(rows) * ctas * 4 <= multiprocessors &&
           columns / (ctas * 2) >= kMinKeys)
        ctas *= 2;
    return ctas < 4 ? 1 : ctas;
}

// Clusters that a device has room for.
struct ClusterLimits {
    int max_ctas;  // maximum number of CTAs of a cluster
    // Numbers of clusters of three, four and eight CTAs that run at the same time, with an SM for
    // each CTA.
    int threes, fours, eights;
};

// Minimum number of columns of rows that are kept in registers.
constexpr int kLongRow = 32768;

// Room for candidates in each CTA of a register-resident row; 0 if it is too little.
inline int register_resident_room(int columns, int topk, int ctas) {
    const double each = double(columns) / kSamples;
    const double expected = topk / each, wanted = expected + 4 * std::sqrt(expected) + 8;
    const double likely = (1.15 * wanted + 5 * std::sqrt(wanted)) * each;
    const int want = int(std::max(std::min(double(columns), likely), 4096.)) / 32 * 32;
    int max_room = (kMaxBytes - register_resident_bytes(ctas, 0)) / 4 / (ctas + 1);
    max_room = std::min(max_room, (1 << kIndexBits) / ctas) / 32 * 32;
    const int room = std::min(want, max_room);
    return room >= topk && int64_t(room) * ctas >= 2 * int64_t(want) ? room : 0;
}

// Returns the number of CTAs whose registers hold a row, or 0 if rows are not held in registers.
// Only long rows are, and only if they are so few that all of them run at the same time.
inline int choose_register_resident(int rows, int columns, int topk,
                                    const ClusterLimits& clusters) {
    if (columns < kLongRow) return 0;
    const int sizes[3][2] = {{8, clusters.eights}, {4, clusters.fours}, {3, clusters.threes}};
    for (const auto& [ctas, clusters] : sizes)
        if (rows <= clusters && columns <= ctas * kMaxInRegisters &&
            register_resident_room(columns, topk, ctas) > 0)
            return ctas;
    return 0;
}

using Kernel = void (*)(KernelParams);

inline Kernel kernel_of_clusters() { return &topk_kernel<kThreads, 1, true>; }

// Threads of a CTA and CTAs of an SM, for rows with one CTA each.
struct Shape {
    int threads, ctas;
};
constexpr Shape kAlone = {kThreads, 1}, kTwo = {kThreads, 2}, kFour = {kThreadsOfMany, 4};

inline Kernel kernel_of(const Shape& shape) {
    switch (shape.ctas) {
        case kAlone.ctas: return &topk_kernel<kAlone.threads, kAlone.ctas, false>;
        case kTwo.ctas: return &topk_kernel<kTwo.threads, kTwo.ctas, false>;
        default: return &topk_kernel<kFour.threads, kFour.ctas, false>;
    }
}

// The kernel for rows of which each CTA has `each` logits.
inline Kernel register_resident_for(int each) {
    if (each <= 4 * kVectorStep) return &register_resident_kernel<4>;
    return each <= 8 * kVectorStep ? &register_resident_kernel<8> : &register_resident_kernel<16>;
}

// Sets the attributes of the kernels on a device, and finds the clusters that it has room for.
inline cudaError_t ready(int device, ClusterLimits& clusters) {
    static std::atomic<uint64_t> known[kMaxDevices];
    uint64_t packed = known[device].load(std::memory_order_relaxed);
    if (packed == 0) {
        uint64_t max_ctas = 16;
        int threes = 0, fours = 0, eights = 0;
        const auto clusters_of = [](Kernel kernel, int ctas, int& clusters) {
            ClusterAttributes attributes = {};
            const cudaLaunchConfig_t config =
                early_clusters(ctas, ctas, kThreads, kMaxBytes, nullptr, attributes);
            if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess)
                clusters = 0;
        };
        for (const Kernel kernel :
             {kernel_of_clusters(), kernel_of(kAlone), kernel_of(kTwo), kernel_of(kFour),
              register_resident_for(4 * kVectorStep), register_resident_for(8 * kVectorStep),
              register_resident_for(16 * kVectorStep)}) {
            const cudaError_t e = cudaFuncSetAttribute(
                kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxBytes);
            if (e != cudaSuccess) return e;
        }
        // Clusters of 16 CTAs are optional: a device may refuse them.
        int sixteens = 0;
        if (cudaFuncSetAttribute(kernel_of_clusters(),
                                 cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess)
            clusters_of(kernel_of_clusters(), 16, sixteens);
        if (sixteens == 0) max_ctas = 8;
        clusters_of(register_resident_for(kMaxInRegisters), 3, threes);
        clusters_of(register_resident_for(kMaxInRegisters), 4, fours);
        clusters_of(register_resident_for(kMaxInRegisters), 8, eights);
        // Clears the error of a refused setting: it is not an error of this launch.
        cudaGetLastError();
        packed = max_ctas | uint64_t(threes) << 16 | uint64_t(fours) << 32 | uint64_t(eights) << 48;
        known[device].store(packed, std::memory_order_relaxed);
    }
    clusters = {int(packed & 0xffff), int(packed >> 16 & 0xffff), int(packed >> 32 & 0xffff),
                int(packed >> 48)};
    return cudaSuccess;
}

inline cudaError_t launch_clusters(KernelParams p, int rows, int ctas, cudaStream_t stream) {
    const int columns = p.rows.columns;
    p.candidates = room_for(columns, p.topk);
    p.shared_resident = shared_resident_for(columns, ctas);
    ClusterAttributes attributes = {};
    const cudaLaunchConfig_t config = early_clusters(
        rows * ctas, ctas, kThreads, shared_bytes<Shared>(columns, p.candidates, p.shared_resident),
        stream, attributes);
    return cudaLaunchKernelEx(&config, kernel_of_clusters(), p);
}

// If rows are many, they hide one another's latency. Smaller CTAs then do more with the same
// instructions, provided that an SM has room for enough of them.
inline cudaError_t launch_rows(KernelParams p, int rows, int multiprocessors, cudaStream_t stream) {
    const int columns = p.rows.columns;
    p.candidates = room_for(columns, p.topk);
    p.shared_resident = 0;
    Shape shape = kFour;
    int bytes = shared_bytes<SharedOf<kFour.threads>>(columns, p.candidates, 0);
    if (rows <= multiprocessors || kFour.ctas * (bytes + kReservedBytes) > kBytesOfSm) {
        shape = rows <= multiprocessors ? kAlone : kTwo;
        bytes = shared_bytes<SharedOf<kThreads>>(columns, p.candidates, 0);
    }
    ClusterAttributes attributes = {};
    const cudaLaunchConfig_t config =
        early_clusters(rows, 1, shape.threads, bytes, stream, attributes);
    return cudaLaunchKernelEx(&config, kernel_of(shape), p);
}

inline cudaError_t launch_register_resident(KernelParams p, int rows, int ctas,
                                            cudaStream_t stream) {
    const int columns = p.rows.columns;
    p.candidates = register_resident_room(columns, p.topk, ctas);
    // If a row's sample is misleading, the row is moved to shared memory.
    p.shared_resident = shared_resident_for(columns, ctas);
    const int bytes = std::max(register_resident_bytes(ctas, p.candidates),
                               shared_bytes<Shared>(columns, 0, p.shared_resident));
    ClusterAttributes attributes = {};
    const cudaLaunchConfig_t config =
        early_clusters(rows * ctas, ctas, kThreads, bytes, stream, attributes);
    return cudaLaunchKernelEx(&config, register_resident_for((columns + ctas - 1) / ctas), p);
}

}  // namespace mla::sm90::topk
