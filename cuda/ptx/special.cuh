// Special registers, under the names that PTX gives them. Unlike threadIdx, one is read again
// wherever it is asked for: what is computed from it occupies no register in the meantime.
#pragma once

namespace mla::ptx {

__device__ __forceinline__ int tid_x() {
    int r;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
    return r;
}

}  // namespace mla::ptx
