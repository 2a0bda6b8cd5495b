// Kernels that run before and after CUTLASS's decode.
#include <algorithm>

#include "dtype.cuh"
#include "flashinfer.h"

namespace {

constexpr int kHeads = FI_CUTLASS_MLA_HEADS, kTile = FI_CUTLASS_MLA_TILE;
constexpr int kLatent = 512, kRow = 512 + 64;

// The unit of copies: eight elements.
using Vector = uint4;
constexpr int kElements = sizeof(Vector) / 2, kVectors = kRow / kElements;

constexpr int kThreads = 4 * kVectors;

__device__ const Vector* at(const void* base, int64_t element) {
    return reinterpret_cast<const Vector*>(static_cast<const uint16_t*>(base) + element);
}

__device__ int tokens_in_tiles(int tokens) { return tokens / kTile * kTile; }

// A CTA for each request and four rows of its tail; the first of them writes the lists, too.
__global__ void split_keys(FiCutlassMlaSplit call) {
    const int request = blockIdx.x, tokens = call.seq_lens[request];
    const int in_tiles = tokens_in_tiles(tokens), in_tail = tokens - in_tiles;
    const int32_t* table = call.block_table + static_cast<int64_t>(request) * call.max_pages;
    if (blockIdx.y == 0) {
        int32_t* to = call.tile_table + static_cast<int64_t>(request) * call.table_width;
        for (int entry = threadIdx.x; entry < call.table_width; entry += kThreads) {
            to[entry] = entry < in_tiles / call.page_size ? table[entry] : 0;
        }
        if (threadIdx.x == 0) {
            call.tile_lens[request] = max(in_tiles, kTile);
            call.tail_lens[request] = max(in_tail, 1);
            call.tail_table[request] = request;
        }
    }
    const int row = blockIdx.y * (kThreads / kVectors) + threadIdx.x / kVectors;
    const int vector = threadIdx.x % kVectors;
    Vector value{};
    if (row < in_tail) {
        const int token = in_tiles + row;
        const int64_t page = table[token / call.page_size];
        value = *at(call.cache, page * call.page_stride + token % call.page_size * call.row_stride +
                                    vector * kElements);
    }
    Vector* tail = static_cast<Vector*>(call.tail);
    tail[(static_cast<int64_t>(request) * kTile + row) * kVectors + vector] = value;
}

// A CTA for each request and four heads.
__global__ void pack_query(FiCutlassMlaSplit call) {
    const int request = blockIdx.x;
    const int head = blockIdx.y * (kThreads / kVectors) + threadIdx.x / kVectors;
    const int element = threadIdx.x % kVectors * kElements;
    Vector value{};
    if (head < call.heads) {
        value = element < kLatent
                    ? *at(call.query_latent, request * call.query_latent_token_stride +
                                                 head * call.query_latent_head_stride + element)
                    : *at(call.query_rope, request * call.query_rope_token_stride +
                                               head * call.query_rope_head_stride +
                                               (element - kLatent));
    }
    Vector* query = static_cast<Vector*>(call.query);
    query[(static_cast<int64_t>(request) * kHeads + head) * kVectors + threadIdx.x % kVectors] =
        value;
}

// A CTA for each request and head.
template <typename T>
__global__ void merge(FiCutlassMlaMerge call) {
    const int request = blockIdx.x, head = blockIdx.y, tokens = call.seq_lens[request];
    const bool has_tiles = tokens_in_tiles(tokens) > 0, has_tail = tokens_in_tiles(tokens) < tokens;
    const int64_t row = static_cast<int64_t>(request) * kHeads + head;
    // Results of no tokens are not read: they may be NaN.
    const float tile = has_tiles ? call.tile_lse[row] : -INFINITY;
    const float tail = has_tail ? call.tail_lse[row] : -INFINITY;
    const float peak = fmaxf(tile, tail);
    const float tile_weight = has_tiles ? expf(tile - peak) : 0;
    const float tail_weight = has_tail ? expf(tail - peak) : 0;
    const float sum = tile_weight + tail_weight;
    T* out =
        static_cast<T*>(call.out) + request * call.out_token_stride + head * call.out_head_stride;
    const T* tile_out = static_cast<const T*>(call.tile_out) + row * kLatent;
    const T* tail_out = static_cast<const T*>(call.tail_out) + row * kLatent;
    for (int i = threadIdx.x; i < kLatent; i += blockDim.x) {
        float value = 0;
        if (has_tiles) value += tile_weight * static_cast<float>(tile_out[i]);
        if (has_tail) value += tail_weight * static_cast<float>(tail_out[i]);
        out[i] = tokens > 0 ? T(value / sum) : T(0.0f);
    }
    if (threadIdx.x == 0 && call.lse != nullptr) {
        call.lse[head * call.lse_head_stride + request] = tokens > 0 ? peak + logf(sum) : -INFINITY;
    }
}

}  // namespace

extern "C" int64_t fi_cutlass_mla_workspace_bytes(int32_t requests, int32_t sms) {
    // A request is split among as many clusters of two CTAs as it has to itself.
    const int64_t parts = std::max(requests, sms / 2);
    return parts * kHeads * (kLatent + 1) * static_cast<int64_t>(sizeof(float));
}

extern "C" int32_t fi_cutlass_mla_split(const FiCutlassMlaSplit* call, void* stream) {
    return fi::guarded([&] {
        const auto on = static_cast<cudaStream_t>(stream);
        constexpr unsigned kRowsOfCta = kThreads / kVectors;
        split_keys<<<dim3(call->requests, kTile / kRowsOfCta), kThreads, 0, on>>>(*call);
        pack_query<<<dim3(call->requests, kHeads / kRowsOfCta), kThreads, 0, on>>>(*call);
        return cudaGetLastError();
    });
}

extern "C" int32_t fi_cutlass_mla_merge(const FiCutlassMlaMerge* call, void* stream) {
    return fi::guarded([&] {
        return fi::of_dtype(call->dtype, [&](auto zero) {
            merge<decltype(zero)>
                <<<dim3(call->requests, call->heads), 128, 0, static_cast<cudaStream_t>(stream)>>>(
                    *call);
            return cudaGetLastError();
        });
    });
}
