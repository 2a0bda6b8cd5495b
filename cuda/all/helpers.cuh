// The loaders of the helper kernels, one per file that has any.
#pragma once

#include "../common/status.cuh"

namespace mla {

// Loads the kernel that `kernel_for` gives for each dtype, with wide accesses and without.
template <typename Kernel>
MlaStatus load_each(const char* name, Kernel (*kernel_for)(int dtype, bool wide)) {
    for (const int dtype : {MLA_DTYPE_BF16, MLA_DTYPE_F16, MLA_DTYPE_F32})
        for (const bool wide : {false, true}) {
            const MlaStatus status = load(name, kernel_for(dtype, wide));
            if (status.code != MLA_OK) return status;
        }
    return ok();
}

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
