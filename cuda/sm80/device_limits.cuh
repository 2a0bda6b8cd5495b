// The limits of the current device, as the C functions read them. This is not part of limits.cuh,
// which kernels include, because it needs the family's header. A change to that header would
// otherwise compile all kernels again.
#pragma once

#include <algorithm>

#include "sm80/limits.cuh"
#include "sm80/mla_sm80.h"

namespace mla::sm80 {

// Limits of the current device, or lower ones if `limit` asks for them. The driver's answers are
// cached.
inline MlaStatus device_limits(const MlaDeviceLimits* limit, Limits& limits) {
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
    if (!limit) return ok();
    if (limit->shared_memory_bytes < 0)
        return refuse("shared_memory_bytes", limit->shared_memory_bytes, "0 or more");
    if (limit->multiprocessors < 0)
        return refuse("multiprocessors", limit->multiprocessors, "0 or more");
    if (limit->shared_memory_bytes > 0) {
        limits.shared_of_cta = std::min(limits.shared_of_cta, limit->shared_memory_bytes);
        limits.shared_of_sm = std::min(limits.shared_of_sm, limit->shared_memory_bytes + kReserved);
    }
    if (limit->multiprocessors > 0)
        limits.multiprocessors = std::min(limits.multiprocessors, limit->multiprocessors);
    return ok();
}

}  // namespace mla::sm80
