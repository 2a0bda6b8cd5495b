// Instructions that GPUs have from 8.9 on, under the names that PTX gives them.
#pragma once

#include <cstdint>

namespace mla::ptx {

// The four values of a word of e4m3 in f16, which holds them exactly.
__device__ __forceinline__ uint2 cvt_f16x4_e4m3x4(uint32_t word) {
    uint2 r;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}\n"
        : "=r"(r.x), "=r"(r.y)
        : "r"(word));
    return r;
}

}  // namespace mla::ptx
