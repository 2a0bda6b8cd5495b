// Kernels of our own before and behind FlashMLA's. All are launched plainly, and so begin when
// every kernel in front of them has ended.
#include <cmath>

#include "flashmla.h"
#include "guard.h"

namespace {

constexpr int kThreads = 256;

unsigned ctas(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

__global__ void bound_lens(const int32_t* from, int32_t* to, int requests, int max_len) {
    const int request = blockIdx.x * kThreads + threadIdx.x;
    if (request < requests) to[request] = min(max(from[request], 0), max_len);
}

// A CTA for each row of a token and a head, a thread for each 16 bytes of it.
__global__ void pack_queries(FmQueries queries) {
    const int64_t row = blockIdx.x;
    const int64_t token = row / queries.heads, head = row % queries.heads;
    const auto* from = static_cast<const uint16_t*>(queries.from) + token * queries.token_stride +
                       head * queries.head_stride;
    auto* to = static_cast<uint16_t*>(queries.to) + row * FM_WIDTH;
    reinterpret_cast<uint4*>(to)[threadIdx.x] = reinterpret_cast<const uint4*>(from)[threadIdx.x];
}

__global__ void finish_lse(const float* from, float* to, int64_t head_stride, int tokens,
                           int heads) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t head = index / tokens, token = index % tokens;
    if (head >= heads) return;
    const float lse = from[token * heads + head];
    to[head * head_stride + token] = lse == INFINITY ? -INFINITY : lse;
}

}  // namespace

extern "C" int32_t fm_bound_lens(const FmSchedule* schedule, void* stream) {
    return fm::guarded([&] {
        bound_lens<<<ctas(schedule->requests), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            schedule->seq_lens, schedule->lens, schedule->requests, schedule->max_len);
        return cudaGetLastError();
    });
}

extern "C" int32_t fm_pack_queries(const FmQueries* queries, void* stream) {
    return fm::guarded([&] {
        constexpr int kParts = FM_WIDTH * sizeof(uint16_t) / sizeof(uint4);
        const auto rows = static_cast<unsigned>(queries->tokens * queries->heads);
        pack_queries<<<rows, kParts, 0, static_cast<cudaStream_t>(stream)>>>(*queries);
        return cudaGetLastError();
    });
}

extern "C" int32_t fm_finish_lse(const FmLse* lse, void* stream) {
    return fm::guarded([&] {
        const auto grid = ctas(static_cast<int64_t>(lse->tokens) * lse->heads);
        finish_lse<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            lse->from, lse->to, lse->head_stride, lse->tokens, lse->heads);
        return cudaGetLastError();
    });
}
