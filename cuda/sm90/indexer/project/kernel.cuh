// Index queries of few tokens: their latent times W_qb, rotated and rounded, in one launch.
//
// Each weight is read once, for all tokens, so what counts is how early the weights are asked for.
// A cluster has a head, and each of its CTAs an equal range of the rank, most of which is in flight
// before the kernel before has ended.
//
//   warp 8        asks for the weights, chunk by chunk, and for the tokens' latent
//   warps 0 to 7  multiply: each 32 tokens by 64 of the head's values, a quarter of every chunk
//   all warps     a token each: the sum of what the cluster's CTAs have, then as all index queries
//
// Loops are not unrolled: what is run once comes from memory, too.
#pragma once

#include <cuda.h>

#include "../../../common/pipeline.cuh"
#include "../../../ptx/sm80.cuh"
#include "../quantise/rows.cuh"

namespace mla::sm90::project {

using quantise::kWidth;

// Of the rank: 128 bytes.
constexpr int kChunk = 64;
constexpr int kWeightBytes = kChunk * kWidth * 2;
// Tokens of a CTA, whose latent stays in shared memory.
constexpr int kTokens = 32;
constexpr int kLatentBytes = kTokens * kChunk * 2;
// Warps that multiply: two halves of the values, and a quarter of each chunk.
constexpr int kHalves = 2, kQuarters = 4;
constexpr int kWarps = kHalves * kQuarters;
constexpr int kThreads = 32 * kWarps + 32;
constexpr int kMostStages = 9;
constexpr int kMostSplits = 8;
// Floats from a token's sums to the next one's: lanes that write together find different banks.
constexpr int kPitch = kWidth + 8;
constexpr int kSumBytes = kQuarters * kTokens * kPitch * 4;

struct KernelParams {
    CUtensorMap weights;  // boxes of 64 of the rank by 64 columns, or by 128 along the rank
    CUtensorMap latent;   // [tokens, rank] in boxes of 32 by 64
    MlaIndexQueriesParams queries;
    int chunks;  // of a CTA
    int stages;
};

struct Barriers {
    Barrier<1> full[kMostStages];
    Barrier<kWarps> empty[kMostStages];
    Barrier<1> latent;
};

// Where everything lies. The sums take the place of weights and latent.
struct Layout {
    int stages, chunks;

    __host__ __device__ int latent() const { return stages * kWeightBytes; }
    __host__ __device__ int barriers() const {
        const int end = latent() + chunks * kLatentBytes;
        return end < kSumBytes ? kSumBytes : end;
    }
    // A stage starts on 1024 bytes, which dynamic shared memory need not.
    __host__ __device__ int bytes() const { return barriers() + int(sizeof(Barriers)) + 1024; }
};

// Where a unit of 16 bytes of a row of 128 bytes lies in a tile that TMA has swizzled.
__device__ __forceinline__ uint32_t place(uint32_t row, uint32_t unit) {
    return (row * 8 + (unit ^ row % 8)) * 16;
}

// What one lane asks for.
template <bool kAlongRank>
__device__ __forceinline__ void ask(const KernelParams& p, Barriers& s, uint32_t base,
                                    const Layout& layout) {
    const int first = blockIdx.x * p.chunks, column = blockIdx.y * kWidth;
    const ptx::CachePolicy policy = ptx::createpolicy_evict_first();
    const auto weights = [&](int chunk) {
        const int stage = chunk % p.stages, at = (first + chunk) * kChunk;
        const uint32_t to = base + stage * kWeightBytes, bar = s.full[stage].address();
        s.full[stage].expect(kWeightBytes);
        if constexpr (kAlongRank) {
            ptx::cp_async_bulk_tensor(&p.weights, to, bar, policy, at, column, 0);
        } else {
            for (int half = 0; half < kHalves; ++half)
                ptx::cp_async_bulk_tensor(&p.weights, to + half * (kWeightBytes / 2), bar, policy,
                                          column + half * (kWidth / 2), at, 0);
        }
    };
    // The weights are constant: nothing before this kernel writes them.
#pragma unroll 1
    for (int chunk = 0; chunk < p.stages; ++chunk) weights(chunk);
    ptx::griddepcontrol_wait();
    // Not earlier: so the next kernel finds complete what was there before this one began.
    ptx::griddepcontrol_launch_dependents();
    s.latent.expect(p.chunks * kLatentBytes);
#pragma unroll 1
    for (int chunk = 0; chunk < p.chunks; ++chunk)
        ptx::cp_async_bulk_tensor(&p.latent, base + layout.latent() + chunk * kLatentBytes,
                                  s.latent.address(), ptx::CachePolicy{}, (first + chunk) * kChunk,
                                  blockIdx.z * kTokens, 0);
#pragma unroll 1
    for (int chunk = p.stages; chunk < p.chunks; ++chunk) {
        s.empty[chunk % p.stages].wait((chunk / p.stages - 1) % 2);
        weights(chunk);
    }
}

// One step of 16 of the rank: two fragments of tokens by eight of columns.
template <typename T, bool kAlongRank>
__device__ __forceinline__ void multiply(float (&c)[2][8][4], uint32_t latent, uint32_t weights,
                                         uint32_t half, uint32_t step) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t x[2][4];
#pragma unroll
    for (uint32_t tile = 0; tile < 2; ++tile)
        ptx::ldmatrix_x4(x[tile], latent + place(tile * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
    for (uint32_t pair = 0; pair < 4; ++pair) {
        uint32_t w[4];
        if constexpr (kAlongRank)
            ptx::ldmatrix_x4(w, weights + place(half * 64 + pair * 16 + lane / 16 * 8 + lane % 8,
                                                step * 2 + lane / 8 % 2));
        else
            ptx::ldmatrix_x4_trans(w, weights + half * (kWeightBytes / 2) +
                                          place(step * 16 + lane % 16, pair * 2 + lane / 16));
#pragma unroll
        for (uint32_t tile = 0; tile < 2; ++tile) {
            ptx::mma_m16n8k16<T>(c[tile][2 * pair], x[tile], w[0], w[1]);
            ptx::mma_m16n8k16<T>(c[tile][2 * pair + 1], x[tile], w[2], w[3]);
        }
    }
}

// The sums of this CTA's range of the rank, a set for each quarter of its chunks.
template <typename T, bool kAlongRank>
__device__ __forceinline__ void sum(const KernelParams& p, Barriers& s, uint32_t base,
                                    const Layout& layout, float* sums) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t half = warp % kHalves, quarter = warp / kHalves;
    float c[2][8][4] = {};
    s.latent.wait(0);
#pragma unroll 1
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
        const int stage = chunk % p.stages;
        s.full[stage].wait(chunk / p.stages % 2);
        multiply<T, kAlongRank>(c, base + layout.latent() + chunk * kLatentBytes,
                                base + stage * kWeightBytes, half, quarter);
        __syncwarp();
        if (lane == 0) s.empty[stage].arrive();
    }
    ptx::bar_sync(1, 32 * kWarps);
    float* own = sums + quarter * kTokens * kPitch + half * (kWidth / 2);
#pragma unroll
    for (uint32_t tile = 0; tile < 2; ++tile)
#pragma unroll
        for (uint32_t n = 0; n < 8; ++n) {
            const float (&of)[4] = c[tile][n];
            float* to = own + (tile * 16 + lane / 4) * kPitch + n * 8 + 2 * (lane % 4);
            *reinterpret_cast<float2*>(to) = {of[0], of[1]};
            *reinterpret_cast<float2*>(to + 8 * kPitch) = {of[2], of[3]};
        }
}

// The projected values of a token that this lane has, rounded as a product's results are: the sums
// of all CTAs of the cluster, always added in the same order.
template <typename T>
__device__ __forceinline__ quantise::Values projected(const float* sums, int splits, int token) {
    const uint32_t at = ptx::shared_address(sums + token * kPitch + threadIdx.x % 32 * 4);
    float4 all = {};
#pragma unroll 1
    for (int rank = 0; rank < splits; ++rank) {
        const uint32_t from = ptx::mapa(at, rank);
#pragma unroll
        for (int quarter = 0; quarter < kQuarters; ++quarter) {
            const float4 x = ptx::ld_shared_cluster_v4_f32(from + quarter * kTokens * kPitch * 4);
            all = {all.x + x.x, all.y + x.y, all.z + x.z, all.w + x.w};
        }
    }
    return {{float(T(all.x)), float(T(all.y)), float(T(all.z)), float(T(all.w))}};
}

// Has L2 fetch what a token's queries are rotated and weighted with.
__device__ __forceinline__ void fetch(const MlaIndexQueriesParams& p, int token, bool own) {
    if (threadIdx.x >= 32 || !own || token >= p.tokens) return;
    const int64_t bytes = p.head_weights_dtype == MLA_DTYPE_F32 ? 4 : 2;
    const char* weights = static_cast<const char*>(p.head_weights);
    ptx::prefetch_global_l2(weights + (token * p.head_weight_stride + blockIdx.y) * bytes);
    if (!p.rotary.positions) return;
    const int64_t position = p.rotary.positions[token];
    if (position < 0 || position >= p.rotary.positions_len) return;
    ptx::prefetch_global_l2(p.rotary.cos + position * p.rotary.table_stride);
    ptx::prefetch_global_l2(p.rotary.sin + position * p.rotary.table_stride);
}

template <typename T, bool kAlongRank>
__global__ void __launch_bounds__(kThreads, 1)
    project_kernel(const __grid_constant__ KernelParams p) {
    const Layout layout = {p.stages, p.chunks};
    const uint32_t start = ptx::shared_address(ptx::dynamic_shared());
    char* shared = ptx::dynamic_shared() + (1024 - start % 1024) % 1024;
    const uint32_t base = ptx::shared_address(shared);
    Barriers& s = *reinterpret_cast<Barriers*>(shared + layout.barriers());
    float* sums = reinterpret_cast<float*>(shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; ++i) {
            s.full[i].init();
            s.empty[i].init();
        }
        s.latent.init();
        ptx::fence_mbarrier_init();
    }
    __syncthreads();

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int splits = gridDim.x, each = kTokens / splits, first = blockIdx.z * kTokens;
    const MlaIndexQueriesParams& queries = p.queries;
    if (warp == kWarps) {
        if (lane == 0) ask<kAlongRank>(p, s, base, layout);
        __syncwarp();
    } else {
        // What is read below may be the kernel's before, too.
        ptx::griddepcontrol_wait();
        fetch(queries, first + blockIdx.x * each + lane, lane < each);
        sum<T, kAlongRank>(p, s, base, layout, sums);
    }
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
#pragma unroll 1
    for (int i = warp; i < each; i += kWarps + 1) {
        const int token = blockIdx.x * each + i;
        if (first + token >= queries.tokens) break;
        quantise::Values v = projected<T>(sums, splits, token);
        quantise::write_query(queries, v, first + token, blockIdx.y, lane);
    }
    // The others still read this CTA's sums.
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
}

}  // namespace mla::sm90::project
