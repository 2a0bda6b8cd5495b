// The kernel's parameters.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cutlass/fast_math.h>

#include <cstdint>

#include "../../common/split_protocol.cuh"
#include "config.cuh"

namespace mla::sm90::prefill {

// Divisors of indexes, for batches whose requests are all as long as the bounds. The host computes
// multipliers for them: a division by a number that the compiler does not know takes 30
// instructions, and on the way to the first tile each of them is fetched for a single use.

// Divisors for tiles in the order of scheduler.cuh: tiles of a block of requests, tiles of a block
// of heads within it, heads of the latter, and requests of the former. [1] is for the last blocks,
// which may have fewer requests and fewer heads.
struct UniformTiles {
    cutlass::FastDivmod request_block, head_block[2], heads[2], requests[2];
    int count;
};

// Divisors for items in the order of split_plan.cuh: items of a request, of a head and of a row,
// and the KV tiles of a split.
struct UniformItems {
    cutlass::FastDivmod request, head, row, length;
    // Query tiles of a head, and splits of the longest query tile.
    int tiles, splits;
};

struct KernelParams {
    void* out;        // [query tokens, heads, V]
    float* lse;       // [heads, query tokens], or null
    const int* cu_q;  // [requests + 1]
    const int* cu_k;  // [requests + 1]
    // Zero between launches: number of tiles or items claimed; number of CTAs that have left; and,
    // at the first slot of each query tile with several splits, number of warps that have stored
    // their partial results.
    int *claimed, *left, *arrived;
    // Partial results of kQueries rows each: sums of weights times values, [slot, warp, V / 8,
    // lane] of 4 f32 in the order of registers; and (reference, sum of weights), [slot, warp, row %
    // 8] of two rows each.
    float4 *partial_out, *partial_sum;
    int slots;
    // Number of CTAs of the launch.
    int ctas;
    // Lists of contaminated rows, [CTA, warp of the consumers, kMaxContaminated].
    ContaminatedRows* contaminated;
    int64_t out_token_stride, out_head_stride, lse_head_stride;
    int requests, heads;
    // Number of query tiles of the longest request.
    int max_request_tiles;
    // L2 swizzle: requests and heads of a block, whose tiles follow one another (scheduler.cuh).
    int swizzle_requests, swizzle_heads;
    // Bounds that the tensor maps were made with.
    int max_query_len, max_key_len;
    // True if by the host's numbers every request has exactly as many rows and keys as these
    // bounds. The lengths themselves may prove it wrong.
    int uniform;
    // True if no CTA has a second tile in that case, provided that keys are not split.
    int single_wave;
    UniformTiles uniform_tiles;
    UniformItems uniform_items;
    int causal;
    float scale_log2;  // softmax scale times log2(e)
    // Read by TMA, and by repair.cuh. The head stride of a rotary key that all heads share is 0.
    const void *query, *key, *key_rope, *value;
    int64_t query_token_stride, query_head_stride, key_token_stride, key_head_stride;
    int64_t key_rope_token_stride, key_rope_head_stride, value_token_stride, value_head_stride;

#ifdef __CUDACC__
    __device__ Arrivals<DeviceMemory> arrivals(int first_slot) const {
        return {&arrived[first_slot]};
    }
#endif
};

// Each map has four dimensions: columns, heads, rows of a request, end of the request. An index of
// the third counts from `max_len - len`, so that its bound falls on the request's last row: TMA
// reads rows behind it as zeros, whatever the next request has there. The index of the fourth is
// the tensor row at which the request ends, and the base address lies `max_len` rows before the
// tensor. Output rows behind the bound are not written.
struct Maps {
    CUtensorMap query, query_rope, key, key_rope, value, out;
};

}  // namespace mla::sm90::prefill
