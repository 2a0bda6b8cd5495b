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

// Of equally large elements the first.
__global__ void argmax(EngineRows p) {
    const bf16 *from = static_cast<const bf16 *>(p.from) + blockIdx.x * p.from_stride;
    __shared__ float most[kThreads];
    __shared__ int at[kThreads];
    most[threadIdx.x] = -INFINITY;
    at[threadIdx.x] = 0;
    for (int i = threadIdx.x; i < p.width; i += kThreads) {
        const float x = __bfloat162float(from[i]);
        if (x > most[threadIdx.x]) {
            most[threadIdx.x] = x;
            at[threadIdx.x] = i;
        }
    }
    __syncthreads();
    for (int half = kThreads / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            const int other = threadIdx.x + half;
            const bool wins = most[other] > most[threadIdx.x] ||
                              (most[other] == most[threadIdx.x] && at[other] < at[threadIdx.x]);
            if (wins) {
                most[threadIdx.x] = most[other];
                at[threadIdx.x] = at[other];
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) static_cast<int32_t *>(p.to)[blockIdx.x] = at[0];
}

int32_t launch(void (*kernel)(EngineRows), const EngineRows *rows, void *stream) {
    if (rows->rows <= 0) return 0;
    kernel<<<rows->rows, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*rows);
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
}
