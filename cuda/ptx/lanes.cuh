// Instructions of threads and warps that only a few kernels need, under the names that PTX gives
// them.
#pragma once

#include <cstdint>

namespace mla::ptx {

// Loads data that is read once, without taking lines of L1 from data in flight. Loads are issued in
// the order of the source.
__device__ __forceinline__ float4 ld_global_nc(const float* address) {
    float4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(address));
    return x;
}

__device__ __forceinline__ void st_shared_v2(uint32_t address, uint32_t x, uint32_t y) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}

// 1 if `x` is at least `bound`, or else 0.
__device__ __forceinline__ float set_ge(float x, float bound) {
    float r;
    asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(bound));
    return r;
}

// Adds the value of the lane `delta` before this one, if there is one.
__device__ __forceinline__ uint32_t shfl_up_add(uint32_t x, int delta) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        ".reg .u32 before;\n"
        "shfl.sync.up.b32 before|p, %0, %1, 0, 0xffffffff;\n"
        "@p add.u32 %0, %0, before;\n"
        "}\n"
        : "+r"(x)
        : "r"(delta));
    return x;
}

// Inclusive prefix sum over the lanes.
__device__ __forceinline__ uint32_t inclusive_sum(uint32_t x) {
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) x = shfl_up_add(x, delta);
    return x;
}

// Keeps `x` in a register: the compiler does not compute it anew at each use.
__device__ __forceinline__ uint32_t in_register(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Adds `n`; returns the previous value.
__device__ __forceinline__ uint32_t atom_shared_add(uint32_t address, uint32_t n) {
    uint32_t r;
    asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(r) : "r"(address), "r"(n) : "memory");
    return r;
}

}  // namespace mla::ptx
