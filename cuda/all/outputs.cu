// Multiplies outputs, in place, by the share that sinks leave of them and by the sigmoid of a gate.
//
// A thread takes an octet of a row, and neighbouring threads take neighbouring octets. The factor
// of a row's sink is the same for all of its threads, which read it from the same sector.

#include "../common/octet.cuh"
#include "helpers.cuh"

namespace mla {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

template <typename T, bool Wide>
__global__ void __launch_bounds__(kThreads)
    outputs_kernel(const __grid_constant__ MlaOutputsParams p, uint32_t octets) {
    const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t row = index / octets;
    const int first = int(index % octets) * kOctet;
    const int64_t token = row / p.heads;
    const int head = int(row % p.heads);
    if (token >= p.tokens) return;
    T* out = static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride + first;
    float left = 1.f;
    if (p.sinks) {
        const float lse = p.lse[head * p.lse_head_stride + token];
        // The output of a row that sees nothing stays 0. The output of a row whose log-sum-exp is
        // NaN is NaN.
        if (lse > -INFINITY) left = sigmoid(lse - p.sinks[head]);
    }
    const T* gate = static_cast<const T*>(p.gate) + token * p.gate_token_stride +
                    head * p.gate_head_stride;
    const bool by_value = p.gate && p.gate_width > 1;
    if (p.gate && !by_value) left *= sigmoid(to_float(*gate));
    float x[kOctet], factors[kOctet];
    to_floats(load<Wide>(out, p.width - first), x);
    if (by_value) to_floats(load<Wide>(gate + first, p.width - first), factors);
#pragma unroll
    for (int e = 0; e < kOctet; ++e) x[e] *= by_value ? left * sigmoid(factors[e]) : left;
    store<Wide>(out, from_floats<T>(x), p.width - first);
}

using Kernel = void (*)(MlaOutputsParams, uint32_t);

Kernel outputs_kernel_for(int dtype, bool wide) {
    switch (dtype) {
        case MLA_DTYPE_BF16:
            return wide ? outputs_kernel<__nv_bfloat16, true>
                        : outputs_kernel<__nv_bfloat16, false>;
        case MLA_DTYPE_F16:
            return wide ? outputs_kernel<__half, true> : outputs_kernel<__half, false>;
        default: return wide ? outputs_kernel<float, true> : outputs_kernel<float, false>;
    }
}

}  // namespace

MlaStatus load_outputs_kernels() { return load_each("outputs", outputs_kernel_for); }

}  // namespace mla

using namespace mla;

extern "C" MlaStatus mla_outputs(const MlaOutputsParams* params, void* stream) {
    if (!params) return refuse("params", 0, "a pointer");
    const MlaOutputsParams& p = *params;
    Check check;
    check
        .that(p.dtype == MLA_DTYPE_BF16 || p.dtype == MLA_DTYPE_F16 || p.dtype == MLA_DTYPE_F32,
              "dtype", p.dtype, "MLA_DTYPE_BF16 (0), MLA_DTYPE_F16 (1) or MLA_DTYPE_F32 (3)")
        .that(p.tokens >= 0, "tokens", p.tokens, "0 and up")
        .that(p.heads >= 0 && p.heads <= 65536, "heads", p.heads, "0..=65536")
        .that(p.width >= 0 && p.width <= 65536, "width", p.width, "0..=65536")
        .that(!p.gate || p.gate_width == 1 || p.gate_width == p.width, "gate_width", p.gate_width,
              "1 or the width");
    if (check.failed() || p.tokens == 0 || p.heads == 0 || p.width == 0 || (!p.sinks && !p.gate))
        return check.status();
    const int64_t bytes = p.dtype == MLA_DTYPE_F32 ? 4 : 2;
    check.pointer(p.out, bytes, "out")
        .stride(p.out_token_stride, "out_token_stride", p.tokens > 1 ? p.width : 0)
        .stride(p.out_head_stride, "out_head_stride", p.heads > 1 ? p.width : 0);
    if (p.sinks)
        check.pointer(p.sinks, 4, "sinks")
            .pointer(p.lse, 4, "lse")
            .stride(p.lse_head_stride, "lse_head_stride");
    if (p.gate)
        check.pointer(p.gate, bytes, "gate")
            .stride(p.gate_token_stride, "gate_token_stride")
            .stride(p.gate_head_stride, "gate_head_stride");
    if (check.failed()) return check.status();

    bool wide = p.width % kOctet == 0 && is_aligned(p.out, 16);
    for (const int64_t stride :
         {p.tokens > 1 ? p.out_token_stride : 0, p.heads > 1 ? p.out_head_stride : 0})
        wide = wide && stride * bytes % 16 == 0;
    if (p.gate && p.gate_width > 1) {
        wide = wide && is_aligned(p.gate, 16);
        for (const int64_t stride :
             {p.tokens > 1 ? p.gate_token_stride : 0, p.heads > 1 ? p.gate_head_stride : 0})
            wide = wide && stride * bytes % 16 == 0;
    }
    const int64_t octets = ceil_div(p.width, kOctet);
    const int64_t blocks = ceil_div(int64_t(p.tokens) * p.heads * octets, int64_t(kThreads));
    if (blocks > INT32_MAX) return refuse("tokens", p.tokens, "fewer tokens times heads");
    return launch("outputs", outputs_kernel_for(p.dtype, wide), dim3(uint32_t(blocks)),
                  dim3(kThreads), stream, p, uint32_t(octets));
}
