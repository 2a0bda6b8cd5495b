// Queries that launches make to the driver: the facts of the current device, and the encoder of
// tensor maps.
#pragma once

#include <cuda.h>

#include <atomic>

#include "status.cuh"

namespace mla {

// Number of devices for which something is cached from launch to launch.
constexpr int kMaxDevices = 64;

struct DeviceFacts {
    int device, multiprocessors, l2_bytes;
};

// Facts of the current device, if it has the compute capability 9.0 that sm_90a code needs. The
// driver's answers are cached, since each query costs a launch some 0.03 us.
inline MlaStatus sm90_facts(DeviceFacts& facts) {
    struct Remembered {
        int multiprocessors, l2_bytes;
    };
    static std::atomic<Remembered> known[kMaxDevices];
    static_assert(std::atomic<Remembered>::is_always_lock_free);
    int device;
    cudaError_t e = cudaGetDevice(&device);
    if (e != cudaSuccess) return cuda_status("cudaGetDevice", e);
    if (device < kMaxDevices) {
        const Remembered last = known[device].load(std::memory_order_relaxed);
        facts = {device, last.multiprocessors, last.l2_bytes};
        if (facts.multiprocessors > 0) return ok();
    }
    facts.device = device;
    int major = 0, minor = 0;
    const struct {
        cudaDeviceAttr attribute;
        int* value;
    } wanted[] = {{cudaDevAttrComputeCapabilityMajor, &major},
                  {cudaDevAttrComputeCapabilityMinor, &minor},
                  {cudaDevAttrMultiProcessorCount, &facts.multiprocessors},
                  {cudaDevAttrL2CacheSize, &facts.l2_bytes}};
    for (const auto& w : wanted) {
        if ((e = cudaDeviceGetAttribute(w.value, w.attribute, device)) != cudaSuccess)
            return cuda_status("cudaDeviceGetAttribute", e);
    }
    if (major != 9 || minor != 0)
        return unsupported("compute capability", major * 10 + minor, "90");
    if (device < kMaxDevices)
        known[device].store({facts.multiprocessors, facts.l2_bytes}, std::memory_order_relaxed);
    return ok();
}

// Finds the same facts for a launch that caches something for each device.
inline MlaStatus remembered_sm90_facts(DeviceFacts& facts) {
    const MlaStatus s = sm90_facts(facts);
    if (s.code != MLA_OK) return s;
    if (facts.device >= kMaxDevices)
        return unsupported("device", facts.device, "an ordinal below 64");
    return ok();
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Finds the driver's own function at run time, because the library links without a driver.
inline MlaStatus encode_tiled(EncodeTiled& function) {
    static std::atomic<void*> known{nullptr};
    void* f = known.load(std::memory_order_relaxed);
    if (!f) {
        cudaDriverEntryPointQueryResult found;
        const cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000,
                                                               cudaEnableDefault, &found);
        if (e != cudaSuccess) return cuda_status("cudaGetDriverEntryPointByVersion", e);
        if (found != cudaDriverEntryPointSuccess || !f)
            return unsupported("driver", int64_t(found),
                               "a driver with cuTensorMapEncodeTiled (CUDA 12.0)");
        known.store(f, std::memory_order_relaxed);
    }
    function = reinterpret_cast<EncodeTiled>(f);
    return ok();
}

}  // namespace mla
