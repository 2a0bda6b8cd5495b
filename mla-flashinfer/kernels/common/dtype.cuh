// The dtypes of the C interface.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>

#include "guard.h"

namespace fi {

// An address in parameters of FlashInfer's, which have no const.
template <typename T>
T* address(const void* pointer) {
    return static_cast<T*>(const_cast<void*>(pointer));
}

// Calls `launch` with a value of the dtype that has this number.
template <typename Launch>
cudaError_t of_dtype(int32_t dtype, Launch&& launch) {
    switch (dtype) {
        case 0: return launch(__half{});
        case 1: return launch(__nv_bfloat16{});
        default: throw std::invalid_argument("dtype: accepted 0 (f16) and 1 (bf16)");
    }
}

}  // namespace fi
