// Special registers, under the names that PTX gives them. Unlike threadIdx, they are read again at
// each use. Values computed from them therefore occupy no register in between.
#pragma once

namespace mla::ptx {

__device__ __forceinline__ int tid_x() {
    int r;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
    return r;
}

}  // namespace mla::ptx
