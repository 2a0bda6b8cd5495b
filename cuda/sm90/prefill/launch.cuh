// Launches one tile shape and dtype.
#pragma once

#include <cuda_runtime.h>

#include "config.cuh"
#include "params.cuh"

namespace mla::sm90::prefill {

struct Launch {
    int ctas;
    cudaStream_t stream;
};

// Defined in launch_kernel.cuh, and instantiated once per tile shape and dtype in instantiations/.
template <typename Config>
cudaError_t launch(const Launch& l, const KernelParams& p, const Maps& maps);

// Loads the kernel without launching it.
template <typename Config>
cudaError_t load();

// Maximum shared memory of a CTA on sm_90.
constexpr int kMaxSharedBytes = 232448;

// Dynamic shared memory may begin anywhere, but panels begin at multiples of 1024 bytes.
template <typename Config>
constexpr int kSharedBytes = sizeof(Shared<Config>) + 1024;

// Names give the widths of keys without rotary embedding, of the rotary part, and of values.
template <typename T>
using Config_128_64_128 = Config<T, 128, 64, 128, 128>;
template <typename T>
using Config_192_64_256 = Config<T, 192, 64, 256, 64>;
template <typename T>
using Config_64_32_64 = Config<T, 64, 32, 64, 128>;

}  // namespace mla::sm90::prefill
