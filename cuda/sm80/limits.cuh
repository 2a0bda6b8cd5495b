// What of a device the launches of this family depend on.
#pragma once

#include "common/device.cuh"
#include "sm80/mla_sm80.h"

namespace mla::sm80 {

struct Limits {
    int device;
    // Bytes of shared memory: of a CTA, and of an SM.
    int shared_of_cta, shared_of_sm;
    int multiprocessors;
};

// Bytes of shared memory that the system takes of every CTA.
constexpr int kReserved = 1024;

// Of the current device, or less where `most` says so. What the driver said is remembered.
inline MlaStatus device_limits(const MlaDeviceLimits* most, Limits& limits) {
    static std::atomic<int> known[kMaxDevices][3];
    int device;
    cudaError_t e = cudaGetDevice(&device);
    if (e != cudaSuccess) return cuda_status("cudaGetDevice", e);
    if (device >= kMaxDevices) return unsupported("device", device, "an ordinal below 64");
    const cudaDeviceAttr attributes[3] = {cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                          cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                                          cudaDevAttrMultiProcessorCount};
    int values[3];
    for (int i = 0; i < 3; ++i) {
        values[i] = known[device][i].load(std::memory_order_relaxed);
        if (values[i] > 0) continue;
        if ((e = cudaDeviceGetAttribute(&values[i], attributes[i], device)) != cudaSuccess)
            return cuda_status("cudaDeviceGetAttribute", e);
        known[device][i].store(values[i], std::memory_order_relaxed);
    }
    limits = {device, values[0], values[1], values[2]};
    if (!most) return ok();
    if (most->shared_memory_bytes < 0)
        return refuse("shared_memory_bytes", most->shared_memory_bytes, "0 or more");
    if (most->multiprocessors < 0)
        return refuse("multiprocessors", most->multiprocessors, "0 or more");
    if (most->shared_memory_bytes > 0) {
        limits.shared_of_cta = std::min(limits.shared_of_cta, most->shared_memory_bytes);
        limits.shared_of_sm = std::min(limits.shared_of_sm, most->shared_memory_bytes + kReserved);
    }
    if (most->multiprocessors > 0)
        limits.multiprocessors = std::min(limits.multiprocessors, most->multiprocessors);
    return ok();
}

// Allows a kernel its dynamic shared memory, once per device and size: twice does no harm.
template <auto kernel>
cudaError_t allow_shared(int device, size_t bytes) {
    static std::atomic<size_t> allowed[kMaxDevices];
    if (allowed[device].load(std::memory_order_relaxed) >= bytes) return cudaSuccess;
    const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               static_cast<int>(bytes));
    if (e == cudaSuccess) allowed[device].store(bytes, std::memory_order_relaxed);
    return e;
}

}  // namespace mla::sm80
