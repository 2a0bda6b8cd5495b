// Dequantises a matrix of e4m3 with a scale for each block of 128 x 128, once at load. A thread
// handles an octet, which is within one block.

#include "../formats/e4m3.cuh"
#include "helpers.cuh"

namespace mla {
namespace {

constexpr int kThreads = 256;
constexpr int kBlock = 128;

template <typename To, bool Wide>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const __grid_constant__ MlaDequantizeParams p, uint32_t octets) {
    const uint64_t index = uint64_t(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t row = int64_t(index / octets);
    const int64_t column = int64_t(index % octets) * kOctet;
    if (row >= p.rows) return;
    const int left = int(min(p.columns - column, int64_t(kOctet)));
    const int64_t blocks = (p.columns + kBlock - 1) / kBlock;
    const float scale = p.scales[(p.first_row + row) / kBlock * blocks + column / kBlock];
    const uint8_t* codes = static_cast<const uint8_t*>(p.codes) + row * p.columns + column;
    To* out = static_cast<To*>(p.out) + row * p.out_row_stride + column;
    store<Wide>(out, scaled<To>(load<Wide>(codes, left), scale), left);
}

using Kernel = void (*)(MlaDequantizeParams, uint32_t);

Kernel dequantize_kernel_for(int dtype, bool wide) {
    switch (dtype) {
        case MLA_DTYPE_BF16:
            return wide ? dequantize_kernel<__nv_bfloat16, true>
                        : dequantize_kernel<__nv_bfloat16, false>;
        case MLA_DTYPE_F16:
            return wide ? dequantize_kernel<__half, true> : dequantize_kernel<__half, false>;
        default: return wide ? dequantize_kernel<float, true> : dequantize_kernel<float, false>;
    }
}

}  // namespace

MlaStatus load_dequantize_kernels() { return load_each("dequantize", dequantize_kernel_for); }

}  // namespace mla

using namespace mla;

extern "C" MlaStatus mla_dequantize(const MlaDequantizeParams* params, void* stream) {
    if (!params) return refuse("params", 0, "a pointer");
    const MlaDequantizeParams& p = *params;
    constexpr int64_t kMax = int64_t(1) << 40;
    Check check;
    check
        .that(p.dtype == MLA_DTYPE_BF16 || p.dtype == MLA_DTYPE_F16 || p.dtype == MLA_DTYPE_F32,
              "dtype", p.dtype, "MLA_DTYPE_BF16 (0), MLA_DTYPE_F16 (1) or MLA_DTYPE_F32 (3)")
        .that(p.rows >= 0 && p.rows < kMax, "rows", p.rows, "0 to 2^40")
        .that(p.columns >= 0 && p.columns <= INT32_MAX, "columns", p.columns, "0..=2147483647")
        .that(p.first_row >= 0 && p.first_row < kBlock, "first_row", p.first_row, "0..=127");
    if (check.failed() || p.rows == 0 || p.columns == 0) return check.status();
    const int64_t bytes = p.dtype == MLA_DTYPE_F32 ? 4 : 2,
                  stride = p.rows > 1 ? p.out_row_stride : p.columns,
                  octets = ceil_div(p.columns, kOctet);
    check.that(p.rows <= kMax / p.columns, "rows", p.rows, "at most 2^40 elements")
        .pointer(p.codes, 1, "codes")
        .pointer(p.scales, 4, "scales")
        .pointer(p.out, bytes, "out")
        .stride(stride, "out_row_stride", p.columns);
    if (check.failed()) return check.status();
    const int64_t blocks = ceil_div(p.rows * octets, kThreads);
    if (blocks > INT32_MAX) return refuse("rows", p.rows, "fewer elements");
    const bool wide = p.columns % kOctet == 0 && is_aligned(p.codes, kOctet) &&
                      is_aligned(p.out, 16) && stride * bytes % 16 == 0;
    return launch("dequantize", dequantize_kernel_for(p.dtype, wide), dim3(uint32_t(blocks)),
                  dim3(kThreads), stream, p, uint32_t(octets));
}
