// Nothing that FlashMLA throws leaves a C function: it becomes a status and a text.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <exception>
#include <string>

namespace fm {

// The text behind fm_last_error().
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
    // An error that a launcher has reported is not left for the next to find.
    (void)cudaGetLastError();
    return -1;
}

}  // namespace fm
