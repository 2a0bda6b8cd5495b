// GEMM of few tokens with a matrix per head: the absorbed path's q_nope * W_UK and o * W_UV.
//
//   out[t, h, :] = input[t, h, :] * weights[h]        weights[h]: [k, n]
//
// Such a GEMM reads each weight once and uses it for a few tokens, so it takes at least the time in
// which the weights are read. With few heads, this is less than the time of a launch. Every step
// between the launch and the last result then counts. So do the instructions themselves, which come
// from memory as well. A CTA has 16 KB of weights in flight to shared memory before it does
// anything else, and neighbouring threads load whole lines. The A operand of an MMA is 16 tokens,
// and its B operand is 8 n.
//
//   weights contiguous along n (W_UK of        weights contiguous along k (their W_UV)
//   published checkpoints)
//   a CTA: 64 n of one head                    a CTA: 16 n of one head
//   a warp: 8 n, every k                       a warp: every eighth block of 64 k, in shared
//                                              memory of its own
//   warps write their own results; with two    the warps' sums are added through shared memory,
//   tiles of tokens, whole lines through       in order
//   shared memory
//
// With programmatic dependent launch, CTAs start while the previous kernel is ending, or while it
// is running if it lets them. They load weights at once if the caller calls these constant. They
// wait before they read anything else.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/device.cuh"
#include "../common/status.cuh"
#include "../ptx/sm80.cuh"
#include "../ptx/sm90.cuh"

namespace mla {

constexpr int kGemmWarps = 8;
constexpr int kGemmThreads = 32 * kGemmWarps;
// Number of tokens of a fragment, and maximum number of fragments of a CTA.
constexpr int kTile = 16;
constexpr int kTiles = 2;
// Up to this number of heads, with one tile of tokens, all CTAs run at the same time.
constexpr int kFewHeads = 32;

// Number of n of a CTA, if weights are contiguous along n.
constexpr int kRowsN = 64;

// The width that W_UK sums over in published models, which the compiler then knows.
constexpr int kNope = 128;

// Strides in units of 16 bytes, eight elements.
struct HeadPlan {
    const uint4* input;
    const uint4* weights;
    uint4* out;
    uint32_t input_token_stride, input_head_stride;
    uint32_t weights_head_stride, weights_stride;
    uint32_t out_token_stride, out_head_stride;
    uint32_t tokens, k;
    bool constant_weights, ready;

    __device__ __forceinline__ const uint4* input_at(uint32_t token, uint32_t head) const {
        return input + (uint64_t(token) * input_token_stride + uint64_t(head) * input_head_stride);
    }

    // Row `row` of a head's weights: 64 n if they are contiguous along n, otherwise k.
    __device__ __forceinline__ const uint4* weights_at(uint32_t head, uint32_t row) const {
        return weights + (uint64_t(head) * weights_head_stride + uint64_t(row) * weights_stride);
    }

    // Writes a fragment of results, 16 tokens by 8 n from `token` and `n` on, as far as there are
    // tokens.
    template <typename T>
    __device__ __forceinline__ void put(uint32_t token, uint32_t head, uint32_t n,
                                        const float4& c) const {
        const uint32_t lane = threadIdx.x % 32, row = token + lane / 4;
        uint32_t* to = reinterpret_cast<uint32_t*>(out + (uint64_t(row) * out_token_stride +
                                                          uint64_t(head) * out_head_stride)) +
                       (n / 2 + lane % 4);
        if (row < tokens) *to = ptx::cvt_rn_x2<T>(c.x, c.y);
        if (row + 8 < tokens) to[uint64_t(8 * 4) * out_token_stride] = ptx::cvt_rn_x2<T>(c.z, c.w);
    }
};

// The thread's number, read again. The compiler thus keeps the addresses that are computed from it
// apart from those of the weights, which have to be ready first.
__device__ __forceinline__ uint32_t thread_again() {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// Weights are read once. With EvictFirst, L2 evicts them before everything else, and no data that
// other kernels wrote is evicted for them. With few heads, making the policy takes as long as it
// saves.
template <bool EvictFirst>
__device__ __forceinline__ void copy_weights(uint32_t to, const uint4* from) {
    if constexpr (EvictFirst)
        ptx::cp_async_16(to, from, true, ptx::createpolicy_evict_first());
    else
        ptx::cp_async_16(to, from, true);
}

// Offset in shared memory of a unit of 16 bytes, in rows of `Units` units. Loads of fragments take
// one unit from each of eight rows. Units are permuted by their row's number, so these loads find
// them in different banks.
template <uint32_t Units>
__device__ __forceinline__ uint32_t place(uint32_t row, uint32_t unit) {
    return (row * Units + (unit ^ row % 8)) * 16;
}

// GEMM with weights that are contiguous along n. `K` is k, or 0 if the compiler does not know it.
template <typename T, int Tiles, int K, bool EvictFirst>
__device__ __forceinline__ void rows_gemm(const HeadPlan& p, uint32_t block, uint32_t head,
                                          uint32_t first_token) {
    constexpr uint32_t kN = kRowsN, kChunk = 128, kTokens = Tiles * kTile;
    constexpr bool kWhole = K > 0 && K % kChunk == 0;
    // Rows of 8 and of 16 units.
    __shared__ __align__(128) char weights[kChunk * kN * 2], input[kTokens * kChunk * 2];
    const uint32_t k = K ? K : p.k;
    if (!p.constant_weights) ptx::griddepcontrol_wait();

    // There are two accumulators, so that a step need not wait for the previous one.
    float c[2][Tiles][4] = {};
#pragma unroll 1
    for (uint32_t base = 0; base < k; base += kChunk) {
        if (base) __syncthreads();
        {
            const uint32_t row = threadIdx.x / 8, unit = threadIdx.x % 8;
            const uint4* from = p.weights_at(head, base + row) + (block * 8 + unit);
            const uint32_t to = ptx::shared_address(weights) + place<8>(row, unit);
#pragma unroll
            for (uint32_t i = 0; i < kChunk; i += kGemmThreads / 8)
                if (kWhole || base + row + i < k)
                    copy_weights<EvictFirst>(to + i * 128, from + uint64_t(i) * p.weights_stride);
        }
        if (!p.ready) ptx::griddepcontrol_wait();
        const uint32_t thread = thread_again(), lane = thread % 32, warp = thread / 32;
        {
            const uint32_t row = thread / 16, unit = thread % 16;
            const uint4* from = p.input_at(first_token + row, head) + (base / 8 + unit);
            const uint32_t to = ptx::shared_address(input) + place<16>(row, unit);
#pragma unroll
            for (uint32_t i = 0; i < kTokens; i += kGemmThreads / 16)
                if (kWhole || base + unit * 8 < k)
                    ptx::cp_async_16(to + i * 256, from + uint64_t(i) * p.input_token_stride,
                                     first_token + row + i < p.tokens);
        }
        ptx::cp_async_wait_all();
        __syncthreads();
#pragma unroll
        for (uint32_t step = 0; step < kChunk / 16; step += 2) {
            if (!kWhole && base + step * 16 >= k) break;
            uint32_t w[4];
            ptx::ldmatrix_x4_trans(w,
                                   ptx::shared_address(weights) + place<8>(step * 16 + lane, warp));
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                if (!kWhole && base + (step + half) * 16 >= k) break;
#pragma unroll
                for (uint32_t tile = 0; tile < Tiles; ++tile) {
                    uint32_t x[4];
                    ptx::ldmatrix_x4(
                        x, ptx::shared_address(input) +
                               place<16>(tile * kTile + lane % 16, (step + half) * 2 + lane / 16));
                    ptx::mma_m16n8k16<T>(c[half][tile], x, w[2 * half], w[2 * half + 1]);
                }
            }
        }
    }
    if constexpr (Tiles == 1) {
        const float (&a)[4] = c[0][0], (&b)[4] = c[1][0];
        p.put<T>(first_token, head, block * kN + threadIdx.x / 32 * 8,
                 {a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]});
    } else {
        // Results go through shared memory, in the place of the weights, to write whole lines.
        __syncthreads();
        const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32,
                       staged = ptx::shared_address(weights);
#pragma unroll
        for (uint32_t tile = 0; tile < Tiles; ++tile) {
            const float (&a)[4] = c[0][tile], (&b)[4] = c[1][tile];
            const uint32_t row = tile * kTile + lane / 4, to = staged + lane % 4 * 4;
            ptx::st_shared(to + place<8>(row, warp), ptx::cvt_rn_x2<T>(a[0] + b[0], a[1] + b[1]));
            ptx::st_shared(to + place<8>(row + 8, warp),
                           ptx::cvt_rn_x2<T>(a[2] + b[2], a[3] + b[3]));
        }
        __syncthreads();
        static_assert(kTokens * 8 == kGemmThreads, "a unit per thread");
        const uint32_t row = threadIdx.x / 8, unit = threadIdx.x % 8, token = first_token + row;
        if (token >= p.tokens) return;
        p.out[uint64_t(token) * p.out_token_stride + uint64_t(head) * p.out_head_stride +
              (block * 8 + unit)] = ptx::ld_shared_v4(staged + place<8>(row, unit));
    }
}

// A GEMM as planned for the kernels, and its grid.
struct GemmLaunch {
    HeadPlan plan;
    dim3 grid;
    // True if weights are contiguous along n.
    bool rows;
    // Number of fragments of tokens of a CTA.
    int tiles;
    // True if all CTAs run at the same time.
    bool few;
};

// Checks every argument. Without tokens or heads there is nothing to launch, and only `grid` is
// set, to 0.
MlaStatus plan_gemm(const MlaHeadGemmParams& p, GemmLaunch& launch);

// Launches a planned GEMM by itself.
MlaStatus launch_gemm(const MlaHeadGemmParams& p, const GemmLaunch& launch, void* stream);

// Sets `can` to true if a kernel's code for the current device has programmatic dependent launch. A
// cubin for 9.0 or later has it. PTX of compute_80 does not have it, whichever device the driver
// compiles it for. The first kernel's answer holds for all, since all helpers are compiled for the
// same targets.
inline MlaStatus can_start_early(const void* kernel, bool& can) {
    // 0 means not known yet.
    static std::atomic<int> ptx_version[kMaxDevices];
    int device;
    cudaError_t e = cudaGetDevice(&device);
    if (e != cudaSuccess) return cuda_status("cudaGetDevice", e);
    int version = device < kMaxDevices ? ptx_version[device].load(std::memory_order_relaxed) : 0;
    if (version == 0) {
        cudaFuncAttributes attributes;
        if ((e = cudaFuncGetAttributes(&attributes, kernel)) != cudaSuccess)
            return cuda_status("cudaFuncGetAttributes", e);
        version = attributes.ptxVersion;
        if (device < kMaxDevices) ptx_version[device].store(version, std::memory_order_relaxed);
    }
    can = version >= 90;
    return ok();
}

// Launches a kernel that may start while the previous one in the stream is ending.
template <typename... Parameters, typename... Arguments>
MlaStatus launch_early(const char* name, void (*kernel)(Parameters...), dim3 grid, bool few,
                       void* stream, Arguments&&... arguments) {
    bool early = false;
    const MlaStatus status = can_start_early(reinterpret_cast<const void*>(kernel), early);
    if (status.code != MLA_OK) return status;
    cudaLaunchAttribute attributes[2] = {};
    int count = 0;
    if (early) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    // An SM can hold CTAs of the previous kernel and of this one at the same time only if both have
    // the same shared-memory carveout. It is set only with few heads. With more CTAs than run at
    // the same time, the driver's own choice was faster.
    if (few) {
        attributes[count].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
        attributes[count++].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(kGemmThreads);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = count;
    return cuda_status(name,
                       cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

}  // namespace mla
