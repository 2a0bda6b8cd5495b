// Merges two partial attention results in place.
//
// A warp takes one head and several neighbouring tokens, so the log-sum-exps of its rows share a
// sector. The eight warps of a CTA take neighbouring heads, whose rows are neighbours in memory.
// With V = 128 a row is 16 octets. Half a warp then takes a row, and each thread has sixteen
// 16-byte loads in flight.

#include "../common/octet.cuh"
#include "../common/softmax.cuh"
#include "helpers.cuh"

namespace mla {
namespace {

constexpr int kWarps = 8;
// Number of rows that a thread handles at once: 128 bytes of each result are in flight for any
// type. If elements move one by one, their addresses take the registers, so rows are fewer.
constexpr int rows_at_once(int64_t bytes, bool wide) { return wide ? 16 / int(bytes) : 4; }

// The weights of two partial results in their merge, and the merged log-sum-exp.
struct Weights {
    float a = 0.f, b = 0.f, lse = -INFINITY;

    __device__ Weights(float lse_a, float lse_b) {
        using State = SoftmaxState<BaseE>;
        const State x{lse_a == INFINITY ? -INFINITY : lse_a, 1.f};
        const State y{lse_b == INFINITY ? -INFINITY : lse_b, 1.f};
        const float maximum = fmaxf(x.maximum, y.maximum);
        // The merged maximum cannot tell this, because it ignores a NaN.
        if (x.maximum == -INFINITY && y.maximum == -INFINITY) return;
        a = x.factor(maximum);
        b = y.factor(maximum);
        const State merged{maximum, a + b};
        a /= merged.sum;
        b /= merged.sum;
        lse = merged.log_sum_exp();
    }
};

template <typename T, bool Wide>
__global__ void __launch_bounds__(kWarps * 32, 2)
    merge_kernel(const __grid_constant__ MlaMergeParams p, uint32_t head_blocks, int row_shift) {
    constexpr int rows = rows_at_once(sizeof(T), Wide);
    const int lane = threadIdx.x % 32;
    const int head = int(blockIdx.x % head_blocks) * kWarps + int(threadIdx.x / 32);
    if (head >= p.heads) return;
    const int groups = 32 >> row_shift, group = lane >> row_shift,
              member = lane & ((1 << row_shift) - 1);
    const int64_t first = int64_t(blockIdx.x / head_blocks) * (groups * rows) + group;
    const int octets = (p.width + kOctet - 1) / kOctet;
    T* out = static_cast<T*>(p.out) + head * p.out_head_stride;
    const T* other = static_cast<const T*>(p.other) + head * p.other_head_stride;
    float* lse = p.lse + head * p.lse_head_stride;
    const float* other_lse = p.other_lse + head * p.other_lse_head_stride;

    Octet<T> x[rows], y[rows];
    float a[rows], b[rows];
    const auto read = [&](int octet) {
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            const int64_t token = first + i * groups;
            if (token >= p.tokens || octet >= octets) continue;
            x[i] = load<Wide>(out + token * p.out_token_stride + octet * kOctet,
                              p.width - octet * kOctet);
            y[i] = load<Wide>(other + token * p.other_token_stride + octet * kOctet,
                              p.width - octet * kOctet);
        }
    };
#pragma unroll
    for (int i = 0; i < rows; ++i) {
        const int64_t token = first + i * groups;
        a[i] = token < p.tokens ? lse[token] : 0.f;
        b[i] = token < p.tokens ? other_lse[token] : 0.f;
    }
    read(member);
    // A row's first lane overwrites its log-sum-exp only after every lane has read it.
    __syncwarp();
#pragma unroll
    for (int i = 0; i < rows; ++i) {
        const int64_t token = first + i * groups;
        const Weights w(a[i], b[i]);
        if (member == 0 && token < p.tokens) lse[token] = w.lse;
        a[i] = w.a;
        b[i] = w.b;
    }
    for (int octet = member; octet < octets; octet += 1 << row_shift) {
        if (octet != member) read(octet);
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            const int64_t token = first + i * groups;
            if (token >= p.tokens) continue;
            float u[kOctet], v[kOctet];
            to_floats(x[i], u);
            to_floats(y[i], v);
#pragma unroll
            for (int e = 0; e < kOctet; ++e) {
                // A result of weight 0 may hold anything, even NaN.
                const float from_x = a[i] == 0.f ? 0.f : u[e] * a[i];
                const float from_y = b[i] == 0.f ? 0.f : v[e] * b[i];
                u[e] = from_x + from_y;
            }
            store<Wide>(out + token * p.out_token_stride + octet * kOctet, from_floats<T>(u),
                        p.width - octet * kOctet);
        }
    }
}

using Kernel = void (*)(MlaMergeParams, uint32_t, int);

Kernel merge_kernel_for(int dtype, bool wide) {
    switch (dtype) {
        case MLA_DTYPE_BF16:
            return wide ? merge_kernel<__nv_bfloat16, true> : merge_kernel<__nv_bfloat16, false>;
        case MLA_DTYPE_F16: return wide ? merge_kernel<__half, true> : merge_kernel<__half, false>;
        default: return wide ? merge_kernel<float, true> : merge_kernel<float, false>;
    }
}

}  // namespace

MlaStatus load_merge_kernels() { return load_each("merge", merge_kernel_for); }

}  // namespace mla

using namespace mla;

extern "C" MlaStatus mla_merge(const MlaMergeParams* params, void* stream) {
    if (!params) return refuse("params", 0, "a pointer");
    const MlaMergeParams& p = *params;
    Check check;
    check
        .that(p.dtype == MLA_DTYPE_BF16 || p.dtype == MLA_DTYPE_F16 || p.dtype == MLA_DTYPE_F32,
              "dtype", p.dtype, "MLA_DTYPE_BF16 (0), MLA_DTYPE_F16 (1) or MLA_DTYPE_F32 (3)")
        .that(p.tokens >= 0, "tokens", p.tokens, "0 and up")
        .that(p.heads >= 0 && p.heads <= 65536, "heads", p.heads, "0..=65536")
        .that(p.width >= 0 && p.width <= 65536, "width", p.width, "0..=65536");
    if (check.failed() || p.tokens == 0 || p.heads == 0) return check.status();
    const int64_t bytes = p.dtype == MLA_DTYPE_F32 ? 4 : 2;
    if (p.width) {
        check.pointer(p.out, bytes, "out")
            .pointer(p.other, bytes, "other")
            .stride(p.out_token_stride, "out_token_stride", p.tokens > 1 ? p.width : 0)
            .stride(p.out_head_stride, "out_head_stride", p.heads > 1 ? p.width : 0)
            .stride(p.other_token_stride, "other_token_stride")
            .stride(p.other_head_stride, "other_head_stride");
    }
    check.pointer(p.lse, 4, "lse")
        .pointer(p.other_lse, 4, "other_lse")
        .stride(p.lse_head_stride, "lse_head_stride", p.heads > 1 ? p.tokens : 0)
        .stride(p.other_lse_head_stride, "other_lse_head_stride");
    if (check.failed()) return check.status();

    bool wide = p.width % kOctet == 0 && is_aligned(p.out, 16) && is_aligned(p.other, 16);
    for (const int64_t stride :
         {p.tokens > 1 ? p.out_token_stride : 0, p.heads > 1 ? p.out_head_stride : 0,
          p.tokens > 1 ? p.other_token_stride : 0, p.heads > 1 ? p.other_head_stride : 0})
        wide = wide && stride * bytes % 16 == 0;
    int row_shift = 0;
    while (row_shift < 5 && (kOctet << row_shift) < p.width) ++row_shift;
    const int64_t head_blocks = ceil_div(p.heads, kWarps);
    const int64_t blocks =
        head_blocks * ceil_div(p.tokens, (32 >> row_shift) * rows_at_once(bytes, wide));
    if (blocks > INT32_MAX) return refuse("tokens", p.tokens, "fewer tokens times heads");
    return launch("merge", merge_kernel_for(p.dtype, wide), dim3(uint32_t(blocks)),
                  dim3(kWarps * 32), stream, p, uint32_t(head_blocks), row_shift);
}
