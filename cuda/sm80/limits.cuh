// Facts about a device on which the launches of this family depend.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>

#include "common/device.cuh"

namespace mla::sm80 {

struct Limits {
    int device;
    // Bytes of shared memory: of a CTA, and of an SM.
    int shared_of_cta, shared_of_sm;
    int multiprocessors;
};

// Bytes of shared memory that the system takes from every CTA.
constexpr int kReserved = 1024;

// Allows a kernel its dynamic shared memory, once per device and size. Doing so twice does no harm.
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
