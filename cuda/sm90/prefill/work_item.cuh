// Work items, which are handed out to CTAs.
#pragma once

#include "config.cuh"
#include "params.cuh"

namespace mla::sm90::prefill {

// One split of a query tile.
struct WorkItem {
    int request;  // -1 behind the last item
    int head;
    int query;  // first query row of the tile within its request
    int query_start, query_len, key_start, key_len;
    // KV tiles `begin` to `end`. There are none in an empty split, or for rows that see nothing.
    int begin, end;
    // Index of this split, and number of the query tile's splits that are not empty.
    int split, splits;
    // Slot of the partial result of this query tile's split 0; those of the other splits follow.
    int first_slot;

    __host__ __device__ bool is_valid() const { return request >= 0; }
};

// Cost of an item in addition to its KV tiles, as a number of KV tiles.
constexpr float kItemCost = 2.f;

// Number of KV tiles of `keys` keys that any row of a query tile sees.
template <int keys>
__host__ __device__ inline int visible_kv_tiles(int causal, int query, int query_len, int key_len) {
    const int last = query + kQueries + key_len - query_len;
    const int visible = causal && last < key_len ? last : key_len;
    return visible > 0 ? int((unsigned(visible) + keys - 1) / keys) : 0;
}

}  // namespace mla::sm90::prefill
