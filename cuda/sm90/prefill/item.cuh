// What is handed out to CTAs.
#pragma once

#include "params.cuh"
#include "tile.cuh"

namespace mla::sm90::prefill {

// One split of a query tile.
struct Item {
    int request;  // -1: there are no more
    int head;
    int query;  // first query row of the tile within its request
    int query_start, query_len, key_start, key_len;
    // KV tiles `begin` to `end`; none in a void split, or for rows that see nothing.
    int begin, end;
    // This is split `split` of `splits`, of which none is void.
    int split, splits;
    // Where the partial result of split 0 of this query tile is kept; those of the others follow.
    int first_slot;
};

// What an item takes beside its KV tiles, in those.
constexpr float kItemCost = 2.f;

// KV tiles of `keys` keys that any row of a query tile sees.
template <int keys>
__host__ __device__ inline int visible_kv_tiles(int causal, int query, int query_len, int key_len) {
    const int last = query + kQueries + key_len - query_len;
    const int visible = causal && last < key_len ? last : key_len;
    return visible > 0 ? int((unsigned(visible) + keys - 1) / keys) : 0;
}

}  // namespace mla::sm90::prefill
