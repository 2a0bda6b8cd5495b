// What the kernel is told by the host, and the sizes both agree on.
#pragma once

#include <cstdint>

namespace mla::sm90::sparse {

constexpr int kLatent = 512;
constexpr int kRope = 64;
// Listed keys per step of the main loop: a KV tile.
constexpr int kTileKeys = 64;
// Keys of a slot of the ring, which are waited for together.
constexpr int kSlotKeys = 16;
// Entries of a list that are read together. A split has every so-manieth group
// of them, so that splits of a list are alike wherever its valid entries lie.
constexpr int kListGroup = 32;

struct KernelParams {
    const void* q_latent;  // [tokens, heads, 512]
    const void* q_rope;    // [tokens, heads, 64]
    const char* cache;     // [pages, page_size] rows
    const int* lists;      // [tokens, width]
    const int* counts;     // [tokens], or null
    const float* sinks;    // [heads], or null
    void* out;             // [tokens, heads, 512]
    float* lse;            // [heads, tokens], or null
    int64_t q_latent_token_stride, q_latent_head_stride;
    int64_t q_rope_token_stride, q_rope_head_stride;
    int64_t list_stride;
    int64_t out_token_stride, out_head_stride;
    int64_t lse_head_stride;
    // In bytes.
    int64_t cache_page_stride, cache_slot_stride;
    // An entry is valid if it is below this, as an unsigned number.
    uint32_t cache_slots;
    uint32_t page_size;
    // Pages lie one behind the other, so that a slot's number alone says where it
    // is.
    bool pages_adjoin;
    // Rows are so few that they had better not push out of L2 what others wrote.
    bool read_once;
    int tokens, heads, width;
    // Tiles of heads of a token, and the heads of each of them but the last.
    int head_tiles, tile_heads;
    // Tiles of heads of all tokens.
    int items;
    // softmax_scale * log2(e), times the cache's scale
    float scale_log2;
    // What the output is multiplied by: the cache's scale
    float out_scale;
};

}  // namespace mla::sm90::sparse
