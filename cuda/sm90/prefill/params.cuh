// What the kernel is told by the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cutlass/fast_math.h>

#include <cstdint>

#include "../../common/split_protocol.cuh"
#include "tile.cuh"

namespace mla::sm90::prefill {

// What indexes are divided by where every request is as long as the bounds say. The host works out
// how to do so with a multiplication: a division of numbers that it does not know takes 30
// instructions, and on the way to the first tile each of them is fetched for one use.

// Of tiles in the order of schedule.cuh: those of a section, of a group of heads within it, heads
// of a group and requests of a section. The last section may have fewer requests, and the last
// group fewer heads: [1].
struct AlikeTiles {
    cutlass::FastDivmod section, group[2], heads[2], requests[2];
    int count;
};

// Of items in the order of division.cuh: those of a request, of a head and of a row, and the KV
// tiles of a split.
struct AlikeItems {
    cutlass::FastDivmod request, head, row, length;
    // Query tiles of a head, and splits of the longest of them.
    int tiles, splits;
};

struct KernelParams {
    void* out;        // [query tokens, heads, V]
    float* lse;       // [heads, query tokens], or null
    const int* cu_q;  // [requests + 1]
    const int* cu_k;  // [requests + 1]
    // Zero between launches: tiles or items claimed, CTAs that have left, and of each query tile of
    // several splits the warps that have stored their partial results, at its first slot.
    int *claimed, *left, *arrived;
    // Partial results, each of kQueries rows: sums of weights times values, [slot, warp, V / 8,
    // lane] of 4 f32 as they lie in registers, and (reference, sum of weights) of rows, [slot,
    // warp, row % 8] of two rows each.
    float4 *partial_out, *partial_sum;
    int slots;
    // Of the launch.
    int ctas;
    // [CTA, warp of the consumers, kMostSpoiled]
    Spoiled* spoiled;
    int64_t out_token_stride, out_head_stride, lse_head_stride;
    int requests, heads;
    // Levels of the schedule: tiles of the longest request.
    int levels;
    // Requests and heads whose tiles are worked through together (schedule.cuh).
    int section, group;
    // The bounds that the tensor maps were made with.
    int max_query_len, max_key_len;
    // By the host's numbers every request has as many rows and keys as these bounds say. The
    // lengths themselves tell whether it is so.
    int alike;
    // Whether no CTA has a second tile if it is, and keys are not divided.
    int single_wave;
    AlikeTiles alike_tiles;
    AlikeItems alike_items;
    int causal;
    float scale_log2;  // softmax scale times log2(e)
    // Read by TMA, and where rows are repaired (repair.cuh). Heads of one rotary key are 0 apart.
    const void *query, *key, *key_rope, *value;
    int64_t query_token_stride, query_head_stride, key_token_stride, key_head_stride;
    int64_t key_rope_token_stride, key_rope_head_stride, value_token_stride, value_head_stride;

#ifdef __CUDACC__
    __device__ Arrivals<DeviceMemory> arrivals(int first_slot) const {
        return {&arrived[first_slot]};
    }
#endif
};

// Each map has four dimensions: columns, heads, rows of a request, end of the request. The third
// counts from `max_len - len`, so that its bound falls on the request's last row: what lies behind
// it is read as zeros, whatever the next request has there. The fourth is where the request ends in
// the tensor, and the base address lies `max_len` rows before the tensor. Rows of the output behind
// it are not written.
struct Maps {
    CUtensorMap query, query_rope, key, key_rope, value, out;
};

}  // namespace mla::sm90::prefill
