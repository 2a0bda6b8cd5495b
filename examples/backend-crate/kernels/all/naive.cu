// A decode kernel that is easy to read: every warp takes every fourth row of the cache, keeps a running maximum, sum
// and weighted values, and the four warps' results are merged at the end.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "naive.h"

namespace {

constexpr int kLatent = 512, kRope = 64, kWarps = 4, kLanes = 32;
constexpr int kLatentPerLane = kLatent / kLanes, kRopePerLane = kRope / kLanes;

__device__ float sum_over_lanes(float x) {
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, offset);
    }
    return x;
}

__global__ void __launch_bounds__(kWarps *kLanes) decode(NaiveParams p) {
    const int token = blockIdx.x, head = blockIdx.y;
    const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;

    // The request of this token: the last one that starts at or before it.
    int request = 0;
    while (request + 1 < p.requests && p.query_starts[request + 1] <= token) {
        ++request;
    }
    // The last query token sees every row, and each before it one less.
    const int seen = max(0, p.kv_lens[request] + token + 1 - p.query_starts[request + 1]);

    const auto *q_latent = static_cast<const __nv_bfloat16 *>(p.q_latent) +
                           token * p.q_latent_token_stride + head * p.q_latent_head_stride;
    const auto *q_rope = static_cast<const __nv_bfloat16 *>(p.q_rope) + token * p.q_rope_token_stride +
                         head * p.q_rope_head_stride;
    float query[kLatentPerLane + kRopePerLane], acc[kLatentPerLane] = {};
    for (int i = 0; i < kLatentPerLane; ++i) {
        query[i] = __bfloat162float(q_latent[i * kLanes + lane]);
    }
    for (int i = 0; i < kRopePerLane; ++i) {
        query[kLatentPerLane + i] = __bfloat162float(q_rope[i * kLanes + lane]);
    }

    float max_score = -INFINITY, sum = 0;
    for (int position = warp; position < seen; position += kWarps) {
        const int64_t page = p.block_table[int64_t(request) * p.max_pages + position / p.page_size];
        const auto *row = static_cast<const __nv_bfloat16 *>(p.cache) + page * p.page_stride +
                          position % p.page_size * p.row_stride;
        float values[kLatentPerLane], score = 0;
        for (int i = 0; i < kLatentPerLane; ++i) {
            values[i] = __bfloat162float(row[i * kLanes + lane]);
            score += query[i] * values[i];
        }
        for (int i = 0; i < kRopePerLane; ++i) {
            score += query[kLatentPerLane + i] * __bfloat162float(row[kLatent + i * kLanes + lane]);
        }
        score = sum_over_lanes(score) * p.softmax_scale;
        const float greater = fmaxf(max_score, score);
        const float old = expf(max_score - greater), weight = expf(score - greater);
        max_score = greater;
        sum = sum * old + weight;
        for (int i = 0; i < kLatentPerLane; ++i) {
            acc[i] = acc[i] * old + weight * values[i];
        }
    }

    __shared__ float warp_max[kWarps], warp_sum[kWarps], warp_acc[kWarps][kLatent];
    if (lane == 0) {
        warp_max[warp] = max_score;
        warp_sum[warp] = sum;
    }
    for (int i = 0; i < kLatentPerLane; ++i) {
        warp_acc[warp][i * kLanes + lane] = acc[i];
    }
    __syncthreads();
    float all_max = -INFINITY, all_sum = 0;
    for (int w = 0; w < kWarps; ++w) {
        all_max = fmaxf(all_max, warp_max[w]);
    }
    // A warp without rows has a maximum of minus infinity and adds nothing; without any row there is nothing at all.
    for (int w = 0; w < kWarps && seen > 0; ++w) {
        all_sum += warp_sum[w] * expf(warp_max[w] - all_max);
    }
    auto *out = static_cast<__nv_bfloat16 *>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
    for (int k = threadIdx.x; k < kLatent; k += kWarps * kLanes) {
        float value = 0;
        for (int w = 0; w < kWarps && seen > 0; ++w) {
            value += warp_acc[w][k] * expf(warp_max[w] - all_max);
        }
        out[k] = __float2bfloat16(seen > 0 ? value / all_sum : 0.0f);
    }
    if (p.lse != nullptr && threadIdx.x == 0) {
        p.lse[head * p.lse_head_stride + token] = seen > 0 ? all_max + logf(all_sum) : -INFINITY;
    }
}

}  // namespace

extern "C" int32_t naive_decode(const NaiveParams *params, void *stream) {
    const dim3 grid(params->tokens, params->heads);
    decode<<<grid, kWarps * kLanes, 0, static_cast<cudaStream_t>(stream)>>>(*params);
    return cudaGetLastError();
}
