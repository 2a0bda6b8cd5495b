// The kernel's parameters, and the sizes that host and device agree on.
#pragma once

#include <cstdint>

namespace mla::sm90::sparse {

constexpr int kLatent = 512;
// Number of listed keys in a KV tile, which is a step of the main loop.
constexpr int kTileKeys = 64;
// Number of keys in a stage of the ring. They are waited for together.
constexpr int kStageKeys = 16;
// Number of entries of a list that are read together. The splits of a list take such groups in
// turn. They are therefore equally long, wherever the valid entries of the list lie.
constexpr int kListGroup = 32;

// A cache, and for each token a list of rows that it attends to in this cache.
struct Source {
    const int* lists;  // [tokens, width]
    int64_t list_stride;
    const int* counts;  // [tokens], or null
    int width;
    // An entry is valid if, as an unsigned number, it is below this.
    uint32_t slots;
    const char* cache;  // [pages, page_size] rows
    // In bytes.
    int64_t page_stride, slot_stride;
    uint32_t page_size;
    // True if pages lie one behind the other. The number of a slot alone then says where it lies.
    bool pages_adjoin;
};

// The rotary keys of a cache: [pages, page_size], strides in bytes.
struct RopeSource {
    const char* rope;
    int64_t page_stride, slot_stride;
};

// Number of caches with lists. A token attends to the rows in all of its lists.
constexpr int kSources = 2;

// Parameters that a kernel reads first come first, because it waits for each line of constants that
// it reads.
struct KernelParams {
    // The launch sets these: the number of its first item, and the number behind its last one. An
    // item is a tile of heads of a token.
    int first_item, items;
    // Number of tiles of heads of a token, and number of heads in each of them but the last.
    // token_factor is 2^31 / head_tiles, rounded up.
    int head_tiles, tile_heads;
    uint32_t token_factor;
    // Parameters of the requests that are dense, see mla.h.
    int dense_within, requests;
    Source sources[kSources];
    const int* block_table;
    const int* seq_lens;
    const int* query_starts;
    int64_t block_table_stride;
    const void* q_latent;  // [tokens, heads, 512]
    const void* q_rope;    // [tokens, heads, 64], unused if rows have no rotary key
    const float* sinks;    // [heads], or null
    void* out;             // [tokens, heads, 512]
    float* lse;            // [heads, tokens], or null
    int64_t q_latent_token_stride, q_latent_head_stride;
    int64_t q_rope_token_stride, q_rope_head_stride;
    int64_t out_token_stride, out_head_stride;
    int64_t lse_head_stride;
    // True if rows are so few that they should not push out of L2 what others wrote.
    bool read_once;
    int tokens, heads;
    // Number of entries in all lists of a token.
    int width;
    // softmax_scale * log2(e), times the cache's scale
    float scale_log2;
    // Factor of the output: the cache's scale
    float out_scale;
    // True if some rotary keys lie in a tensor of their own. Rows are then copied in two parts.
    bool split;
    // Bytes of a row in the cache. If rows are copied in two parts, bytes of a latent alone.
    int row_bytes;
    RopeSource rope[kSources];
};

}  // namespace mla::sm90::sparse
