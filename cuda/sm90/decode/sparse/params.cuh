// The kernel's parameters, and the sizes that host and device agree on.
#pragma once

#include <cstdint>

namespace mla::sm90::sparse {

constexpr int kLatent = 512;
constexpr int kRope = 64;
// Listed keys per step of the main loop: a KV tile.
constexpr int kTileKeys = 64;
// Keys of a stage of the ring, which are waited for together.
constexpr int kStageKeys = 16;
// Entries of a list that are read together. Splits of a list take these groups in turn, so that
// they are equally long wherever its valid entries lie.
constexpr int kListGroup = 32;

// A cache, and a list for each token of what is attended to in it.
struct Source {
    const int* lists;  // [tokens, width]
    int64_t list_stride;
    const int* counts;  // [tokens], or null
    int width;
    // An entry is valid if it is below this, as an unsigned number.
    uint32_t slots;
    const char* cache;  // [pages, page_size] rows
    // In bytes.
    int64_t page_stride, slot_stride;
    uint32_t page_size;
    // Pages lie one behind the other, so that a slot's number alone says where it
    // is.
    bool pages_adjoin;
};

// The rotary keys of a cache: [pages, page_size], strides in bytes.
struct RopeSource {
    const char* rope;
    int64_t page_stride, slot_stride;
};

// A token attends to what all of its lists name.
constexpr int kSources = 2;

// Parameters that a kernel reads first stand first, since each line of constants that it looks at
// is waited for.
struct KernelParams {
    // The launch sets these. Tiles of heads of all tokens: the first of this launch, and where they
    // end.
    int first_item, items;
    // Tiles of heads of a token, and the heads of each of them but the last. 2^31 / head_tiles,
    // rounded up.
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
    const void* q_rope;    // [tokens, heads, 64]
    const float* sinks;    // [heads], or null
    void* out;             // [tokens, heads, 512]
    float* lse;            // [heads, tokens], or null
    int64_t q_latent_token_stride, q_latent_head_stride;
    int64_t q_rope_token_stride, q_rope_head_stride;
    int64_t out_token_stride, out_head_stride;
    int64_t lse_head_stride;
    // Rows are so few that they had better not push out of L2 what others wrote.
    bool read_once;
    int tokens, heads;
    // Entries of all lists of a token.
    int width;
    // softmax_scale * log2(e), times the cache's scale
    float scale_log2;
    // Factor of the output: the cache's scale
    float out_scale;
    // True if some rotary keys lie in a tensor of their own: rows are then copied in two parts.
    bool split;
    // Bytes of a row in the cache: of a latent alone where they are copied in two parts.
    int row_bytes;
    RopeSource rope[kSources];
};

}  // namespace mla::sm90::sparse
