// The loaders of the helper kernels, one per file that has any.
#pragma once

#include "../common/status.cuh"

namespace mla {

MlaStatus load_cache_kernels();
MlaStatus load_expand_kernels();
MlaStatus load_merge_kernels();
MlaStatus load_outputs_kernels();
MlaStatus load_lse_kernels();
MlaStatus load_copy_kernels();
MlaStatus load_copy_rows_kernels();
MlaStatus load_dequantize_kernels();
MlaStatus load_head_gemm_kernels();
MlaStatus load_absorb_kernels();
MlaStatus load_fence_kernels();

}  // namespace mla
