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

// Constants of the division of work among CTAs. Costs are in times of a KV tile.
struct Costs {
    // Cost of an item in addition to its KV tiles.
    static constexpr float kItem = 2.f;
    // Further costs of each item: the more items there are, the later all of them have begun, and
    // the more partial results are written and read. The first is the cost if the device has to
    // read the lengths. The second is the cost for all rows of a query tile, by which numbers of
    // splits are compared. The third replaces it in the comparison with no splits. It is lower,
    // since with splits more CTAs read at the same time, which makes up for a part of the cost.
    static constexpr float kReadLengthsItem = 0.034f, kItemRows = 0.05f, kMinItemRows = 0.019f;
    // Costs of the combine at the end: for any number of splits, for all rows of a query tile, and
    // for each split.
    static constexpr float kCombine = 3.f, kCombineRows = 1.5f, kCombineSplit = 0.02f;
    // Cost of each request with many query tiles: every CTA then goes over all lengths.
    static constexpr float kRequest = 0.05f;
    // The predicted end must be earlier than this share of the time without splits.
    static constexpr float kWorthwhile = 0.95f;
    // Requests whose first query tile takes less than this share of a CTA's work come in any order.
    static constexpr float kOrdered = 1 / 24.f;
    // Number of numbers of splits that are tried with many query tiles.
    static constexpr int kNumbersTried = 25;
    // Max number of KV tiles that are not split: the combine takes longer than splitting saves.
    static constexpr int kMaxUnsplitKvTiles = 5;
    // Number of keys for each split of a request that is divided as if it were alone. With fewer
    // keys, the splits of a full device would cost more than they save a request that is alone.
    static constexpr int kAloneKeys = 2048;
};

// Number of KV tiles of `keys` keys that any row of a query tile sees.
template <int keys>
__host__ __device__ inline int visible_kv_tiles(int causal, int query, int query_len, int key_len) {
    const int last = query + kQueries + key_len - query_len;
    const int visible = causal && last < key_len ? last : key_len;
    return visible > 0 ? int((unsigned(visible) + keys - 1) / keys) : 0;
}

}  // namespace mla::sm90::prefill
