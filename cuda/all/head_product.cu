// Few tokens times a matrix per head: the absorbed path's q_nope * W_UK and o * W_UV.
//
//   out[t, h, :] = input[t, h, :] * weights[h]        weights[h]: [k, n]
//
// Such a product reads each weight once and uses it for a few tokens, so its floor is the time in which the weights
// stream in, and with few heads that is less than what a launch takes: then every step between the launch and the last
// result counts, and so do the instructions themselves, which come from memory as well. A block has 16 KB of weights on
// their way to shared memory before it does anything else; whole lines, asked for by neighbouring threads. 16 tokens are
// the tensor core's first operand, 8 n its second.
//
//   neighbours along n (W_UK of published checkpoints)   neighbours along k (their W_UV)
//   a block: 64 n of one head                            a block: 16 n of one head
//   a warp:  8 n, every k                                a warp:  every eighth 64 k, in memory that no other warp uses
//   results leave the warps, of two tiles as lines       the warps' sums are added through shared memory, in order
//
// The launch allows programmatic dependence: blocks start while the kernel before is ending (or, where that one lets them,
// running). They load weights that the caller calls constant at once, and wait before they read anything else.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <utility>

#include "../common/instructions.cuh"
#include "../common/mbarrier.cuh"
#include "helpers.cuh"

namespace mla {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
// Tokens of a fragment, and how many of those a block has at most.
constexpr int kTile = 16;
constexpr int kTiles = 2;
// With as many, and one tile of tokens, all blocks fit at once.
constexpr int kFewHeads = 32;

// Widths that published models have, which the compiler then knows: what W_UK and W_UV sum over.
constexpr int kNope = 128;
constexpr int kLatent = 512;

// Strides in units of 16 bytes, eight elements.
struct HeadPlan {
    const uint4* input;
    const uint4* weights;
    uint4* out;
    uint32_t input_token_stride, input_head_stride;
    uint32_t weights_head_stride, weights_stride;
    uint32_t out_token_stride, out_head_stride;
    uint32_t tokens, k;
    bool constant_weights;

    __device__ __forceinline__ const uint4* input_at(uint32_t token, uint32_t head) const {
        return input + (uint64_t(token) * input_token_stride + uint64_t(head) * input_head_stride);
    }

    // Row `row` of a head's weights: of 64 n where neighbours lie along n, of k otherwise.
    __device__ __forceinline__ const uint4* weights_at(uint32_t head, uint32_t row) const {
        return weights + (uint64_t(head) * weights_head_stride + uint64_t(row) * weights_stride);
    }

    // Writes a fragment of results, 16 tokens by 8 n from those on that are given, as far as there are tokens.
    template <typename T>
    __device__ __forceinline__ void put(uint32_t token, uint32_t head, uint32_t n, const float4& c) const {
        const uint32_t lane = threadIdx.x % 32, row = token + lane / 4;
        uint32_t* to = reinterpret_cast<uint32_t*>(out + (uint64_t(row) * out_token_stride + uint64_t(head) * out_head_stride)) + (n / 2 + lane % 4);
        if (row < tokens) *to = pack<T>(c.x, c.y);
        if (row + 8 < tokens) to[uint64_t(8 * 4) * out_token_stride] = pack<T>(c.z, c.w);
    }
};

// The thread's number, read once more: so the compiler keeps the addresses that are computed from it apart from those of the
// weights, which have to be ready first.
__device__ __forceinline__ uint32_t thread_again() {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// Weights are read once: sparing L2, they go before everything else there, and nothing that others wrote is pushed out for them.
// For few heads and tokens, making the policy takes as long as it saves.
template <bool Sparing>
__device__ __forceinline__ void copy_weights(uint32_t to, const uint4* from) {
    if constexpr (Sparing)
        copy_async16(to, from, true, evict_first());
    else
        copy_async16(to, from, true);
}

// Where a unit of 16 bytes lies in shared memory, of rows of `Units`. It is moved by its row's number, so that loads of
// fragments, which take a unit of eight rows each, find them in different banks.
template <uint32_t Units>
__device__ __forceinline__ uint32_t place(uint32_t row, uint32_t unit) {
    return (row * Units + (unit ^ row % 8)) * 16;
}

// Weights whose neighbours lie along n. `K` is k, or 0 where the compiler does not know it.
template <typename T, int Tiles, int K, bool Sparing>
__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ HeadPlan p) {
    constexpr uint32_t kN = 64, kChunk = 128, kTokens = Tiles * kTile;
    constexpr bool kWhole = K > 0 && K % kChunk == 0;
    // Rows of 8 and of 16 units.
    __shared__ __align__(128) char weights[kChunk * kN * 2], input[kTokens * kChunk * 2];
    let_the_next_kernel_start();
    const uint32_t head = blockIdx.y, first_token = blockIdx.z * kTokens, k = K ? K : p.k;
    if (!p.constant_weights) wait_for_earlier_kernels();

    // Two sums, so that a step need not wait for the one before.
    float c[2][Tiles][4] = {};
#pragma unroll 1
    for (uint32_t base = 0; base < k; base += kChunk) {
        if (base) __syncthreads();
        {
            const uint32_t row = threadIdx.x / 8, unit = threadIdx.x % 8;
            const uint4* from = p.weights_at(head, base + row) + (blockIdx.x * 8 + unit);
            const uint32_t to = shared_address(weights) + place<8>(row, unit);
#pragma unroll
            for (uint32_t i = 0; i < kChunk; i += kThreads / 8)
                if (kWhole || base + row + i < k) copy_weights<Sparing>(to + i * 128, from + uint64_t(i) * p.weights_stride);
        }
        wait_for_earlier_kernels();
        const uint32_t thread = thread_again(), lane = thread % 32, warp = thread / 32;
        {
            const uint32_t row = thread / 16, unit = thread % 16;
            const uint4* from = p.input_at(first_token + row, head) + (base / 8 + unit);
            const uint32_t to = shared_address(input) + place<16>(row, unit);
#pragma unroll
            for (uint32_t i = 0; i < kTokens; i += kThreads / 16)
                if (kWhole || base + unit * 8 < k) copy_async16(to + i * 256, from + uint64_t(i) * p.input_token_stride, first_token + row + i < p.tokens);
        }
        copy_async_wait();
        __syncthreads();
#pragma unroll
        for (uint32_t step = 0; step < kChunk / 16; step += 2) {
            if (!kWhole && base + step * 16 >= k) break;
            uint32_t w[4];
            load_matrices_transposed(w, shared_address(weights) + place<8>(step * 16 + lane, warp));
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                if (!kWhole && base + (step + half) * 16 >= k) break;
#pragma unroll
                for (uint32_t tile = 0; tile < Tiles; ++tile) {
                    uint32_t x[4];
                    load_matrices(x, shared_address(input) + place<16>(tile * kTile + lane % 16, (step + half) * 2 + lane / 16));
                    multiply_16x8<T>(c[half][tile], x, w[2 * half], w[2 * half + 1]);
                }
            }
        }
    }
    if constexpr (Tiles == 1) {
        const float(&a)[4] = c[0][0], (&b)[4] = c[1][0];
        p.put<T>(first_token, head, blockIdx.x * kN + threadIdx.x / 32 * 8, {a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]});
    } else {
        // Through shared memory, where the weights were, so that whole lines are written.
        __syncthreads();
        const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, staged = shared_address(weights);
#pragma unroll
        for (uint32_t tile = 0; tile < Tiles; ++tile) {
            const float(&a)[4] = c[0][tile], (&b)[4] = c[1][tile];
            const uint32_t row = tile * kTile + lane / 4, to = staged + lane % 4 * 4;
            store_shared4(to + place<8>(row, warp), pack<T>(a[0] + b[0], a[1] + b[1]));
            store_shared4(to + place<8>(row + 8, warp), pack<T>(a[2] + b[2], a[3] + b[3]));
        }
        __syncthreads();
        static_assert(kTokens * 8 == kThreads, "a unit per thread");
        const uint32_t row = threadIdx.x / 8, unit = threadIdx.x % 8, token = first_token + row;
        if (token >= p.tokens) return;
        p.out[uint64_t(token) * p.out_token_stride + uint64_t(head) * p.out_head_stride + (blockIdx.x * 8 + unit)] = load_shared16(staged + place<8>(row, unit));
    }
}

// Weights whose neighbours lie along k.
template <typename T, int Tiles, int K, bool Sparing>
__global__ void __launch_bounds__(kThreads) columns_kernel(const __grid_constant__ HeadPlan p) {
    constexpr uint32_t kN = 16, kSlice = 64, kChunk = kWarps * kSlice, kTokens = Tiles * kTile;
    constexpr bool kWhole = K > 0 && K % kChunk == 0;
    // Each warp's k of the weights and, after them, of the input: rows of 8 units. Its sums follow in the same place.
    __shared__ __align__(128) char slices[kWarps][(kN + kTokens) * kSlice * 2];
    let_the_next_kernel_start();
    const uint32_t head = blockIdx.y, first_token = blockIdx.z * kTokens, k = K ? K : p.k;
    if (!p.constant_weights) wait_for_earlier_kernels();

    float c[Tiles][2][4] = {};
    const uint32_t chunks = kWhole ? K / kChunk : (k + kChunk - 1) / kChunk;
#pragma unroll 1
    for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
        __syncwarp();
        const uint32_t base = chunk * kChunk + threadIdx.x / 32 * kSlice;
        {
            const uint32_t row = threadIdx.x % 32 / 8, unit = threadIdx.x % 8, to = shared_address(slices[threadIdx.x / 32]);
            const uint4* from = p.weights_at(head, blockIdx.x * kN + row) + (base / 8 + unit);
#pragma unroll
            for (uint32_t i = 0; i < kN; i += 4)
                if (kWhole || base + unit * 8 < k) copy_weights<Sparing>(to + place<8>(row + i, unit), from + uint64_t(i) * p.weights_stride);
        }
        const uint32_t thread = thread_again(), lane = thread % 32;
        const uint32_t weights = shared_address(slices[thread / 32]), input = weights + kN * kSlice * 2;
        // What the kernel before may still be writing is fetched into L2 already, which sees what is written: a line per token.
        if (lane < kTokens && first_token + lane < p.tokens && (kWhole || base < k)) prefetch_line(p.input_at(first_token + lane, head) + base / 8);
        wait_for_earlier_kernels();
        {
            const uint32_t row = lane / 8, unit = lane % 8;
            const uint4* from = p.input_at(first_token + row, head) + (base / 8 + unit);
#pragma unroll
            for (uint32_t i = 0; i < kTokens; i += 4)
                if (kWhole || base + unit * 8 < k) copy_async16(input + place<8>(row + i, unit), from + uint64_t(i) * p.input_token_stride, first_token + row + i < p.tokens);
        }
        copy_async_wait();
        __syncwarp();
#pragma unroll
        for (uint32_t step = 0; step < kSlice / 16; ++step) {
            if (!kWhole && base + step * 16 >= k) break;
            uint32_t w[4];
            load_matrices(w, weights + place<8>(lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
#pragma unroll
            for (uint32_t tile = 0; tile < Tiles; ++tile) {
                uint32_t x[4];
                load_matrices(x, input + place<8>(tile * kTile + lane % 16, step * 2 + lane / 16));
                multiply_16x8<T>(c[tile][0], x, w[0], w[1]);
                multiply_16x8<T>(c[tile][1], x, w[2], w[3]);
            }
        }
    }
    // A fragment's sums are added by a warp, each thread its own; always in the same order.
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < 2 * Tiles; ++i) {
        const float(&own)[4] = c[i / 2][i % 2];
        reinterpret_cast<float4*>(slices[warp])[32 * i + lane] = {own[0], own[1], own[2], own[3]};
    }
    __syncthreads();
    if (warp >= 2 * Tiles) return;
    float4 total = {};
#pragma unroll
    for (uint32_t i = 0; i < kWarps; ++i) {
        const float4 sum = reinterpret_cast<const float4*>(slices[i])[32 * warp + lane];
        total = {total.x + sum.x, total.y + sum.y, total.z + sum.z, total.w + sum.w};
    }
    p.put<T>(first_token + warp / 2 * kTile, head, blockIdx.x * kN + warp % 2 * 8, total);
}

using Kernel = void (*)(HeadPlan);

template <typename T, int Tiles, bool Sparing>
Kernel kernel_of(bool rows, int k) {
    if (rows) return k == kNope ? rows_kernel<T, Tiles, kNope, Sparing> : rows_kernel<T, Tiles, 0, Sparing>;
    return k == kLatent ? columns_kernel<T, Tiles, kLatent, Sparing> : columns_kernel<T, Tiles, 0, Sparing>;
}

template <typename T>
Kernel kernel_of(bool rows, int tiles, bool sparing, int k) {
    if (tiles > 1) return kernel_of<T, kTiles, true>(rows, k);
    return sparing ? kernel_of<T, 1, true>(rows, k) : kernel_of<T, 1, false>(rows, k);
}

Kernel head_product_kernel(int dtype, bool rows, int tiles, bool sparing, int k) {
    return dtype == MLA_DTYPE_F16 ? kernel_of<__half>(rows, tiles, sparing, k) : kernel_of<__nv_bfloat16>(rows, tiles, sparing, k);
}

}  // namespace

MlaStatus load_head_product_kernels() {
    for (const int dtype : {MLA_DTYPE_BF16, MLA_DTYPE_F16})
        for (const bool rows : {false, true})
            for (const int k : {rows ? kNope : kLatent, 0})
                for (const auto& [tiles, sparing] : {std::pair(1, false), std::pair(1, true), std::pair(kTiles, true)}) {
                    const MlaStatus status = load("head product", head_product_kernel(dtype, rows, tiles, sparing, k));
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
        .that(p.tokens >= 0 && p.tokens <= 65535 * kTiles * kTile, "tokens", p.tokens, "0..=2097120")
        .that(p.heads >= 0 && p.heads <= 65535, "heads", p.heads, "0..=65535")
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
        if (extent > 1) check.stride(stride, name, least).that(stride % 8 == 0 && stride / 8 <= UINT32_MAX, name, stride, "a multiple of 8 below 2^35");
    if (check.failed()) return check.status();

    const auto units = [](int64_t stride, int64_t extent) { return extent > 1 ? uint32_t(stride / 8) : 0u; };
    const HeadPlan plan = {static_cast<const uint4*>(p.input),
                           static_cast<const uint4*>(p.weights),
                           static_cast<uint4*>(p.out),
                           units(p.input_token_stride, p.tokens),
                           units(p.input_head_stride, p.heads),
                           units(p.weights_head_stride, p.heads),
                           units(rows ? p.weights_k_stride : p.weights_n_stride, 2),
                           units(p.out_token_stride, p.tokens),
                           units(p.out_head_stride, p.heads),
                           uint32_t(p.tokens),
                           uint32_t(p.k),
                           p.constant_weights != 0};
    const int tiles = p.tokens <= kTile ? 1 : kTiles;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    // A multiprocessor can only hold blocks of the kernel before and of this one together if both divide its memory the same
    // way. Asked for with few heads alone: where there are more blocks than fit at once, the driver's own choice was faster.
    attributes[1].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attributes[1].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(uint32_t(p.n / (rows ? 64 : 16)), uint32_t(p.heads), uint32_t(ceil_div(p.tokens, tiles * kTile)));
    config.blockDim = dim3(kThreads);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    const bool few = p.heads <= kFewHeads;
    config.numAttrs = few ? 2 : 1;
    return cuda_status("head product", cudaLaunchKernelEx(&config, head_product_kernel(p.dtype, rows, tiles, !few, p.k), plan));
}
