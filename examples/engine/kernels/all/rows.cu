// A block per row: simple rather than fast, since a step's time is in its products and its attention.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "../rows.h"

namespace {

using bf16 = __nv_bfloat16;
constexpr int kThreads = 256;

struct Row {
    const bf16 *from;
    bf16 *to;
    __device__ explicit Row(const EngineRows &p)
        : from(static_cast<const bf16 *>(p.from) + blockIdx.x * p.from_stride),
          to(static_cast<bf16 *>(p.to) + blockIdx.x * p.to_stride) {}
};

// The sum over all threads, to each of them.
__device__ float block_sum(float x) {
    __shared__ float sums[kThreads];
    sums[threadIdx.x] = x;
    __syncthreads();
    for (int half = kThreads / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    return sums[0];
}

__global__ void norm(EngineRows p) {
    const Row row(p);
    float squares = 0;
    for (int i = threadIdx.x; i < p.width; i += kThreads) {
        const float x = __bfloat162float(row.from[i]);
        squares += x * x;
    }
    const float scale = rsqrtf(block_sum(squares) / p.width + p.eps);
    for (int i = threadIdx.x; i < p.width; i += kThreads) {
        const float weight = __bfloat162float(static_cast<const bf16 *>(p.other)[i]);
        row.to[i] = __float2bfloat16(__bfloat162float(row.from[i]) * scale * weight);
    }
}

__global__ void add(EngineRows p) {
    const Row row(p);
    for (int i = threadIdx.x; i < p.width; i += kThreads)
        row.to[i] = __float2bfloat16(__bfloat162float(row.to[i]) + __bfloat162float(row.from[i]));
}

__global__ void silu_mul(EngineRows p) {
    const Row row(p);
    for (int i = threadIdx.x; i < p.width; i += kThreads) {
        const float gate = __bfloat162float(row.from[i]);
        const float up = __bfloat162float(row.from[p.width + i]);
        row.to[i] = __float2bfloat16(gate / (1.0f + __expf(-gate)) * up);
    }
}

__global__ void gather(EngineRows p) {
    const int64_t index = static_cast<const int32_t *>(p.other)[blockIdx.x];
    const bf16 *from = static_cast<const bf16 *>(p.from) + index * p.from_stride;
    bf16 *to = static_cast<bf16 *>(p.to) + blockIdx.x * p.to_stride;
    for (int i = threadIdx.x; i < p.width; i += kThreads) to[i] = from[i];
}

// The position of the largest element, the first among equal ones.
__global__ void argmax(EngineRows p) {
    const bf16 *from = static_cast<const bf16 *>(p.from) + blockIdx.x * p.from_stride;
    __shared__ float best[kThreads];
    __shared__ int at[kThreads];
    best[threadIdx.x] = -INFINITY;
    at[threadIdx.x] = 0;
    for (int i = threadIdx.x; i < p.width; i += kThreads) {
        const float x = __bfloat162float(from[i]);
        if (x > best[threadIdx.x]) {
            best[threadIdx.x] = x;
            at[threadIdx.x] = i;
        }
    }
    __syncthreads();
    for (int half = kThreads / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            const int other = threadIdx.x + half;
            const bool wins = best[other] > best[threadIdx.x] ||
                              (best[other] == best[threadIdx.x] && at[other] < at[threadIdx.x]);
            if (wins) {
                best[threadIdx.x] = best[other];
                at[threadIdx.x] = at[other];
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) static_cast<int32_t *>(p.to)[blockIdx.x] = at[0];
}

constexpr int kMaxExperts = 256;

// The largest of what is eligible and not yet taken, the first of equal ones; NaN is never larger.
__device__ int take_largest(const float *values, int count, bool *taken) {
    int best = -1;
    for (int i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    taken[best] = true;
    return best;
}

// Computes Routing::weigh. One thread chooses: there are few experts, and a step's time is in their
// products.
__global__ void route(EngineRoute p) {
    __shared__ float scores[kMaxExperts], biased[kMaxExperts], weights[kMaxExperts];
    const bf16 *logits = static_cast<const bf16 *>(p.logits) + int64_t(blockIdx.x) * p.experts;
    for (int i = threadIdx.x; i < p.experts; i += kThreads) {
        scores[i] = 1.0f / (1.0f + __expf(-__bfloat162float(logits[i])));
        biased[i] = scores[i] + __bfloat162float(static_cast<const bf16 *>(p.bias)[i]);
        weights[i] = 0.0f;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const int of_group = p.experts / p.groups;
        float good[kMaxExperts];
        bool taken[kMaxExperts], chosen[kMaxExperts];
        for (int group = 0; group < p.groups; group++) {
            // A group is as good as its two best experts.
            for (int i = 0; i < of_group; i++) chosen[i] = false;
            const float *values = biased + group * of_group;
            good[group] = values[take_largest(values, of_group, chosen)];
            if (of_group > 1) good[group] += values[take_largest(values, of_group, chosen)];
            taken[group] = false;
        }
        for (int i = 0; i < p.groups_per_token; i++) take_largest(good, p.groups, taken);
        for (int i = 0; i < p.experts; i++) chosen[i] = !taken[i / of_group];
        float sum = 0.0f;
        for (int i = 0; i < p.per_token; i++) {
            const int expert = take_largest(biased, p.experts, chosen);
            weights[expert] = scores[expert];
            sum += scores[expert];
        }
        const float factor = p.normalise ? p.scale / (sum + 1e-20f) : p.scale;
        for (int i = 0; i < p.experts; i++) weights[i] *= factor;
    }
    __syncthreads();
    bf16 *to = static_cast<bf16 *>(p.weights) + int64_t(blockIdx.x) * p.experts;
    for (int i = threadIdx.x; i < p.experts; i += kThreads) to[i] = __float2bfloat16(weights[i]);
}

__global__ void add_weighted(EngineAddWeighted p) {
    const bf16 *weights = static_cast<const bf16 *>(p.weights) + int64_t(blockIdx.x) * p.experts;
    bf16 *to = static_cast<bf16 *>(p.to) + int64_t(blockIdx.x) * p.width;
    for (int i = threadIdx.x; i < p.width; i += kThreads) {
        float sum = __bfloat162float(to[i]);
        for (int expert = 0; expert < p.experts; expert++) {
            const float weight = __bfloat162float(weights[expert]);
            const int64_t row = int64_t(expert) * p.rows + blockIdx.x;
            if (weight != 0.0f)
                sum += weight * __bfloat162float(static_cast<const bf16 *>(p.from)[row * p.width + i]);
        }
        to[i] = __float2bfloat16(sum);
    }
}

template <class Params>
int32_t launch(void (*kernel)(Params), const Params *params, void *stream) {
    if (params->rows <= 0) return 0;
    kernel<<<params->rows, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*params);
    return cudaGetLastError();
}

}  // namespace

extern "C" {
int32_t engine_norm(const EngineRows *rows, void *stream) { return launch(norm, rows, stream); }
int32_t engine_add(const EngineRows *rows, void *stream) { return launch(add, rows, stream); }
int32_t engine_silu_mul(const EngineRows *rows, void *stream) {
    return launch(silu_mul, rows, stream);
}
int32_t engine_gather(const EngineRows *rows, void *stream) { return launch(gather, rows, stream); }
int32_t engine_argmax(const EngineRows *rows, void *stream) { return launch(argmax, rows, stream); }
int32_t engine_route(const EngineRoute *p, void *stream) { return launch(route, p, stream); }
int32_t engine_add_weighted(const EngineAddWeighted *p, void *stream) {
    return launch(add_weighted, p, stream);
}
}
