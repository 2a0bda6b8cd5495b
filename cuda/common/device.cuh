// What a launch asks of the driver: the facts of the current device, and the encoder of tensor maps.
#pragma once

#include <cuda.h>

#include <atomic>

#include "status.cuh"

namespace mla {

struct DeviceFacts {
    int device, multiprocessors, l2_bytes;
};

// The current device, if it has the compute capability 9.0 that sm_90a code needs.
inline MlaStatus sm90_facts(DeviceFacts& facts) {
    cudaError_t e = cudaGetDevice(&facts.device);
    if (e != cudaSuccess) return cuda_status("cudaGetDevice", e);
    int major = 0, minor = 0;
    const struct {
        cudaDeviceAttr attribute;
        int* value;
    } wanted[] = {{cudaDevAttrComputeCapabilityMajor, &major},
                  {cudaDevAttrComputeCapabilityMinor, &minor},
                  {cudaDevAttrMultiProcessorCount, &facts.multiprocessors},
                  {cudaDevAttrL2CacheSize, &facts.l2_bytes}};
    for (const auto& w : wanted) {
        if ((e = cudaDeviceGetAttribute(w.value, w.attribute, facts.device)) != cudaSuccess)
            return cuda_status("cudaDeviceGetAttribute", e);
    }
    if (major != 9 || minor != 0) return unsupported("compute capability", major * 10 + minor, "90");
    return ok();
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's own function, found at run time: the library links without a driver.
inline MlaStatus encode_tiled(EncodeTiled& function) {
    static std::atomic<void*> known{nullptr};
    void* f = known.load(std::memory_order_relaxed);
    if (!f) {
        cudaDriverEntryPointQueryResult found;
        const cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found);
        if (e != cudaSuccess) return cuda_status("cudaGetDriverEntryPointByVersion", e);
        if (found != cudaDriverEntryPointSuccess || !f)
            return unsupported("driver", int64_t(found), "a driver with cuTensorMapEncodeTiled (CUDA 12.0)");
        known.store(f, std::memory_order_relaxed);
    }
    function = reinterpret_cast<EncodeTiled>(f);
    return ok();
}

}  // namespace mla
