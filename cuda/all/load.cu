#include "helpers.cuh"

extern "C" MlaStatus mla_load_helpers(void) {
    for (const auto load :
         {mla::load_cache_kernels, mla::load_expand_kernels, mla::load_merge_kernels,
          mla::load_lse_kernels, mla::load_copy_kernels, mla::load_copy_rows_kernels,
          mla::load_dequantize_kernels, mla::load_head_gemm_kernels, mla::load_absorb_kernels,
          mla::load_outputs_kernels, mla::load_fence_kernels}) {
        const MlaStatus status = load();
        if (status.code != MLA_OK) return status;
    }
    return mla::ok();
}
