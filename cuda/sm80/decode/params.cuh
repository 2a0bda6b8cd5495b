// Parameters that the host passes to the kernel, and sizes that both agree on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mla::sm80::decode {

// Number of warps side by side. Each of them has a quarter of the latent columns.
constexpr int kColumnGroups = 4;
// Maximum number of KV tiles that a CTA holds or has in flight.
constexpr int kMaxStages = 6;
// Maximum number of CTAs of a launch, and bytes of their counters. Each CTA has one SplitCounters.
constexpr int kMaxCtas = 1024;
constexpr size_t kCounterBytes = kMaxCtas * 2 * sizeof(int32_t);

// Number of cycles that is more than a KV tile takes.
constexpr int64_t kTilePatience = 10000;

enum class CacheFormat {
    // L + R values of the queries' type
    plain,
    // L + R bytes of e4m3 with one scale for the tensor
    e4m3,
    // L bytes of e4m3, L / 128 f32 scales, R values of bf16
    e4m3_grouped,
    // L bytes of e4m3, R values of bf16, one f32 scale: rows of (512, 64) alone
    e4m3_token,
};

// Splits of a tile of rows if its own length alone decides, as in a batch-invariant launch.
struct OwnSplits {
    // Maximum number of splits of a tile of rows.
    static constexpr int kMax = 32;
    // Number of KV tiles of a split, which is doubled until there are at most kMax splits. 0 if
    // splits follow the batch.
    int tiles;
    // Number of partial results of the longest tile of rows. A CTA has room for as many of a tile
    // of which its group has the first split and others have more, and of one that is all its own.
    int slots;
    int of_cta() const { return 2 * (tiles > 0 ? slots : 1); }
};

struct KernelParams {
    const void* q_latent;    // [tokens, heads, L]
    const void* q_rope;      // [tokens, heads, R]
    const char* cache;       // [pages, page_size] rows
    const char* cache_rope;  // [pages, page_size] rotary keys, if `split`
    void* out;               // [tokens, heads, L]
    float* lse;              // [heads, tokens], or null
    const int* block_table;  // [requests, pages], or slots if `sparse`: [requests, tokens]
    const int* kv_lens;      // [requests], or null: every request has `max_kv_len`
    const float* sinks;      // [heads] scores without a value, or null
    const int* cu_q_lens;    // [requests + 1], or null: every request has `query_len`
    int32_t* counters;       // [CTAs] SplitCounters, zero before and after
    float* partials;         // [own.of_cta() * CTAs][partial_floats]
    // Strides are in elements, except for the cache's, which are in bytes.
    int64_t q_latent_token_stride, q_latent_head_stride;
    int64_t q_rope_token_stride, q_rope_head_stride;
    int64_t out_token_stride, out_head_stride;
    int64_t lse_head_stride;
    int64_t cache_page_stride, cache_slot_stride;
    int64_t cache_rope_page_stride, cache_rope_slot_stride;
    int64_t block_table_stride;
    // Number of slots of the cache. An entry of a slot list that is outside of them is skipped.
    int64_t slots;
    // A length below 0 counts as 0, and a length above max_kv_len as max_kv_len.
    int requests, heads, query_len, max_kv_len;
    // If page_shift is not negative, page_size is 1 << page_shift.
    int page_size, page_shift;
    int rope_dim;
    // Bytes of one cache row in shared memory.
    int pitch;
    int stages;
    // Number of CTAs that work side by side on different rows of the same cached tokens.
    int pair;
    int causal;
    int sparse;
    // Nonzero if rotary keys lie in a tensor of their own, and rows are of latents alone.
    int split;
    // Cost of a tile of rows in addition to its KV tiles, and minimum cost of a CTA's share if
    // splits are many.
    int tile_cost, min_share;
    OwnSplits own;
    // Cost by which ranges may be longer in order to be even (scheduler.cuh).
    int even_gain;
    // Number of cycles that a CTA waits for the other splits of a tile of rows. 0 stands for
    // kDefaultPatience plus kTilePatience for each KV tile of a CTA's share. Another CTA may have
    // that much more to do.
    int64_t patience;
    // softmax_scale * log2(e), times the cache's scale
    float scale_log2;
    // Factor of the output: the cache's scale
    float out_scale;

    // Counters first, then partial results.
    void set_workspace(void* workspace) {
        counters = static_cast<int32_t*>(workspace);
        partials = reinterpret_cast<float*>(static_cast<char*>(workspace) + kCounterBytes);
    }
};

}  // namespace mla::sm80::decode
