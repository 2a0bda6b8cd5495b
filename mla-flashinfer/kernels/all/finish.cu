// What stands between FlashInfer's outputs and ours.
#include "finish.h"
#include "guard.h"

namespace {

constexpr int kTile = 32;

// A tile of 32 tokens by 32 heads at a time, so that both sides are read and written in rows.
__global__ void transpose_lse(const float* from, float* to, int64_t head_stride, int tokens,
                              int heads, float factor) {
    __shared__ float tile[kTile][kTile + 1];
    const int token = blockIdx.x * kTile, head = blockIdx.y * kTile;
    for (int row = threadIdx.y; row < kTile; row += blockDim.y) {
        const int t = token + row, h = head + static_cast<int>(threadIdx.x);
        if (t < tokens && h < heads) {
            tile[row][threadIdx.x] = from[static_cast<int64_t>(t) * heads + h] * factor;
        }
    }
    __syncthreads();
    for (int row = threadIdx.y; row < kTile; row += blockDim.y) {
        const int t = token + static_cast<int>(threadIdx.x), h = head + row;
        if (t < tokens && h < heads) to[h * head_stride + t] = tile[threadIdx.x][row];
    }
}

// A CTA for each query token. Its request is the last that begins at or before it.
__global__ void clear_unseen(FiUnseen call) {
    const int token = blockIdx.x;
    int first = 0, end = call.requests;
    while (end - first > 1) {
        const int middle = (first + end) / 2;
        (call.query_starts[middle] <= token ? first : end) = middle;
    }
    const int keys = call.key_starts[first + 1] - call.key_starts[first];
    const int behind = call.query_starts[first + 1] - 1 - token;
    if ((call.causal ? keys - behind : keys) > 0) return;
    auto* out = static_cast<uint16_t*>(call.out) + token * call.out_token_stride;
    for (int i = threadIdx.x; i < call.heads * call.width; i += blockDim.x) {
        out[i / call.width * call.out_head_stride + i % call.width] = 0;
    }
    if (call.lse == nullptr) return;
    for (int head = threadIdx.x; head < call.heads; head += blockDim.x) {
        call.lse[head * call.lse_head_stride + token] = -INFINITY;
    }
}

}  // namespace

extern "C" int32_t fi_clear_unseen(const FiUnseen* unseen, void* stream) {
    return fi::guarded([&] {
        clear_unseen<<<unseen->query_tokens, 128, 0, static_cast<cudaStream_t>(stream)>>>(*unseen);
        return cudaGetLastError();
    });
}

extern "C" int32_t fi_transpose_lse(const float* from, float* to, int64_t head_stride,
                                    int32_t tokens, int32_t heads, float factor, void* stream) {
    return fi::guarded([&] {
        const auto tiles = [](int32_t extent) {
            return static_cast<unsigned>((extent + kTile - 1) / kTile);
        };
        const dim3 grid(tiles(tokens), tiles(heads)), threads(kTile, 8);
        transpose_lse<<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(
            from, to, head_stride, tokens, heads, factor);
        return cudaGetLastError();
    });
}
