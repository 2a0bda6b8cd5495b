// Single instructions that have no other home: 8x8 matrices of 16-bit values spread over a warp,
// asynchronous copies, conversions, register budgets.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace mla {

// Stores four matrices; lane 8 i + j gives the address of row j of matrix i.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(a), "r"(b), "r"(c), "r"(d)
        : "memory");
}

// The same with rows and columns exchanged: row j of a matrix in memory is its column j.
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, uint32_t a, uint32_t b,
                                                          uint32_t c, uint32_t d) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(
            address),
        "r"(a), "r"(b), "r"(c), "r"(d)
        : "memory");
}

// Loads four matrices; lane 8 i + j gives the address of row j of matrix i.
__device__ __forceinline__ void load_matrices(uint32_t (&d)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}

// The same, each of them transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&d)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}

// d (16 x 8) += a (16 x 16) b (16 x 8), by one warp.
template <typename T>
__device__ __forceinline__ void multiply_16x8(float* d, const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1);

template <>
__device__ __forceinline__ void multiply_16x8<__nv_bfloat16>(float* d, const uint32_t (&a)[4],
                                                             uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply_16x8<__half>(float* d, const uint32_t (&a)[4], uint32_t b0,
                                                      uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t transpose_matrix(uint32_t a) {
    uint32_t r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
    return r;
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// What L2 does with the lines that a copy reads; to the copy engine 0 names no policy, which is not
// the same as `evict_normal`: that makes long streams slower.
struct L2Policy {
    uint64_t bits = 0;
};

// They go before all others when room is needed.
__device__ __forceinline__ L2Policy evict_first() {
    L2Policy policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy.bits));
    return policy;
}

// Copies 16 bytes to shared memory asynchronously, or writes zeros when `valid` is false.
__device__ __forceinline__ void copy_async16(uint32_t destination, const void* source, bool valid) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
                 "r"(bytes)
                 : "memory");
}

// The same, under a policy.
__device__ __forceinline__ void copy_async16(uint32_t destination, const void* source, bool valid,
                                             L2Policy policy) {
    int bytes = valid ? 16 : 0;
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(destination),
        "l"(source), "r"(bytes), "l"(policy.bits)
        : "memory");
}

// The same for 4 bytes.
__device__ __forceinline__ void copy_async4(uint32_t destination, const void* source,
                                            bool valid = true) {
    int bytes = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ int load_shared(uint32_t address) {
    int r;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
    return r;
}

__device__ __forceinline__ uint4 load_shared16(uint32_t address) {
    uint4 r;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "r"(address)
                 : "memory");
    return r;
}

__device__ __forceinline__ uint2 load_shared8(uint32_t address) {
    uint2 r;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(r.x), "=r"(r.y)
                 : "r"(address)
                 : "memory");
    return r;
}

__device__ __forceinline__ float2 load_shared_float2(uint32_t address) {
    const uint2 v = load_shared8(address);
    return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}

__device__ __forceinline__ void store_shared4(uint32_t address, uint32_t v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void store_shared16(uint32_t address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

// The four values of a word of e4m3, which f16 holds exactly.
__device__ __forceinline__ uint2 half_from_e4m3(uint32_t word) {
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

__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Fetches the 128-byte line of an address into L2.
__device__ __forceinline__ void prefetch_line(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// From here on the next kernel of the stream may start, if its launch allows programmatic
// dependence. Code for less than 9.0 has none, and is launched without (launch_early).
__device__ __forceinline__ void let_the_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// In a kernel that was launched so: until here nothing may be read that an earlier kernel of the
// stream writes, and nothing written that one accesses.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float exp2_approx(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ float log2_approx(float x) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

template <int registers>
__device__ __forceinline__ void registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace mla
