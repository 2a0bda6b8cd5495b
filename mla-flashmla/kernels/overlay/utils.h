// FlashMLA's own header, but for two macros that end the process: here they throw, and guard.h
// makes a status of it.
#pragma once

#include_next <utils.h>

#include <stdexcept>

#undef CHECK_CUDA
#define CHECK_CUDA(call)                                                         \
    do {                                                                         \
        const cudaError_t checked = (call);                                      \
        if (checked != cudaSuccess) throw std::runtime_error(cudaGetErrorString(checked)); \
    } while (0)

#undef FLASH_ASSERT
#define FLASH_ASSERT(condition)                                                       \
    do {                                                                              \
        if (!(condition)) throw std::runtime_error("FlashMLA asserts that " #condition); \
    } while (0)
