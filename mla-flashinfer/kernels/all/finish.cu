// Conversion of FlashInfer's outputs into ours.
#include "flashinfer.h"
#include "guard.h"

namespace {

constexpr int kTile = 32;

// A tile of 32 tokens by 32 heads for each CTA, so that both sides are read and written in rows. It
// is launched before the attention in front of it has ended, and waits here.
__global__ void transpose_lse(const float* from, float* to, int64_t head_stride, int tokens,
                              int heads, float factor) {
    __shared__ float tile[kTile][kTile + 1];
    const int x = threadIdx.x, y = threadIdx.y;
    const int token = blockIdx.x * kTile, head = blockIdx.y * kTile;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    if (token + y < tokens && head + x < heads) {
        tile[y][x] = from[static_cast<int64_t>(token + y) * heads + head + x] * factor;
    }
    __syncthreads();
    if (token + x < tokens && head + y < heads) {
        to[(head + y) * head_stride + token + x] = tile[x][y];
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

extern "C" int32_t fi_transpose_lse(const FiLse* lse, void* stream) {
    return fi::guarded([&] {
        const auto tiles = [](int32_t extent) {
            return static_cast<unsigned>((extent + kTile - 1) / kTile);
        };
        cudaLaunchAttribute dependent{};
        dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        dependent.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t launch{};
        launch.gridDim = dim3(tiles(lse->tokens), tiles(lse->heads));
        launch.blockDim = dim3(kTile, kTile);
        launch.stream = static_cast<cudaStream_t>(stream);
        launch.attrs = &dependent;
        launch.numAttrs = lse->dependent ? 1 : 0;
        return cudaLaunchKernelEx(&launch, transpose_lse, lse->from, lse->to, lse->head_stride,
                                  lse->tokens, lse->heads, lse->factor);
    });
}
