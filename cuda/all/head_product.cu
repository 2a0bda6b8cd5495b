// Few tokens times a matrix per head: the absorbed path's q_nope * W_UK and o * W_UV.
//
//   out[t, h, :] = input[t, h, :] * weights[h]        weights[h]: [k, n]
//
// Such a product reads each weight once and uses it for a few tokens, so its floor is the time in which the weights
// stream in. The matrix is spread over as many blocks as there are multiprocessors and more, every thread has 128 bytes
// of it in flight, and nothing goes through shared memory on the way in: the tensor cores sum over k in whatever order,
// so the threads of a fragment take the k that lie in their own 16 bytes.
//
//   neighbours along n (W_UK of published checkpoints)   neighbours along k (their W_UV)
//   a block: 64 n of one head                            a block: 16 n of one head
//   a warp:  every fourth 16 k of them                   a warp:  every fourth 32 k of them
//   a thread: 8 n of 4 k; a fragment's pairs of k        a thread: 8 k of 2 n, which are two
//     are halves of two rows' words                        fragments' worth as they come
//
// The weights are the tensor core's first operand (16 rows), and 8 tokens its second. The four warps' sums are added
// through shared memory, always in the same order.
//
// The launch allows programmatic dependence: blocks start while the kernel before is ending (or, where that one lets them,
// running). They load weights that the caller calls constant at once, and wait before they read anything else.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/instructions.cuh"
#include "helpers.cuh"

namespace mla {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
// Tokens of one fragment.
constexpr int kTile = 8;

__device__ __forceinline__ uint4 stream_in(const void* from) {
    uint4 to;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                 : "l"(from));
    return to;
}

// Adds the warps' sums, `[warp][token][n]` in shared memory, and writes them rounded: 8 neighbours along n per thread.
template <typename T, int N, int Tokens>
__device__ __forceinline__ void add_warps(const float (&sums)[kWarps][Tokens][N], const MlaHeadProductParams& p, int head, int first_n, int first_token) {
    for (int item = threadIdx.x; item < Tokens * N / 8; item += kThreads) {
        const int token = item / (N / 8), n = item % (N / 8) * 8;
        if (first_token + token >= p.tokens) continue;
        float total[8] = {};
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp)
#pragma unroll
            for (int i = 0; i < 8; ++i) total[i] += sums[warp][token][n + i];
        T* out = static_cast<T*>(p.out) + int64_t(first_token + token) * p.out_token_stride + head * p.out_head_stride + first_n + n;
        *reinterpret_cast<uint4*>(out) = {pack<T>(total[0], total[1]), pack<T>(total[2], total[3]), pack<T>(total[4], total[5]), pack<T>(total[6], total[7])};
    }
}

// Weights whose neighbours lie along n.
template <typename T, int Tiles>
__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ MlaHeadProductParams p) {
    constexpr int kN = 64, kStep = 16, kSteps = 2;
    __shared__ __align__(16) float sums[kWarps][Tiles * kTile][kN];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const int blocks_per_head = p.n / kN, head = blockIdx.x / blocks_per_head, first_n = blockIdx.x % blocks_per_head * kN;
    const int first_token = blockIdx.y * Tiles * kTile;
    const T* weights = static_cast<const T*>(p.weights) + head * p.weights_head_stride + first_n + group * 8;
    const T* input = static_cast<const T*>(p.input) + head * p.input_head_stride;
    const auto row = [&](int step, int i) { return weights + (step + 4 * quad + i) * p.weights_k_stride; };

    let_the_next_kernel_start();
    if (!p.constant_weights) wait_for_earlier_kernels();

    float c[4][Tiles][4] = {};
    for (int base = kStep * warp; base < p.k; base += kSteps * kStep * kWarps) {
        uint4 w[kSteps][4];
        uint2 x[kSteps][Tiles];
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const int step = base + s * kStep * kWarps;
            if (step >= p.k) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) w[s][i] = stream_in(row(step, i));
        }
        // Waiting again costs nothing.
        wait_for_earlier_kernels();
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const int step = base + s * kStep * kWarps;
            if (step >= p.k) continue;
#pragma unroll
            for (int tile = 0; tile < Tiles; ++tile) {
                const int token = first_token + tile * kTile + group;
                x[s][tile] = {0, 0};
                if (token < p.tokens) x[s][tile] = *reinterpret_cast<const uint2*>(input + token * p.input_token_stride + step + 4 * quad);
            }
        }
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            if (base + s * kStep * kWarps >= p.k) continue;
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const auto word = [&](int i) { return (&w[s][i].x)[pair]; };
                const uint32_t a[4] = {__byte_perm(word(0), word(1), 0x5410), __byte_perm(word(0), word(1), 0x7632),
                                       __byte_perm(word(2), word(3), 0x5410), __byte_perm(word(2), word(3), 0x7632)};
#pragma unroll
                for (int tile = 0; tile < Tiles; ++tile) multiply_16x8<T>(c[pair][tile], a, x[s][tile].x, x[s][tile].y);
            }
        }
    }
    // Also where a warp had no k, since it writes results.
    wait_for_earlier_kernels();
    // Rows `group` and `group + 8` of fragment `pair` are the neighbours 2 pair and 2 pair + 1 of this thread's 8 n.
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            float* to = &sums[warp][tile * kTile + 2 * quad + odd][group * 8];
            reinterpret_cast<float4*>(to)[0] = {c[0][tile][odd], c[0][tile][2 + odd], c[1][tile][odd], c[1][tile][2 + odd]};
            reinterpret_cast<float4*>(to)[1] = {c[2][tile][odd], c[2][tile][2 + odd], c[3][tile][odd], c[3][tile][2 + odd]};
        }
    __syncthreads();
    add_warps<T>(sums, p, head, first_n, first_token);
}

// Weights whose neighbours lie along k.
template <typename T, int Tiles>
__global__ void __launch_bounds__(kThreads) columns_kernel(const __grid_constant__ MlaHeadProductParams p) {
    constexpr int kN = 16, kStep = 32, kSteps = 4;
    __shared__ __align__(16) float sums[kWarps][Tiles * kTile][kN];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const int blocks_per_head = p.n / kN, head = blockIdx.x / blocks_per_head, first_n = blockIdx.x % blocks_per_head * kN;
    const int first_token = blockIdx.y * Tiles * kTile;
    const T* weights = static_cast<const T*>(p.weights) + head * p.weights_head_stride + int64_t(first_n + group) * p.weights_n_stride + 8 * quad;
    const T* input = static_cast<const T*>(p.input) + head * p.input_head_stride + 8 * quad;
    const auto column = [&](int step, int i) { return weights + 8 * i * p.weights_n_stride + step; };

    let_the_next_kernel_start();
    if (!p.constant_weights) wait_for_earlier_kernels();

    float c[Tiles][4] = {};
    for (int base = kStep * warp; base < p.k; base += kSteps * kStep * kWarps) {
        uint4 w[kSteps][2], x[kSteps][Tiles];
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const int step = base + s * kStep * kWarps;
            if (step >= p.k) continue;
#pragma unroll
            for (int i = 0; i < 2; ++i) w[s][i] = stream_in(column(step, i));
        }
        // Waiting again costs nothing.
        wait_for_earlier_kernels();
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const int step = base + s * kStep * kWarps;
            if (step >= p.k) continue;
#pragma unroll
            for (int tile = 0; tile < Tiles; ++tile) {
                const int token = first_token + tile * kTile + group;
                x[s][tile] = {0, 0, 0, 0};
                if (token < p.tokens) x[s][tile] = *reinterpret_cast<const uint4*>(input + token * p.input_token_stride + step);
            }
        }
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            if (base + s * kStep * kWarps >= p.k) continue;
            const uint32_t low[4] = {w[s][0].x, w[s][1].x, w[s][0].y, w[s][1].y}, high[4] = {w[s][0].z, w[s][1].z, w[s][0].w, w[s][1].w};
#pragma unroll
            for (int tile = 0; tile < Tiles; ++tile) {
                multiply_16x8<T>(c[tile], low, x[s][tile].x, x[s][tile].y);
                multiply_16x8<T>(c[tile], high, x[s][tile].z, x[s][tile].w);
            }
        }
    }
    wait_for_earlier_kernels();
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[warp][tile * kTile + 2 * quad + i % 2][group + i / 2 * 8] = c[tile][i];
    __syncthreads();
    add_warps<T>(sums, p, head, first_n, first_token);
}

using Kernel = void (*)(MlaHeadProductParams);

template <typename T>
Kernel kernel_of(bool rows, int tiles) {
    switch (tiles) {
        case 1: return rows ? rows_kernel<T, 1> : columns_kernel<T, 1>;
        case 2: return rows ? rows_kernel<T, 2> : columns_kernel<T, 2>;
        default: return rows ? rows_kernel<T, 4> : columns_kernel<T, 4>;
    }
}

Kernel head_product_kernel(int dtype, bool rows, int tiles) {
    return dtype == MLA_DTYPE_F16 ? kernel_of<__half>(rows, tiles) : kernel_of<__nv_bfloat16>(rows, tiles);
}

}  // namespace

MlaStatus load_head_product_kernels() {
    for (const int dtype : {MLA_DTYPE_BF16, MLA_DTYPE_F16})
        for (const bool rows : {false, true})
            for (const int tiles : {1, 2, 4}) {
                const MlaStatus status = load("head product", head_product_kernel(dtype, rows, tiles));
                if (status.code != MLA_OK) return status;
            }
    return ok();
}

}  // namespace mla

using namespace mla;

extern "C" MlaStatus mla_head_product(const MlaHeadProductParams* params, void* stream) {
    if (!params) return refuse("params", 0, "a pointer");
    const MlaHeadProductParams& p = *params;
    const bool rows = p.weights_n_stride == 1;
    Check check;
    check.that(p.dtype == MLA_DTYPE_BF16 || p.dtype == MLA_DTYPE_F16, "dtype", p.dtype, "MLA_DTYPE_BF16 (0) or MLA_DTYPE_F16 (1)")
        .that(p.tokens >= 0 && p.tokens <= 65535 * kTile, "tokens", p.tokens, "0..=524280")
        .that(p.heads >= 0 && p.heads <= 65536, "heads", p.heads, "0..=65536")
        .that(rows || p.weights_k_stride == 1, "weights_k_stride", p.weights_k_stride, "1, or a weights_n_stride of 1")
        .that(p.k > 0 && p.k <= 65536 && p.k % (rows ? 16 : 32) == 0, "k", p.k, "a multiple of 16, of 32 where neighbours lie along k, to 65536")
        .that(p.n > 0 && p.n <= 65536 && p.n % (rows ? 64 : 16) == 0, "n", p.n, "a multiple of 64, of 16 where neighbours lie along k, to 65536");
    if (check.failed() || p.tokens == 0 || p.heads == 0) return check.status();
    const struct {
        const void* pointer;
        const char* name;
    } pointers[] = {{p.input, "input"}, {p.weights, "weights"}, {p.out, "out"}};
    for (const auto& [pointer, name] : pointers) check.that(pointer && is_aligned(pointer, 16), name, address(pointer), "a device pointer aligned to 16 bytes");
    const struct {
        int64_t stride, extent, least;
        const char* name;
    } strides[] = {{p.input_token_stride, p.tokens, 0, "input_token_stride"},
                   {p.input_head_stride, p.heads, 0, "input_head_stride"},
                   {p.weights_head_stride, p.heads, 0, "weights_head_stride"},
                   {rows ? p.weights_k_stride : p.weights_n_stride, 2, 0, rows ? "weights_k_stride" : "weights_n_stride"},
                   {p.out_token_stride, p.tokens, p.n, "out_token_stride"},
                   {p.out_head_stride, p.heads, p.n, "out_head_stride"}};
    for (const auto& [stride, extent, least, name] : strides)
        if (extent > 1) check.stride(stride, name, least).that(stride % 8 == 0, name, stride, "a multiple of 8");
    if (check.failed()) return check.status();

    const int tiles = p.tokens <= kTile ? 1 : p.tokens <= 2 * kTile ? 2 : 4;
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(uint32_t(p.heads * (p.n / (rows ? 64 : 16))), uint32_t(ceil_div(p.tokens, tiles * kTile)));
    config.blockDim = dim3(kThreads);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &early;
    config.numAttrs = 1;
    return cuda_status("head product", cudaLaunchKernelEx(&config, head_product_kernel(p.dtype, rows, tiles), p));
}
