// The names that cuda/sm90/prefill still uses for the instructions of cuda/ptx; nothing else does.
#pragma once

#include "../ptx/sm90.cuh"

namespace mla {

using ptx::shared_address;
__device__ __forceinline__ uint4 load_shared16(uint32_t address) {
    return ptx::ld_shared_v4(address);
}
__device__ __forceinline__ float exp2_approx(float x) { return ptx::ex2_approx(x); }
__device__ __forceinline__ float log2_approx(float x) { return ptx::lg2_approx(x); }
__device__ __forceinline__ float reciprocal_approx(float x) { return ptx::rcp_approx(x); }
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
    ptx::stmatrix_x4(address, a, b, c, d);
}
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    return ptx::cvt_rn_x2<T>(low, high);
}
__device__ __forceinline__ void load_matrices(uint32_t (&d)[4], uint32_t address) {
    ptx::ldmatrix_x4(d, address);
}
template <typename T>
__device__ __forceinline__ void multiply_16x8(float* d, const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) {
    ptx::mma_m16n8k16<T>(d, a, b0, b1);
}
template <int registers>
__device__ __forceinline__ void registers_grow() {
    ptx::setmaxnreg_inc<registers>();
}
template <int registers>
__device__ __forceinline__ void registers_shrink() {
    ptx::setmaxnreg_dec<registers>();
}
__device__ __forceinline__ void let_the_next_kernel_start() {
    ptx::griddepcontrol_launch_dependents();
}
__device__ __forceinline__ void wait_for_earlier_kernels() { ptx::griddepcontrol_wait(); }

}  // namespace mla
