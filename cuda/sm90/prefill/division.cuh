// How the keys of few query tiles are divided among CTAs.
//
// Where query tiles do not fill the GPU, the KV tiles of each are divided into splits of about equal
// length, and the items of work are (request, head, split, query tile), in this order:
//
//     for request: for head: for split from the first keys on: for query tile from the last one up
//
// so that all query tiles of a head go through the same keys at the same time, which L2 then holds.
// A split of a request has the same length for all of its query tiles; where keys are hidden from
// the upper ones, their last splits are shorter, or void. A query tile that has one split is stored
// as it is; the splits of others leave partial results in the workspace, which are combined in the
// order of the splits, whoever computed them.
//
// The number of splits of the longest query tile is the one of 1 to 32 for which the end is
// predicted to come first (`predicted`); 1 leaves the order to schedule.cuh. All of it follows from
// the lengths on the device. One warp does this, or a thread on the host (mla_prefill_sm90_items).
#pragma once

#include <cmath>
#include <cstring>

#include "item.cuh"
#include "lanes.cuh"
#include "params.cuh"
#include "tile.cuh"

namespace mla::sm90::prefill {

// What the prediction counts with, in KV tiles: what an item takes beside its own, and what
// combining takes at the end, for any number of splits and for each of them.
constexpr float kItemCost = 1.5f, kCombineCost = 2.f, kCombineCostOfSplit = 0.0625f;
// Dividing has to promise so much.
constexpr float kWorthwhile = 0.96f;
constexpr int kMostSplits = 32;

__host__ __device__ inline int ceil_of(int a, int b) { return (a + b - 1) / b; }

template <int keys>
class Division {
  public:
    // `ctas`: those of the launch. `room`: for how many partial results the workspace has a place.
    __host__ __device__ Division(const KernelParams& p, int ctas, int room)
        : p_(p), ctas_(ctas), room_(room) {}

    // Chooses the length of a split. False: query tiles are not divided.
    __host__ __device__ bool divide() {
        if (!count()) return false;
        float best = INFINITY;
        int splits = 1;
#pragma unroll 1
        for (int candidate = Lanes::own() + 1; candidate <= kMostSplits; candidate += Lanes::kCount) {
            float time = predicted(ceil_of(longest_, candidate));
            if (candidate > 1) time /= kWorthwhile;
            if (time < best) best = time, splits = candidate;
        }
        // Positive numbers are in the order of their bits.
        int bits;
        memcpy(&bits, &best, sizeof bits);
        const int lowest = Lanes::lowest(bits);
        splits = Lanes::lowest(bits == lowest ? splits : kMostSplits);
        length_ = ceil_of(longest_, splits);
        rewind();
        return splits > 1;
    }

    // The item of an index. From call to call the index rises, or rewind() comes between.
    __host__ __device__ Item find(int index) {
        Item item = {};
        item.request = -1;
        while (index - before_ >= of_chunk_) {
            if (chunk_ + Lanes::kCount >= p_.requests) return item;
            before_ += of_chunk_;
            enter(chunk_ + Lanes::kCount);
        }
        const int lane = Lanes::first(index - before_ < running_);
        item.request = chunk_ + lane;
        read(item);
        const int tiles = tiles_of(item.query_len), top = kv_tiles(item, (tiles - 1) * kQueries);
        const int most = splits_of(top), length = ceil_of(top, most);
        const int first = before_ + Lanes::of(running_, lane) - p_.heads * tiles * most;
        const int per_head = tiles * most, of_request = index - first;
        item.head = of_request / per_head;
        const int of_head = of_request % per_head, tile = tiles - 1 - of_head % tiles;
        item.split = of_head / tiles;
        item.query = tile * kQueries;
        item.first_slot = first + (item.head * tiles + tile) * most;
        const int visible = kv_tiles(item, item.query);
        item.splits = visible > 0 ? ceil_of(visible, length) : 1;
        item.begin = least(item.split * length, visible);
        item.end = least(item.begin + length, visible);
        return item;
    }

    // Lets find() begin anew.
    __host__ __device__ void rewind() {
        before_ = 0;
        enter(0);
    }

    // Items, void ones included: one behind the last index.
    __host__ __device__ int items() {
        int items = 0;
        for (int request = Lanes::own(); request < p_.requests; request += Lanes::kCount) {
            items += items_of(request);
        }
        return Lanes::sum(items);
    }

    // KV tiles that any row of a query tile sees.
    __host__ __device__ int kv_tiles(const Item& request, int query) const {
        return visible_kv_tiles<keys>(p_, query, request.query_len, request.key_len);
    }

  private:
    __host__ __device__ static int least(int a, int b) { return a < b ? a : b; }

    __host__ __device__ int tiles_of(int query_len) const {
        return least(ceil_of(query_len, kQueries), p_.levels);
    }

    // Splits of a query tile of so many KV tiles.
    __host__ __device__ int splits_of(int kv_tiles) const {
        return kv_tiles > 0 ? ceil_of(kv_tiles, length_) : 1;
    }

    __host__ __device__ void read(Item& item) const {
        item.query_start = p_.cu_q[item.request];
        item.query_len = p_.cu_q[item.request + 1] - item.query_start;
        item.key_start = p_.cu_k[item.request];
        item.key_len = p_.cu_k[item.request + 1] - item.key_start;
    }

    __host__ __device__ int items_of(int request) const {
        Item item = {};
        item.request = request;
        read(item);
        const int tiles = tiles_of(item.query_len);
        return tiles ? p_.heads * tiles * splits_of(kv_tiles(item, (tiles - 1) * kQueries)) : 0;
    }

    // Goes to the requests of which each lane has one.
    __host__ __device__ void enter(int chunk) {
        chunk_ = chunk;
        const int own = chunk + Lanes::own();
        running_ = Lanes::running_sum(own < p_.requests ? items_of(own) : 0);
        of_chunk_ = Lanes::of(running_, Lanes::kCount - 1);
    }

    // Counts query tiles and the KV tiles of the longest. False where there are too many of the
    // former to be divided, or nothing to divide.
    __host__ __device__ bool count() {
        int tiles = 0;
        longest_ = 0;
        alike_ = true;
        Item first = {};
        read(first);
#pragma unroll 1
        for (int begin = 0; begin < p_.requests; begin += Lanes::kCount) {
            const int request = begin + Lanes::own();
            int own = 0, top = 0;
            bool differs = false;
            if (request < p_.requests) {
                Item item = {};
                item.request = request;
                read(item);
                own = tiles_of(item.query_len);
                top = own ? kv_tiles(item, (own - 1) * kQueries) : 0;
                differs = item.query_len != first.query_len || item.key_len != first.key_len;
            }
            tiles += Lanes::sum(own);
            longest_ = Lanes::highest(top > longest_ ? top : longest_);
            if (Lanes::highest(differs)) alike_ = false;
            if (int64_t(tiles) * p_.heads > room_) return false;
        }
        return tiles > 0 && longest_ > 1;
    }

    // When the last split would end, in KV tiles, if none had more than `length` of them.
    __host__ __device__ float predicted(int length) const {
        float items = 0.f, total = 0.f;
        int slots = 0, most = 0;
#pragma unroll 1
        for (int request = 0; request < p_.requests; request++) {
            Item item = {};
            item.request = request;
            read(item);
            const int times = alike_ ? p_.requests : 1;
            const int tiles = tiles_of(item.query_len);
            if (tiles > 0) {
                const int top = kv_tiles(item, (tiles - 1) * kQueries);
                const int splits = top > 0 ? ceil_of(top, length) : 1, own = ceil_of(top, splits);
                slots += times * tiles * splits;
                most = own > most ? own : most;
                const float factor = 1.f / float(own > 0 ? own : 1);
                for (int tile = p_.causal ? 0 : tiles - 1; tile < tiles; tile++) {
                    const int n = kv_tiles(item, tile * kQueries);
                    const float weight = float(p_.causal ? times : times * tiles);
                    items += weight * (n > 0 ? ceilf((float(n) - 0.5f) * factor) : 1.f);
                    total += weight * float(n);
                }
            }
            if (alike_) break;
        }
        const float heads = float(p_.heads);
        if (float(slots) * heads > float(room_)) return 1e30f;
        items *= heads;
        total *= heads;
        const float waves = ceilf(items / float(ctas_));
        const float even = waves * (total / items + kItemCost), alone = float(most) + kItemCost;
        const float combining =
            most < longest_ ? kCombineCost + kCombineCostOfSplit * float(longest_ / most) : 0.f;
        return (even > alone ? even : alone) + combining;
    }

    const KernelParams& p_;
    int ctas_, room_;
    // KV tiles of the longest query tile, and of a split at most; whether all requests are of the
    // same lengths.
    int longest_ = 0, length_ = 1;
    bool alike_ = false;
    // The requests at hand: the first one, the items before it, the items up to each lane's request
    // and of all of them.
    int chunk_ = 0, before_ = 0, running_ = 0, of_chunk_ = 0;
};

}  // namespace mla::sm90::prefill
