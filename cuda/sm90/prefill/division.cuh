// How the keys of few query tiles are divided among CTAs.
//
// Where query tiles do not fill the GPU, the KV tiles of each are divided into splits of about
// equal length, and the items of work are (request, head, split, query tile), in this order:
//
//     for request: for head: for split from the first keys on: for query tile from the last one up
//
// so that all query tiles of a head go through the same keys at the same time, which L2 then holds.
// A split of a request has the same length for all of its query tiles; where keys are hidden from
// the upper ones, their last splits are shorter, or void. A query tile that has one split is stored
// as it is; the splits of others leave partial results in the workspace, which are combined in the
// order of the splits, whoever computed them.
//
// The number of splits of the longest query tile is the one of 1 to 128 for which the end is
// predicted to come first (`predicted`); 1 leaves the order to schedule.cuh. All of it follows from
// the lengths on the device. One warp does this, or a thread on the host (mla_prefill_sm90_items).
#pragma once

#include <cmath>
#include <cstring>

#include "../../common/lanes.cuh"
#include "item.cuh"
#include "lengths.cuh"
#include "params.cuh"
#include "tile.cuh"

namespace mla::sm90::prefill {

// What the prediction counts with, in KV tiles: what an item takes beside its own, and what
// combining takes at the end, for any number of splits, for all rows of a query tile, and for each
// split.
constexpr float kItemCost = 2.f, kCombineCost = 3.f, kCombineCostOfRows = 1.5f,
                kCombineCostOfSplit = 0.02f;
// Dividing has to promise so much.
constexpr float kWorthwhile = 0.95f;
// And asking the lengths so much more for each item: the more there are the later all have begun,
// and the more partial results are written and read.
constexpr float kAskCostOfItem = 0.034f;

__host__ __device__ inline int ceil_of(int a, int b) {
    return int((unsigned(a) + unsigned(b) - 1) / unsigned(b));
}

template <int keys>
class Division {
  public:
    // `ctas`: those of the launch. `room`: for how many partial results the workspace has a place.
    __host__ __device__ Division(const Lengths& batch, int ctas, int room)
        : batch_(batch), ctas_(ctas), room_(room) {}

    // Chooses the length of a split. False: query tiles are not divided.
    __host__ __device__ bool divide() { return count() && may_gain() && choose(); }

    // KV tiles of a split, at most.
    __host__ __device__ int length() const { return length_; }

    // Takes the length of a split that was chosen for requests which are all as long as the bounds
    // say. They are no longer read, then.
    __host__ __device__ void divide_alike(int length) {
        length_ = length;
        const int tiles = batch_.levels;
        of_alike_ = batch_.heads * tiles *
                    splits_of(kv_tiles(batch_.max_query_len, batch_.max_key_len, tiles - 1));
    }

    // Counts query tiles and KV tiles. False where there are too many of the former to be divided,
    // or nothing to divide.
    __host__ __device__ bool count() {
        int tiles = 0, same = 1;
        longest_ = 0;
        shortest_ = INT32_MAX;
        total_ = 0.f;
        const Request first = request(0);
#pragma unroll 1
        for (int begin = 0; begin < batch_.requests; begin += Lanes::kCount) {
            const Request own = request(begin + Lanes::own());
            if (begin + Lanes::own() < batch_.requests) {
                same = same && own.top == first.top && own.bottom == first.bottom &&
                       own.tiles == first.tiles;
            }
            tiles += Lanes::sum(own.tiles);
            longest_ = Lanes::highest(own.top > longest_ ? own.top : longest_);
            shortest_ = Lanes::lowest(own.tiles && own.bottom < shortest_ ? own.bottom : shortest_);
            // A sum that is cut is one of tiles that are divided anyway.
            total_ += Lanes::sum(least(own.kv_tiles(), 1 << 25));
            if (int64_t(tiles) * batch_.heads > room_) return false;
        }
        alike_ = Lanes::lowest(same) != 0;
        tiles_ = tiles * batch_.heads;
        total_ *= float(batch_.heads);
        return tiles > 0 && longest_ > 1;
    }

    // Whether an even division would end earlier. Most launches have their answer here.
    __host__ __device__ bool may_gain() const {
        const float even = total_ / float(ctas_) + kItemCost + combine_cost();
        return whole() * kWorthwhile > even;
    }

    // Whether asking the lengths on the device is predicted to pay, by what the host knows: this
    // batch is as long in all, of requests which are alike, and the longest query tile has no more
    // than so many KV tiles.
    bool is_worth_asking(int longest) {
        count();
        longest_ = longest;
        const float whole = (float(longest) + kItemCost) * kWorthwhile;
        const int most = least(longest, kMostSplits);
        for (int splits = 2; splits <= most; splits++) {
            const int length = ceil_of(longest, splits);
            const float items = fmaxf(total_ / float(length), float(tiles_));
            if (predicted(length) + kAskCostOfItem * items < whole) return true;
        }
        return false;
    }

    // Chooses the best number of splits.
    __host__ __device__ bool choose() {
        float best = whole() * kWorthwhile;
        int splits = 1;
        // With more, there would be no place for their partial results.
        const float room = float(room_) * float(longest_) / total_;
        const int most = least(longest_, room < float(kMostSplits) ? int(room) + 1 : kMostSplits);
#pragma unroll 1
        for (int candidate = Lanes::own() + 2; candidate <= most; candidate += Lanes::kCount) {
            const float time = predicted(ceil_of(longest_, candidate));
            if (time < best) best = time, splits = candidate;
        }
        // Positive numbers are in the order of their bits.
        int bits;
        memcpy(&bits, &best, sizeof bits);
        const int lowest = Lanes::lowest(bits);
        splits = Lanes::lowest(bits == lowest ? splits : kMostSplits);
        length_ = ceil_of(longest_, splits);
        return splits > 1;
    }

    // The item of an index. After rewind(), the index rises from call to call.
    __host__ __device__ Item find(int index) {
        Item item = {};
        item.request = -1;
        int lane = 0;
        if (of_alike_ > 0) {
            const int request = unsigned(index) / unsigned(of_alike_);
            if (request >= batch_.requests) return item;
            item.request = request;
            item.query_start = request * batch_.max_query_len;
            item.query_len = batch_.max_query_len;
            item.key_start = request * batch_.max_key_len;
            item.key_len = batch_.max_key_len;
        } else {
            while (index - before_ >= of_chunk_) {
                if (chunk_ + Lanes::kCount >= batch_.requests) return item;
                before_ += of_chunk_;
                enter(chunk_ + Lanes::kCount);
            }
            lane = Lanes::first(index - before_ < running_);
            item.request = chunk_ + lane;
            item.query_start = batch_.cu_q[item.request];
            item.query_len = batch_.cu_q[item.request + 1] - item.query_start;
            item.key_start = batch_.cu_k[item.request];
            item.key_len = batch_.cu_k[item.request + 1] - item.key_start;
        }
        const int tiles = tiles_of(item.query_len);
        const int top = kv_tiles(item.query_len, item.key_len, tiles - 1);
        const int most = splits_of(top), length = ceil_of(top, most);
        const int per_head = tiles * most;
        const int first = of_alike_ > 0
                              ? item.request * of_alike_
                              : before_ + Lanes::of(running_, lane) - batch_.heads * per_head;
        const int of_request = index - first;
        item.head = unsigned(of_request) / unsigned(per_head);
        const int of_head = of_request - item.head * per_head;
        item.split = unsigned(of_head) / unsigned(tiles);
        const int tile = tiles - 1 - (of_head - item.split * tiles);
        item.query = tile * kQueries;
        item.first_slot = first + (item.head * tiles + tile) * most;
        const int visible = kv_tiles(item.query_len, item.key_len, tile);
        item.splits = visible > 0 ? ceil_of(visible, length) : 1;
        item.begin = least(item.split * length, visible);
        item.end = least(item.begin + length, visible);
        return item;
    }

    // Lets find() begin anew.
    __host__ __device__ void rewind() {
        if (of_alike_ > 0) return;
        before_ = 0;
        enter(0);
    }

    // Items, void ones included: one behind the last index.
    __host__ __device__ int items() const {
        if (of_alike_ > 0) return batch_.requests * of_alike_;
        int items = 0;
        for (int at = Lanes::own(); at < batch_.requests; at += Lanes::kCount) {
            items += items_of(request(at));
        }
        return Lanes::sum(items);
    }

  private:
    struct Request {
        // Query tiles, and the KV tiles of the last and of the first.
        int tiles, top, bottom;

        // Of all query tiles of a head, which see ever more of them where keys are hidden.
        __host__ __device__ int64_t kv_tiles() const {
            return int64_t(tiles) * (int64_t(top) + bottom) / 2;
        }
    };

    __host__ __device__ static int least(int64_t a, int b) { return a < b ? int(a) : b; }

    __host__ __device__ int tiles_of(int query_len) const {
        return least((query_len + kQueries - 1) / kQueries, batch_.levels);
    }

    __host__ __device__ int kv_tiles(int query_len, int key_len, int tile) const {
        return visible_kv_tiles<keys>(batch_.causal, tile * kQueries, query_len, key_len);
    }

    // Without any tile behind the last request.
    __host__ __device__ Request request(int at) const {
        Request r = {};
        if (at >= batch_.requests) return r;
        const int query_len = batch_.cu_q[at + 1] - batch_.cu_q[at];
        const int key_len = batch_.cu_k[at + 1] - batch_.cu_k[at];
        r.tiles = tiles_of(query_len);
        if (r.tiles == 0) return r;
        r.top = kv_tiles(query_len, key_len, r.tiles - 1);
        r.bottom = kv_tiles(query_len, key_len, 0);
        return r;
    }

    // Splits of a query tile of so many KV tiles.
    __host__ __device__ int splits_of(int kv_tiles) const {
        return kv_tiles > 0 ? ceil_of(kv_tiles, length_) : 1;
    }

    __host__ __device__ int items_of(const Request& r) const {
        return r.tiles ? batch_.heads * r.tiles * splits_of(r.top) : 0;
    }

    // Goes to the requests of which each lane has one.
    __host__ __device__ void enter(int chunk) {
        chunk_ = chunk;
        running_ = Lanes::running_sum(items_of(request(chunk + Lanes::own())));
        of_chunk_ = Lanes::of(running_, Lanes::kCount - 1);
    }

    // In KV tiles, before when the last query tile cannot end if they are not divided: the longest
    // one, all of them, and as many of the shortest as some CTA has.
    __host__ __device__ float whole() const {
        const float alone = float(longest_) + kItemCost;
        const float even = (total_ + kItemCost * float(tiles_)) / float(ctas_);
        const float waves = float(ceil_of(tiles_, ctas_)) * (float(shortest_) + kItemCost);
        return fmaxf(alone, fmaxf(even, waves));
    }

    // Of any number of splits.
    __host__ __device__ float combine_cost() const {
        return kCombineCost + kCombineCostOfRows / kQueries * float(batch_.rows());
    }

    // By when the last one is combined if none of them has splits of more than `length`.
    __host__ __device__ float predicted(int length) const {
        const float factor = 1.f / float(length);
        float items = 0.f, slots = 0.f;
#pragma unroll 1
        for (int at = 0; at < batch_.requests; at++) {
            const Request r = request(at);
            const float tiles = float(r.tiles);
            // Exact as long as KV tiles are fewer than 2^20.
            const float splits = r.top > 0 ? ceilf((float(r.top) - 0.5f) * factor) : 1.f;
            slots += tiles * splits;
            items += tiles * fminf(splits, 0.5f * float(r.top + r.bottom) * factor + 1.f);
            if (alike_) break;
        }
        const float times = float(alike_ ? batch_.heads * batch_.requests : batch_.heads);
        slots *= times;
        items *= times;
        if (slots > float(room_)) return 1e30f;
        // Void items take no KV tiles, but the places of others in a wave.
        return ceilf(items / float(ctas_)) * float(length) +
               ceilf(slots / float(ctas_)) * kItemCost + combine_cost() +
               kCombineCostOfSplit * float(longest_) * factor;
    }

    Lengths batch_;
    int ctas_, room_;
    // KV tiles of the longest and the shortest query tile, and of a split at most; all query tiles
    // and KV tiles; whether all requests are alike.
    int longest_ = 0, shortest_ = 0, length_ = 1, tiles_ = 0;
    float total_ = 0.f;
    bool alike_ = false;
    // Items of a request where requests are as long as the bounds say; 0: their lengths are read.
    int of_alike_ = 0;
    // The requests at hand: the first one, the items before it, the items up to each lane's request
    // and of all of them.
    int chunk_ = 0, before_ = 0, running_ = 0, of_chunk_ = 0;
};

// A batch of one request with so many heads. `query_starts`, `key_starts`: 0 and its lengths.
inline Lengths one_request(const KernelParams& k, int heads, const int* query_starts,
                           const int* key_starts) {
    Lengths one(k);
    one.cu_q = query_starts;
    one.cu_k = key_starts;
    one.requests = 1;
    one.heads = heads;
    return one;
}

// Whether the launch has to be of the kernel that may divide the keys of query tiles: asking the
// lengths takes it some time. If a graph is replayed they may be shorter than said here, which
// costs time at most. Where requests are alike the length of a split is chosen here.
template <int keys>
bool may_divide(const MlaPrefillParams& p, KernelParams& k, int ctas) {
    // With fewer KV tiles combining takes longer than what dividing saves, and so many query tiles
    // have no room.
    if (p.max_key_len <= 5 * keys || int64_t(p.query_tokens / kQueries) * p.heads > k.slots)
        return false;
    const bool alike = are_said_alike(p);
    // If each query tile has a CTA of its own the longest one is the end.
    const int64_t rows = p.query_tokens + int64_t(p.requests) * (kQueries - 1);
    if (!alike && rows / kQueries * p.heads > ctas) return true;
    if (int64_t(p.requests) * p.heads > k.slots) return false;
    // As many heads of one request come to the same as requests which are alike. Others are taken
    // to be so, of their mean length.
    const int query[2] = {0, alike ? p.max_query_len : ceil_of(p.query_tokens, p.requests)};
    const int key[2] = {0, alike ? p.max_key_len : ceil_of(p.key_tokens, p.requests)};
    Division<keys> division(one_request(k, p.heads * p.requests, query, key), ctas, k.slots);
    if (!alike) return division.is_worth_asking(ceil_of(p.max_key_len, keys));
    if (!division.divide()) return false;
    k.split_length = division.length();
    return true;
}

}  // namespace mla::sm90::prefill
