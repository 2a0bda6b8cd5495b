#include <cuda_bf16.h>

#include "../launch_kernel.cuh"

namespace mla::sm90::prefill {
MLA_PREFILL_INSTANTIATE(Config_64_64_128<__nv_bfloat16>)
}  // namespace mla::sm90::prefill
