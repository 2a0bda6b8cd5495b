// Nothing that FlashInfer throws leaves a C function: it becomes a status and a text.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <exception>
#include <string>

namespace fi {

// The text behind fi_last_error().
std::string& last_error();

template <typename Work>
int32_t guarded(Work&& work) noexcept {
    try {
        const cudaError_t status = work();
        if (status != cudaSuccess) last_error() = cudaGetErrorString(status);
        return static_cast<int32_t>(status);
    } catch (const std::exception& error) {
        last_error() = error.what();
    } catch (...) {
        last_error() = "an exception that is no std::exception";
    }
    return -1;
}

}  // namespace fi
