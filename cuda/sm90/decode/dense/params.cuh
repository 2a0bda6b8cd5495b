// The kernel's parameters, and the sizes that host and device agree on.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "../../../common/split_protocol.cuh"

namespace mla::sm90::decode {

// Number of cached tokens in a KV tile, which is a step of the main loop.
constexpr int kTileTokens = 64;
constexpr int kMaxRequests = 1024;
// Maximum number of CTAs of a launch, one per SM.
constexpr int kCounters = 160;
// The widths of a cache row in values, and its numbers of panels. A rotary key has a panel of its
// own. One of 32 values fills the first half of that panel. `rope` is 0 if rows have none.
template <int latent, int rope>
struct RowDims {
    static constexpr int kLatent = latent, kRope = rope;
    static constexpr int kLatentPanels = latent / 64, kRopePanels = rope > 0 ? 1 : 0,
                         kPanels = kLatentPanels + kRopePanels;
    static_assert(latent % 256 == 0 && (rope == 64 || rope == 32 || rope == 0),
                  "each output warpgroup has whole vectors of a partial result");
};
using R1Row = RowDims<512, 64>;

// A config has this instead of a number of CTAs of a group if the launch's grid gives that number.
constexpr int kAnyGroup = 0;

// The host's estimate of where each CTA group starts, as if all requests had the same number of
// query tokens (TileScheduler::likely_start, plan_uniform). The reciprocals spare the device its
// divisions.
struct Estimate {
    // Number of query tiles of a request, and of all requests.
    int tiles_of_request, tiles;
    // Number of CTA groups of each tile; 0 if there are more tiles than CTA groups.
    int groups_of_tile;
    // Number of tiles of each CTA group if there are more tiles than CTA groups.
    int tiles_of_group;
    float inverse_tiles_of_request, inverse_groups_of_tile, inverse_groups;
};

struct KernelParams {
    const void* q_latent;     // [tokens, heads, latent]
    const void* q_rope;       // [tokens, heads, rope], unused if rows have no rotary key
    void* out;                // [tokens, heads, latent]
    float* lse;               // [heads, tokens], or null
    const int* block_table;   // [requests, pages of the longest]
    const int* kv_lens;       // [requests]
    const int* cu_q_lens;     // [requests + 1], or null
    SplitCounters* counters;  // [kCounters], zero before and after
    char* partials;           // [2 * CTAs][PartialResult]
    int64_t q_latent_token_stride, q_latent_head_stride;
    int64_t q_rope_token_stride, q_rope_head_stride;
    int64_t out_token_stride, out_head_stride;
    int64_t lse_head_stride;
    int64_t block_table_stride;
    // Number of entries from the first request's first one to the last request's last one. Nothing
    // behind them is read.
    int64_t block_table_entries;
    int requests, heads, query_len;
    float inverse_heads;
    // If page_shift is not negative, page_size is 1 << page_shift.
    int page_size, page_shift;
    // Number of cached tokens that lie together: 64, or 16 if the page size is no multiple of 64.
    int run;
    int causal;
    // True if the query rows are evenly spaced. TMA can then fetch them.
    int even_query;
    // Cost of starting and finishing a query tile, as a number of KV tiles. It is added to the
    // tile's cost.
    int tile_cost;
    Estimate estimate;
    // Cycles that a CTA waits for the other splits of its tile before it falls back.
    int64_t patience;
    // softmax_scale * log2(e), times the cache's scale
    float scale_log2;
    // Factor of the output: the cache's scale
    float out_scale;
    // The cache of a batch of at most this number of KV tiles is read as evict-first.
    int evict_first_kv_tiles;
};

struct TensorMaps {
    // Latent values of 16 bits: [pages][page_size][latent], boxes of 64 values by a run of tokens.
    // Unused for e4m3 with one scale. If the tokens of e4m3 have scales of their own, these are
    // described instead: [pages][page_size][4] f32, of which the first is the scale.
    CUtensorMap cache;
    // [pages][page_size][rope], in boxes of 64 values by a run of tokens. If a row has fewer rotary
    // values, TMA fills the rest with zeros.
    CUtensorMap cache_rope;
    // The latent values as pairs of panels: [pages][latent / 128][2][page_size][64]. Value x + 64
    // odd + 128 pair of a token is at [page][pair][odd][token][x]. A box has 64 values of a run of
    // tokens, in both panels of one pair or of two pairs. In an e4m3 cache there are four groups of
    // 128 values instead: [pages][4][page_size][128]. A box has 64 tokens and all groups, or 16
    // tokens and one group.
    CUtensorMap cache_pairs;
    // [latent / 128][2][tokens * heads][64]: value x + 64 odd + 128 pair of a row is at
    // [pair][odd][row][x]. A box has 64 values of N rows, in one panel or both panels of every
    // pair. Unused unless even_query.
    CUtensorMap q_latent;
    CUtensorMap q_rope;  // [1][1][tokens * heads][rope], in boxes of 64 values
};

// Number of f16 values that lie together in a partial result.
constexpr int kVectorValues = 8;

// A partial result in the workspace. Its normalised output is multiplied by a power of two that
// brings the largest value to 2^14 or more. f16 then has 11 bits for all values above 2^-28 of the
// largest. First come the vectors of the 256 output threads. Then come, for every two rows, their
// log-sum-exps (base 2), the factors for their values, and padding.
template <int N, int latent>
struct PartialResult {
    static constexpr int kRows = N;
    // Number of vectors of a thread for every eight rows.
    static constexpr int kGroupVectors = latent / 32 / kVectorValues;
    static constexpr int kVectors = N / 8 * kGroupVectors * 256;
    static constexpr size_t kBytes = size_t(kVectors) * 16 + N / 2 * 16;

    __host__ __device__ static constexpr size_t lse_offset(int row) {
        return size_t(kVectors) * 16 + row / 2 * 16 + row % 2 * 4;
    }
    __host__ __device__ static constexpr size_t scale_offset(int row) {
        return lse_offset(row) + 8;
    }
};

}  // namespace mla::sm90::decode
