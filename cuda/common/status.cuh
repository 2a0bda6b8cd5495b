// Results of launch functions: refusals that name the argument, and errors of CUDA.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <initializer_list>
#include <utility>

#include "../include/mla.h"

namespace mla {

inline MlaStatus ok() { return {MLA_OK, 0, nullptr, 0, nullptr}; }

inline MlaStatus refuse(const char* field, int64_t given, const char* accepted) {
    return {MLA_BAD_ARGUMENT, 0, field, given, accepted};
}

// Refuses a device that lacks something which the kernel needs.
inline MlaStatus unsupported(const char* field, int64_t given, const char* accepted) {
    return {MLA_UNSUPPORTED_DEVICE, 0, field, given, accepted};
}

inline MlaStatus cuda_status(const char* call, cudaError_t error) {
    if (error == cudaSuccess) return ok();
    return {MLA_CUDA_ERROR, int32_t(error), call, int64_t(error), "success"};
}

inline int64_t address(const void* pointer) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer));
}

// A number within the range that a status can hold; 0 for NaN.
inline int64_t truncated(float x) {
    return x >= 0x1p62f ? INT64_MAX : x <= -0x1p62f ? INT64_MIN : x == x ? int64_t(x) : 0;
}

inline bool is_aligned(const void* pointer, int64_t bytes) { return address(pointer) % bytes == 0; }

// Checks arguments one after another; the first refusal is the result.
class Check {
  public:
    Check& that(bool holds, const char* field, int64_t given, const char* accepted) {
        if (!holds && status_.code == MLA_OK) status_ = refuse(field, given, accepted);
        return *this;
    }

    // A pointer to elements of `bytes` bytes each.
    Check& pointer(const void* pointer, int64_t bytes, const char* field) {
        return that(pointer != nullptr && is_aligned(pointer, bytes), field, address(pointer),
                    "a device pointer aligned to its elements");
    }

    Check& stride(int64_t stride, const char* field, int64_t min = 0) {
        return that(stride >= min && stride < (int64_t(1) << 48), field, stride,
                    "a stride below 2^48 under which rows do not overlap");
    }

    bool failed() const { return status_.code != MLA_OK; }
    MlaStatus status() const { return status_; }

  private:
    MlaStatus status_ = ok();
};

// Unlike <<<>>>, this returns the error of the launch instead of leaving it for a later query.
template <typename... Parameters, typename... Arguments>
MlaStatus launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                 void* stream, Arguments&&... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.stream = static_cast<cudaStream_t>(stream);
    return cuda_status(name,
                       cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

// Loads a kernel into the current context without launching it.
template <typename... Parameters>
MlaStatus load(const char* name, void (*kernel)(Parameters...)) {
    cudaFuncAttributes attributes;
    return cuda_status(name, cudaFuncGetAttributes(&attributes, kernel));
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace mla
