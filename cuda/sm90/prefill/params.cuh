// The kernel's parameters.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cutlass/fast_math.h>

#include <cstdint>

#include "../../common/split_protocol.cuh"
#include "config.cuh"

namespace mla::sm90::prefill {

// The structs below divide indexes if all requests of a batch are as long as the bounds. The host
// computes multipliers for these divisions. A division by a number that the compiler does not know
// takes 30 instructions. On the way to the first tile, each of these instructions would be fetched
// for a single use.

// Divisors for tiles in the order of scheduler.cuh. `request_block` is the number of tiles in a
// block of requests, and `head_block` that in a block of heads within it. `heads` and `requests`
// are the numbers of heads and of requests in these blocks. Index 1 is for the last blocks, which
// may have fewer requests and fewer heads.
struct UniformTiles {
    cutlass::FastDivmod request_block, head_block[2], heads[2], requests[2];
    int count;
};

// Divisors for items in the order of split_plan.cuh: for the items of a request, of a head and of a
// row, and for the KV tiles of a split.
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
    // Counters that are zero between launches. `claimed` counts claimed tiles or items, and `left`
    // the CTAs that have left. `arrived`, at the first slot of each query tile with several splits,
    // counts the warps that have stored their partial results.
    int *claimed, *left, *arrived;
    // Partial results of kQueries rows each. `partial_out` has sums of weights times values, as
    // [slot, warp, V / 8, lane] of 4 f32 in the order of registers. `partial_sum` has pairs
    // (reference maximum, sum of weights), as [slot, warp, row % 8] of two rows each (softmax.cuh).
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
    // L2 swizzle: numbers of requests and heads in a block. The tiles of a block follow one another
    // (scheduler.cuh).
    int swizzle_requests, swizzle_heads;
    // Bounds that the tensor maps were made with.
    int max_query_len, max_key_len;
    // True if, by the host's numbers, the length of every request is exactly these bounds. The
    // lengths on the device may prove this wrong.
    int uniform;
    // True if, in that case, no CTA has a second tile. Only for kernels that do not split keys.
    int single_wave;
    UniformTiles uniform_tiles;
    UniformItems uniform_items;
    int causal;
    float scale_log2;  // softmax scale times log2(e)
    // Maximum number of splits of a request of one query tile, if requests are divided as if each
    // were alone; otherwise 0 (split_plan.cuh).
    int alone;
    // TMA and repair.cuh read these. If all heads share a rotary key, its head stride is 0.
    const void *query, *key, *key_rope, *value;
    int64_t query_token_stride, query_head_stride, key_token_stride, key_head_stride;
    int64_t key_rope_token_stride, key_rope_head_stride, value_token_stride, value_head_stride;

#ifdef __CUDACC__
    __device__ Arrivals<DeviceMemory> arrivals(int first_slot) const {
        return {&arrived[first_slot]};
    }
#endif
};

// Each map has four dimensions: columns, heads, rows of a request, and end of the request. The
// index of the fourth is the tensor row at which the request ends. The base address therefore lies
// `max_len` rows before the tensor. The index of the third counts from `max_len - len`, so the
// bound of this dimension falls on the request's last row. TMA reads the rows behind it as zeros,
// whatever the next request has there. It does not write output rows behind it.
struct Maps {
    CUtensorMap query, query_rope, key, key_rope, value, out;
};

}  // namespace mla::sm90::prefill
