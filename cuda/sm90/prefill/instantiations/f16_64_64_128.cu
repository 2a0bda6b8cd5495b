#include <cuda_fp16.h>

#include "../launch_kernel.cuh"

namespace mla::sm90::prefill {
MLA_PREFILL_INSTANTIATE(Config_64_64_128<__half>)
}  // namespace mla::sm90::prefill
