// Instructions that every GPU since Ampere has, under the names that PTX gives them.
//
// Addresses in shared memory are 32-bit numbers (`shared_address`). Nothing here has logic of its
// own: one function is one instruction, or one conversion.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace mla::ptx {

// The CTA's dynamic shared memory, aligned to 128 bytes.
__device__ __forceinline__ char* dynamic_shared() {
    extern __shared__ __align__(128) char dynamic_shared_memory[];
    return dynamic_shared_memory;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Lane within the warp. Unlike threadIdx, it is read again at each use. Values computed from it
// therefore occupy no register in between.
__device__ __forceinline__ int laneid() {
    int r;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(r));
    return r;
}

// ------------------------------------------------------------------------------ loads and stores

__device__ __forceinline__ int ld_shared_s32(uint32_t address) {
    int r;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
    return r;
}

__device__ __forceinline__ float ld_shared_f32(uint32_t address) {
    float r;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(address) : "memory");
    return r;
}

__device__ __forceinline__ uint2 ld_shared_v2(uint32_t address) {
    uint2 r;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(r.x), "=r"(r.y)
                 : "r"(address)
                 : "memory");
    return r;
}

__device__ __forceinline__ float2 ld_shared_v2_f32(uint32_t address) {
    const uint2 v = ld_shared_v2(address);
    return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}

__device__ __forceinline__ uint4 ld_shared_v4(uint32_t address) {
    uint4 r;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "r"(address)
                 : "memory");
    return r;
}

__device__ __forceinline__ float4 ld_shared_v4_f32(uint32_t address) {
    const uint4 v = ld_shared_v4(address);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                       __uint_as_float(v.w));
}

__device__ __forceinline__ void st_shared(uint32_t address, uint32_t v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void st_shared_v4(uint32_t address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ void st_shared_v4_f32(uint32_t address, float4 v) {
    st_shared_v4(address, make_uint4(__float_as_uint(v.x), __float_as_uint(v.y),
                                     __float_as_uint(v.z), __float_as_uint(v.w)));
}

// Fetches the 128-byte line of an address into L2.
__device__ __forceinline__ void prefetch_global_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// L2 policy for the lines that a copy reads. For TMA, 0 means no policy. That is not the same as
// `evict_normal`, which makes long streams slower.
struct CachePolicy {
    uint64_t bits = 0;
};

// Lines with this policy are evicted before all others.
__device__ __forceinline__ CachePolicy createpolicy_evict_first() {
    CachePolicy policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy.bits));
    return policy;
}

// ---------------------------------------------------------------------------- asynchronous copies

// Copies 16 bytes to shared memory, or writes zeros if `valid` is false.
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source, bool valid) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
                 "r"(bytes)
                 : "memory");
}

// The same copy, from and to places at constant distances behind the addresses. The distances are
// immediates of the instruction, so several copies use the same address registers. These registers
// must not change before the last of the copies has read them, which may be long after its issue.
template <int destination_offset, int source_offset>
__device__ __forceinline__ void cp_async_16_at(uint32_t destination, const void* source,
                                               bool valid) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0 + %3], [%1 + %4], 16, %2;" ::"r"(destination),
                 "l"(source), "r"(bytes), "n"(destination_offset), "n"(source_offset)
                 : "memory");
}

// The same copy with an L2 policy.
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source, bool valid,
                                            CachePolicy policy) {
    int bytes = valid ? 16 : 0;
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(destination),
        "l"(source), "r"(bytes), "l"(policy.bits)
        : "memory");
}

// Copies 4 bytes to shared memory, or writes zeros if `valid` is false.
__device__ __forceinline__ void cp_async_4(uint32_t destination, const void* source,
                                           bool valid = true) {
    int bytes = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source),
                 "r"(bytes)
                 : "memory");
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `pending` of this thread's groups are unfinished.
template <int pending>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Waits for all of this thread's copies.
__device__ __forceinline__ void cp_async_wait_all() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// ---------------------------------------------------------------- matrices spread over a warp

// Loads four 8x8 matrices of 16-bit values; lane 8 i + j gives the address of row j of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&d)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}

// Loads two such matrices; lanes 0 to 15 give the addresses.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&d)[2], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared::cta.b16 {%0, %1}, [%2];"
                 : "=r"(d[0]), "=r"(d[1])
                 : "r"(address)
                 : "memory");
}

// Loads four such matrices, each transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}

// Transposes an 8x8 matrix of 16-bit values.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t a) {
    uint32_t r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
    return r;
}

// d (16 x 8) += a (16 x 16) b (16 x 8), by one warp. Let g = lane / 4 and q = lane % 4. d[0] and
// d[1] are row g at columns 2 q and 2 q + 1; d[2] and d[3] are row g + 8 at the same columns. a[0]
// is row g at columns 2 q and 2 q + 1, and a[1] is row g + 8 there; a[2] and a[3] are both rows at
// columns 2 q + 8 and 2 q + 9. b0 is column g at rows 2 q and 2 q + 1; b1 is column g at rows 2 q +
// 8 and 2 q + 9.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float* d, const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float* d, const uint32_t (&a)[4],
                                                            uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float* d, const uint32_t (&a)[4], uint32_t b0,
                                                     uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ------------------------------------------------------------------------------------- arithmetic

// Rounds two floats to two neighbouring values of T, `low` in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t cvt_rn_x2(float low, float high);

template <>
__device__ __forceinline__ uint32_t cvt_rn_x2<__nv_bfloat16>(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

template <>
__device__ __forceinline__ uint32_t cvt_rn_x2<__half>(float low, float high) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// Multiplies both halves of a word by both halves of another. The products are rounded.
template <typename T>
__device__ __forceinline__ uint32_t mul_rn_x2(uint32_t a, uint32_t b);

template <>
__device__ __forceinline__ uint32_t mul_rn_x2<__nv_bfloat16>(uint32_t a, uint32_t b) {
    uint32_t r;
    // Before sm_90, bf16 is multiplied only by fma. Adding minus zero changes nothing.
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
    return r;
}

template <>
__device__ __forceinline__ uint32_t mul_rn_x2<__half>(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Multiplies both halves of a word by those of another, adds those of a third, and rounds once.
template <typename T>
__device__ __forceinline__ uint32_t fma_rn_x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    if constexpr (std::is_same_v<T, __half>)
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    else
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

__device__ __forceinline__ float ex2_approx(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ float lg2_approx(float x) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ float rcp_approx(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// ------------------------------------------------------------------- atomics in device memory

// Adds and returns the previous value, as a release and an acquire. The release makes this thread's
// earlier writes, and writes of other threads that a barrier orders before the addition, visible to
// any thread that acquires the sum.
__device__ __forceinline__ int atom_add_acq_rel(int* counter, int n) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(n)
                 : "memory");
    return before;
}

// Adds, and releases the same writes as atom_add_acq_rel().
__device__ __forceinline__ void red_add_release(int* counter, int n) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(n) : "memory");
}

// Adds one in relaxed order, and returns the previous value.
__device__ __forceinline__ int atom_inc_relaxed(int* counter) {
    int before;
    asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    return before;
}

__device__ __forceinline__ int ld_acquire(const int* address) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// ----------------------------------------------------------------------------- named barriers

// A barrier among `threads` threads of the CTA. __syncthreads uses barrier 0.
__device__ __forceinline__ void bar_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at such a barrier for this warp, and does not wait for the others.
__device__ __forceinline__ void bar_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A barrier among `threads` threads that returns whether `own` is true for any of them.
__device__ __forceinline__ bool bar_red_or(int id, int threads, bool own) {
    int any;
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.ne.b32 p, %3, 0;\n"
        "bar.red.or.pred q, %1, %2, p;\n"
        "selp.b32 %0, 1, 0, q;\n"
        "}\n"
        : "=r"(any)
        : "r"(id), "r"(threads), "r"(int(own))
        : "memory");
    return any;
}

}  // namespace mla::ptx
