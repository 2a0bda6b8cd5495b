// Split plan: divides the keys of few query tiles among CTAs.
//
// If query tiles do not fill the GPU, the KV tiles of each are divided into splits of about equal
// length. Work items are (request, head, split, query tile), in this order:
//
//     for request: for head: for split from the first keys on: for query tile from the last one up
//
// (under causal masking, with the last splits beside the first ones, see Head). All query tiles of
// a head thus go through the same keys at the same time, and L2 holds these. All query tiles of a
// request have splits of the same length; under causal masking the upper tiles see fewer keys, and
// their last splits are shorter or empty. The output of a query tile with one split is stored
// directly. The splits of other query tiles store partial results in the workspace, which are
// combined in the order of the splits, whichever CTAs computed them.
//
// The number of splits of the longest query tile is the one of 1 to 128 with the earliest predicted
// end (`predicted`); 1 leaves the order to scheduler.cuh. If there are many query tiles, and few of
// them are long, only some of these numbers are tried. Everything follows from the lengths on the
// device. One warp computes it, or a thread on the host (mla_prefill_sm90_work_items).
//
// If results must not depend on the batch (`alone` of KernelParams), each request is divided as if
// it were alone. Its query tiles have as many splits as fill the device in one wave, but no more
// than there are multiples of Costs::kAloneKeys keys. The host then launches as many requests at a
// time as have slots (for_each_launch).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../../common/lanes.cuh"
#ifdef __CUDACC__
#include "../../ptx/sm90.cuh"
#endif
#include "config.cuh"
#include "lengths.cuh"
#include "params.cuh"
#include "work_item.cuh"

namespace mla::sm90::prefill {

__host__ __device__ inline int ceil_of(int a, int b) {
    return int((unsigned(a) + unsigned(b) - 1) / unsigned(b));
}

// 1 / x, in one instruction on the device.
__host__ __device__ inline float reciprocal(float x) {
#ifdef __CUDA_ARCH__
    return ptx::rcp_approx(x);
#else
    return 1.f / x;
#endif
}

// Exact division of an integer below 2^20 by another one, n. An integer division takes 20 to 30
// instructions, and on the way to the first tile each of them is fetched for a single use. The
// result is exact because the quotient, before it is rounded, is at least 0.5 / n away from any
// integer.
struct Divisor {
    float reciprocal_;

    __host__ __device__ explicit Divisor(int n) : reciprocal_(reciprocal(float(n))) {}
    __host__ __device__ int floor(int a) const { return int((float(a) + 0.5f) * reciprocal_); }
    __host__ __device__ float ceil(float a) const { return ceilf((a - 0.5f) * reciprocal_); }
    __host__ __device__ int ceil(int a) const { return int(ceil(float(a))); }
};

template <int keys>
class SplitPlan {
  public:
    // `ctas`: CTAs of the launch. `room`: number of partial results that the workspace has slots
    // for.
    __host__ __device__ SplitPlan(const Lengths& batch, int ctas, int room)
        : batch_(batch), ctas_(ctas), room_(room) {}

    // The same for requests that are equally long by the host's numbers; the items of a head are in
    // rows (see Head).
    static SplitPlan in_rows(const Lengths& batch, int ctas, int room, int length = 1) {
        SplitPlan plan(batch, ctas, room);
        plan.in_rows_ = true;
        plan.length_ = length;
        return plan;
    }

    // Issues the loads of the first requests' lengths, one request for each lane. They stay in
    // flight until plan_splits(), or the caller of starts(), uses them.
    __host__ __device__ void load_lengths() { read(0); }

    // Numbers of query and key rows before the lane's request; for the first requests, one for each
    // lane.
    __host__ __device__ int2 starts() const { return make_int2(own_.query_start, own_.key_start); }

    // Chooses the length of a split. Returns false if query tiles have no splits.
    __host__ __device__ bool plan_splits() { return count() && may_gain() && choose(); }

    // Divides each request as if it were alone; a request of one query tile has up to `alone`
    // splits. Returns false if no query tile has splits.
    __host__ __device__ bool divide_alone(int alone) {
        length_ = -alone;
        bool whole = true;
        for (int begin = 0;;) {
            const Request own = request();
            whole = whole && splits_of(own.top, own.tiles) == 1;
            begin += Lanes::kCount;
            if (begin >= batch_.requests) return !Lanes::all(whole);
            read(begin);
        }
    }

    // Maximum number of KV tiles of a split.
    __host__ __device__ int length() const { return length_; }

    // The items of requests that are all as long as the bounds, divided into splits of the chosen
    // length.
    UniformItems uniform_items() const {
        const int query_len = batch_.max_query_len, key_len = batch_.max_key_len;
        const int tiles = batch_.max_request_tiles,
                  splits = splits_of(kv_tiles(query_len, key_len, tiles - 1), tiles);
        const Head head = head_of(query_len, key_len, splits, length_);
        UniformItems items;
        items.request = {batch_.heads * head.items};
        items.head = {head.items};
        items.row = {head.width};
        items.length = {length_};
        items.tiles = head.tiles;
        items.splits = head.splits;
        return items;
    }

    // Adopts these items. Lengths are no longer read then.
    __host__ __device__ void use_uniform(const UniformItems& items) {
        length_ = items.length.divisor;
        items_of_uniform_ = items.request.divisor;
        slots_of_uniform_ = batch_.heads * items.tiles * items.splits;
    }

    // Undoes use_uniform(): items follow from the lengths again.
    __host__ __device__ void use_lengths() { items_of_uniform_ = 0; }

    // Counts query tiles and KV tiles. Returns false if there is nothing to split.
    __host__ __device__ bool count() {
        int tiles = 0;
        longest_ = 0;
        shortest_ = INT32_MAX;
        total_ = 0.f;
        uniform_ = true;
        const int query_len = Lanes::of(own_.query_len(), 0),
                  key_len = Lanes::of(own_.key_len(), 0);
#pragma unroll 1
        for (int begin = 0;;) {
            const Request own = request();
            uniform_ = uniform_ &&
                       Lanes::all(begin + Lanes::own() >= batch_.requests ||
                                  (own_.query_len() == query_len && own_.key_len() == key_len));
            tiles += Lanes::sum(own.tiles);
            longest_ = Lanes::highest(own.top > longest_ ? own.top : longest_);
            shortest_ = Lanes::lowest(own.tiles && own.bottom < shortest_ ? own.bottom : shortest_);
            // A sum so large that it is cut belongs to tiles that are divided anyway.
            total_ += float(Lanes::sum(int(fminf(float(own.tiles) * own.mean, float(1 << 25)))));
            begin += Lanes::kCount;
            if (begin >= batch_.requests) break;
            read(begin);
        }
        tiles_ = tiles * batch_.heads;
        total_ *= float(batch_.heads);
        return tiles > 0 && longest_ > 1 &&
               (!is_many() || is_countable(batch_.heads, batch_.max_request_tiles));
    }

    // True if Divisor can divide the index of any item of a request.
    __host__ __device__ static bool is_countable(int heads, int max_request_tiles) {
        return int64_t(heads) * max_request_tiles <= (1 << 20) / kMaxSplits;
    }

    // True if an even division would end earlier. This decides nearly all launches.
    __host__ __device__ bool may_gain() const {
        const float even = total_ * per_cta() + Costs::kItem + combine_cost() +
                           (is_many() ? Costs::kRequest * float(batch_.requests) : 0.f);
        return unsplit_time() * Costs::kWorthwhile > even;
    }

    // Called on the host, which knows only the total lengths: predicts whether it pays that the
    // device reads the lengths. This batch has the same total lengths, in requests of equal
    // lengths, and the longest query tile has at most `longest` KV tiles.
    bool pays_to_read_lengths(int longest) {
        load_lengths();
        count();
        longest_ = longest;
        const float unsplit = (float(longest) + Costs::kItem) * Costs::kWorthwhile;
        const int max_splits = min_of(longest, kMaxSplits);
        for (int splits = 2; splits <= max_splits; splits++) {
            const int length = ceil_of(longest, splits);
            const float items = fmaxf(total_ / float(length), float(tiles_));
            if (predicted(length).end + Costs::kReadLengthsItem * items < unsplit) return true;
        }
        return false;
    }

    // Chooses the best number of splits.
    __host__ __device__ bool choose() {
        const float unsplit = unsplit_time() * Costs::kWorthwhile;
        float best = 1e30f;
        int splits = 1;
        if (is_many()) {
            // 2, 3, 4, 5, 6, 7, 8, 10, ... 128: one for each lane.
#pragma unroll 1
            for (int first = 0; first < Costs::kNumbersTried; first += Lanes::kCount) {
                const int number = first + Lanes::own();
                consider(((4 + number % 4) << number / 4) / 2, unsplit, best, splits);
            }
        } else {
            // With more splits than these, the KV tiles of a split would be fewer than all KV tiles
            // divided by the slots for partial results, and slots would not suffice.
            const float room = float(room_) * float(longest_) * reciprocal(total_);
            const int max_splits =
                min_of(longest_, room < float(kMaxSplits) ? int(room) + 1 : kMaxSplits);
#pragma unroll 1
            for (int first = 2; first <= max_splits; first += Lanes::kCount)
                consider(min_of(first + Lanes::own(), max_splits), unsplit, best, splits);
        }
        // The bits of positive floats are ordered as their values are.
        int bits;
        memcpy(&bits, &best, sizeof bits);
        const int lowest = Lanes::lowest(bits);
        splits = Lanes::lowest(bits == lowest ? splits : kMaxSplits);
        length_ = Divisor(splits).ceil(longest_);
        return splits > 1;
    }

    // The item at `index`. After rewind(), the index rises from call to call. `by`: the argument of
    // use_uniform(), if that was called.
    __host__ __device__ WorkItem find(int index, const UniformItems& by) {
        return items_of_uniform_ > 0 ? find_uniform(index, by) : find_by_lengths(index);
    }

    // The same if use_uniform() was called last.
    __host__ __device__ WorkItem find_uniform(int index, const UniformItems& by) const {
        WorkItem item = {};
        item.request = by.request.div(index);
        if (item.request >= batch_.requests) {
            item.request = -1;
            return item;
        }
        item.query_start = item.request * batch_.max_query_len;
        item.query_len = batch_.max_query_len;
        item.key_start = item.request * batch_.max_key_len;
        item.key_len = batch_.max_key_len;
        const int of_request = index - item.request * by.request.divisor;
        item.head = by.head.div(of_request);
        const int of_head = of_request - item.head * by.head.divisor;
        item.split = by.row.div(of_head);
        int column = of_head - item.split * by.row.divisor;
        const Head head = {by.tiles, by.splits, length_, by.row.divisor, by.head.divisor};
        const auto see = [&](int split) {
            return seeing(item.query_len, item.key_len, head, split);
        };
        if (head.is_folded() && column >= see(item.split)) {
            const int other = head.splits - 1 - item.split;
            column -= see(item.split);
            // The item is empty.
            if (other <= item.split || column >= see(other)) {
                item.split = item.splits = 1;
                return item;
            }
            item.split = other;
        }
        const int tile = head.tiles - 1 - column;
        const int visible = kv_tiles(item.query_len, item.key_len, tile);
        item.splits = visible > 0 ? by.length.div(visible + length_ - 1) : 1;
        item.first_slot = item.request * slots_of_uniform_;
        return cut(item, head, tile, visible);
    }

    // Lets find() start anew.
    __host__ __device__ void rewind() {
        if (items_of_uniform_ > 0) return;
        before_ = {};
        if (chunk_ != 0) read(0);
        enter();
    }

    // Number of slots for partial results: one more than the last slot.
    __host__ __device__ int slots() {
        if (items_of_uniform_ > 0) return batch_.requests * slots_of_uniform_;
        if (batch_.requests <= Lanes::kCount) return of_chunk_.slots;
        int slots = 0;
        for (int at = 0; at < batch_.requests; at += Lanes::kCount) {
            read(at);
            slots += Lanes::sum(counts_of(request()).slots);
        }
        return slots;
    }

  private:
    // The items of one head of a request, in rows of `width` items. Row r holds split r of the
    // query tiles that see it, from the last tile up. Behind these, under causal masking, it holds
    // split `splits - 1 - r` of the tiles that see that split. The fewer tiles see one of the two
    // splits, the more see the other, so few items of a row are empty. A middle split has the last
    // row for itself.
    struct Head {
        int tiles, splits, length, width, items;
        __host__ __device__ bool is_folded() const { return width > tiles; }
        __host__ __device__ int slots() const { return tiles * splits; }
    };

    // Number of query tiles that see keys of a split. All tiles count for the first split.
    __host__ __device__ int seeing(int query_len, int key_len, const Head& head, int split) const {
        if (!batch_.causal || split == 0) return head.tiles;
        const int hidden = (split * head.length * keys + query_len - key_len) >> kQueriesLog2;
        return hidden > 0 ? head.tiles - hidden : head.tiles;
    }

    // Items of a head with splits of `length` KV tiles, `splits` of them for the last query tile.
    __host__ __device__ Head head_of(int query_len, int key_len, int splits, int length) const {
        const int tiles = tiles_of(query_len);
        Head head = {tiles, splits, length, tiles, tiles * splits};
        if (!batch_.causal || splits == 1 || tiles == 1) return head;
        const auto see = [&](int split) { return seeing(query_len, key_len, head, split); };
        // The middle rows are the widest, up to what rounding adds; but the first split belongs to
        // tiles that see nothing, too.
        const int half = splits / 2, rounding = length * keys % kQueries != 0;
        const int middle = see(half - 1) + see(splits - half) + rounding;
        const int first = tiles + see(splits - 1), width = middle > first ? middle : first;
        const int items = half * width + (splits % 2 ? see(half) : 0);
        if (width > tiles && items < head.items) head.width = width, head.items = items;
        return head;
    }

    __host__ __device__ WorkItem find_by_lengths(int index) {
        WorkItem item = {};
        item.request = -1;
        while (index - before_.items >= of_chunk_.items) {
            if (chunk_ + Lanes::kCount >= batch_.requests) return item;
            before_ = {before_.items + of_chunk_.items, before_.slots + of_chunk_.slots};
            read(chunk_ + Lanes::kCount);
            enter();
        }
        const int lane = Lanes::first(index - before_.items < running_.items);
        const auto of_lane = [&](int x) { return Lanes::of(x, lane); };
        item.request = chunk_ + lane;
        item.query_start = of_lane(own_.query_start);
        item.query_len = of_lane(own_.query_end) - item.query_start;
        item.key_start = of_lane(own_.key_start);
        item.key_len = of_lane(own_.key_end) - item.key_start;
        const int tiles = tiles_of(item.query_len);
        const int top = kv_tiles(item.query_len, item.key_len, tiles - 1);
        const int max_splits = splits_of(top, tiles), length = Divisor(max_splits).ceil(top);
        const int per_head = tiles * max_splits, own = batch_.heads * per_head;
        item.first_slot = before_.slots + of_lane(running_.slots) - own;
        const int of_request = index - (before_.items + of_lane(running_.items) - own);
        item.head = Divisor(per_head).floor(of_request);
        const int of_head = of_request - item.head * per_head;
        item.split = Divisor(tiles).floor(of_head);
        const int tile = tiles - 1 - (of_head - item.split * tiles);
        const int visible = kv_tiles(item.query_len, item.key_len, tile);
        item.splits = visible > 0 ? Divisor(length).ceil(visible) : 1;
        return cut(item, {tiles, max_splits, length, tiles, per_head}, tile, visible);
    }

    // Completes the item: its split of query tile `tile`, which sees `visible` KV tiles.
    __host__ __device__ static WorkItem cut(WorkItem item, const Head& head, int tile,
                                            int visible) {
        item.query = tile * kQueries;
        item.first_slot += (item.head * head.tiles + tile) * head.splits;
        item.begin = min_of(item.split * head.length, visible);
        item.end = min_of(item.begin + head.length, visible);
        return item;
    }

    struct Request {
        // Number of query tiles; KV tiles of the last query tile, of the first, and on average.
        // Under causal masking they grow from the first query tile to the last.
        int tiles, top, bottom;
        float mean;
    };

    // First and last query and key rows of the lane's request among the current ones.
    struct Rows {
        int query_start, query_end, key_start, key_end;

        __host__ __device__ int query_len() const { return query_end - query_start; }
        __host__ __device__ int key_len() const { return key_end - key_start; }
    };

    __host__ __device__ static int min_of(int a, int b) { return a < b ? a : b; }

    __host__ __device__ int tiles_of(int query_len) const {
        return min_of((unsigned(query_len) + kQueries - 1) / kQueries, batch_.max_request_tiles);
    }

    __host__ __device__ int kv_tiles(int query_len, int key_len, int tile) const {
        return visible_kv_tiles<keys>(batch_.causal, tile * kQueries, query_len, key_len);
    }

    // Issues loads of the requests from `chunk` on, one for each lane. Lanes behind the last
    // request get empty ones.
    __host__ __device__ void read(int chunk) {
        chunk_ = chunk;
        const int at = min_of(chunk + Lanes::own(), batch_.requests),
                  next = min_of(at + 1, batch_.requests);
        own_ = {batch_.cu_q[at], batch_.cu_q[next], batch_.cu_k[at], batch_.cu_k[next]};
    }

    // The lane's request; it has no query tiles if it has no query rows.
    __host__ __device__ Request request() const {
        const int query_len = own_.query_len(), tiles = tiles_of(query_len),
                  key_len = tiles > 0 ? own_.key_len() : 0;
        const int top = kv_tiles(query_len, key_len, tiles - 1),
                  bottom = kv_tiles(query_len, key_len, 0);
        return {tiles, top, bottom, 0.5f * float(top + bottom)};
    }

    // Number of splits of a query tile of `kv_tiles` KV tiles, in a request of `tiles` query tiles.
    __host__ __device__ int splits_of(int kv_tiles, int tiles) const {
        if (kv_tiles <= 0) return 1;
        if (length_ > 0) return Divisor(length_).ceil(kv_tiles);
        const int splits = min_of(Divisor(Costs::kAloneKeys / keys).ceil(kv_tiles), kMaxSplits);
        return 2 * tiles > -length_ ? 1 : min_of(splits, Divisor(tiles).floor(-length_));
    }

    // Number of items, and of slots for partial results; query tiles of one split need no slot.
    struct Counts {
        int items, slots;
    };

    __host__ __device__ Counts counts_of(const Request& r) const {
        const int splits = splits_of(r.top, r.tiles), items = batch_.heads * r.tiles * splits;
        return {items, splits > 1 ? items : 0};
    }

    // Enters the current chunk of requests.
    __host__ __device__ void enter() {
        const Counts own = counts_of(request());
        running_ = {Lanes::running_sum(own.items), Lanes::running_sum(own.slots)};
        of_chunk_ = {Lanes::last(running_.items), Lanes::last(running_.slots)};
    }

    // True if there are so many query tiles that not all of them could have a partial result.
    __host__ __device__ bool is_many() const { return tiles_ > room_; }

    // Without splits, the last query tile cannot end before this time, in KV tiles: the maximum of
    // the longest query tile, of the mean per CTA, and of the shortest query tile times the number
    // of query tiles that some CTA gets.
    __host__ __device__ float unsplit_time() const {
        const float alone = float(longest_) + Costs::kItem;
        const float even = (total_ + Costs::kItem * float(tiles_)) * per_cta();
        const float waves = waves_of(float(tiles_)) * (float(shortest_) + Costs::kItem);
        return fmaxf(alone, fmaxf(even, waves));
    }

    __host__ __device__ float per_cta() const { return reciprocal(float(ctas_)); }
    // Number of waves of `items` items. Since some items are counted by halves or less, a rest that
    // is due to rounding is no wave.
    __host__ __device__ float waves_of(float items) const {
        return ceilf((items - 0.01f) * per_cta());
    }

    // Cost of the combine for any number of splits.
    __host__ __device__ float combine_cost() const {
        return Costs::kCombine + Costs::kCombineRows / kQueries * float(batch_.rows());
    }

    // Chooses `candidate` splits if they are predicted to end earlier than the best number so far,
    // and than without splits.
    __host__ __device__ void consider(int candidate, float unsplit, float& best, int& splits) {
        // The cost of items counts if they are in rows. If not, the cost of empty items has kept
        // their number small.
        const float rows = in_rows_ ? float(batch_.rows()) / kQueries : 0.f;
        const Prediction of = predicted(Divisor(candidate).ceil(longest_));
        const float time = of.end + Costs::kItemRows * rows * of.begun;
        if (candidate > 1 && candidate <= min_of(longest_, kMaxSplits) && time < best &&
            of.end + Costs::kMinItemRows * rows * of.begun < unsplit)
            best = time, splits = candidate;
    }

    // `end`: when the last query tile is combined if no split is longer than `length`; the costs of
    // items are left out. `begun`: number of items of about that length that begin at the same
    // time.
    struct Prediction {
        float end, begun;
    };
    __host__ __device__ Prediction predicted(int length) {
        const float factor = reciprocal(float(length));
        // `places` counts the items of requests whose longest query tile is longer than half of
        // `length`, and `items` those of them that are not empty. An empty item has no KV tiles,
        // but it keeps a CTA from another item in its wave. `short_items` counts the query tiles of
        // the other requests, and `short_work` their KV tiles.
        float places = 0.f, items = 0.f, short_items = 0.f, short_work = 0.f;
#pragma unroll 1
        for (int begin = 0; begin < batch_.requests; begin += Lanes::kCount) {
            if (begin != chunk_) read(begin);
            const Request own = request();
            const float tiles = float(own.tiles), last = float(own.top) - 0.5f;
            const int count = uniform_ ? 1 : min_of(batch_.requests - begin, Lanes::kCount);
#pragma unroll 1
            for (int lane = 0; lane < count; lane++) {
                const float times = Lanes::of(tiles, lane), mean = Lanes::of(own.mean, lane);
                const float of_length = Lanes::of(last, lane) * factor;
                if (of_length > 0.5f) {
                    // Exact for fewer than 2^20 KV tiles.
                    const float splits = ceilf(of_length);
                    places += times * splits;
                    items += times * fminf(splits, mean * factor + 1.f);
                } else {
                    short_items += times;
                    short_work += times * mean;
                }
            }
            if (uniform_) break;
        }
        if (in_rows_) {
            const int query_len = batch_.cu_q[1] - batch_.cu_q[0],
                      key_len = batch_.cu_k[1] - batch_.cu_k[0];
            const int top = kv_tiles(query_len, key_len, tiles_of(query_len) - 1),
                      splits = top > 0 ? ceil_of(top, length) : 1;
            items = places = float(head_of(query_len, key_len, splits, length).items);
        }
        const float times = float(uniform_ ? batch_.heads * batch_.requests : batch_.heads);
        items *= times;
        if (places * times > float(room_)) return {1e30f, 0.f};
        const float item = float(length) + Costs::kItem, all = (places + short_items) * times;
        // If query tiles are many: all work, shared evenly, and then one item, which begins when no
        // CTA is free of work.
        float end =
            (total_ + Costs::kItem * all) * per_cta() + item +
            Costs::kRequest * float(batch_.requests);
        if (!is_many()) {
            end = waves_of(items) * float(length) + waves_of(places * times) * Costs::kItem;
            // After these waves, the short items, which all CTAs share until the last one ends.
            if (all > float(ctas_)) {
                const float work = (short_work + Costs::kItem * short_items) * times;
                if (work > 0.f) end += work * per_cta() + 0.5f * item;
            }
        }
        return {end + combine_cost() + Costs::kCombineSplit * float(longest_) * factor,
                fminf(items, float(ctas_))};
    }

    Lengths batch_;
    int ctas_, room_;
    // Numbers of KV tiles: of the longest query tile, of the shortest one, and of a split at most.
    // The last is negative if requests are divided as if each were alone: minus the maximum number
    // of splits of a request of one query tile. It is in the same register, as there is no other.
    // Then the number of all query tiles, and of all their KV tiles. `uniform_` is true if all
    // requests are equally long.
    int longest_ = 0, shortest_ = 0, length_ = 1, tiles_ = 0;
    float total_ = 0.f;
    bool uniform_ = false, in_rows_ = false;
    // Items and slots of a request if all requests are as long as the bounds; 0 if their lengths
    // are read.
    int items_of_uniform_ = 0, slots_of_uniform_ = 0;
    // The current chunk of requests. `chunk_` is the index of its first request, and `own_` has the
    // rows of this lane's request. `before_` has the totals of all requests before the chunk,
    // `running_` those of the chunk's requests up to this lane's, and `of_chunk_` those of the
    // whole chunk.
    int chunk_ = 0;
    Rows own_;
    Counts before_ = {}, running_ = {}, of_chunk_ = {};
};

// A batch of one request with `heads` heads. `query_starts`, `key_starts`: 0 and its lengths.
inline Lengths one_request(const KernelParams& k, int heads, const int* query_starts,
                           const int* key_starts) {
    Lengths one(k);
    one.cu_q = query_starts;
    one.cu_k = key_starts;
    one.requests = 1;
    one.heads = heads;
    return one;
}

// True if, by what the host knows, the query tiles of a long request may end long after all others,
// although query tiles are many. The device then has to read all lengths. To avoid this more often,
// the estimate of all work is a high one: every request has at least one query tile, and every
// query tile has the KV tiles of a request of mean length.
template <int keys>
bool may_outlast(const MlaPrefillParams& p, const KernelParams& k, int ctas) {
    if (!SplitPlan<keys>::is_countable(p.heads, k.max_request_tiles)) return false;
    const double tiles = fmax(double(p.query_tokens) / kQueries, double(p.requests)) * p.heads;
    const double mean = double(p.key_tokens) / p.requests / keys * (p.causal ? 0.5 : 1.0);
    const double even = tiles * (mean + Costs::kItem) / ctas;
    const double longest = double(p.max_key_len) / keys + Costs::kItem;
    return longest * Costs::kWorthwhile >
           even + Costs::kItem + Costs::kCombine + Costs::kRequest * p.requests;
}

// Calls `launch(own, first)` with the parameters of each launch and its first request. If each
// request is divided as if it were alone, a launch has no more requests than have slots at the same
// time; a request has no more splits than the device has SMs.
template <int keys, typename Launch>
void for_each_launch(const KernelParams& k, const Launch& launch) {
    int most = k.requests;
    if (k.alone) {
        const int splits = ceil_of(ceil_of(k.max_key_len, keys), Costs::kAloneKeys / keys);
        const int64_t of_head = std::min<int64_t>(int64_t(k.max_request_tiles) * splits, k.alone);
        most = int(std::max<int64_t>(k.slots / std::max<int64_t>(of_head * k.heads, 1), 1));
    }
    KernelParams own = k;
    for (int first = 0; first < k.requests; first += own.requests) {
        own.requests = std::min(most, k.requests - first);
        own.swizzle_requests = std::min(k.swizzle_requests, own.requests);
        own.cu_q = k.cu_q + first;
        own.cu_k = k.cu_k + first;
        launch(own, first);
    }
}

// True if the launch needs the kernel that may split the keys of query tiles, which spends some
// time on reading the lengths. The lengths of a replayed graph may be shorter than said here, which
// costs time at most. For requests of equal lengths, chooses the length of a split.
template <int keys>
bool may_split(const MlaPrefillParams& p, KernelParams& k, int ctas) {
    if (p.batch_invariant) {
        const int alone = p.max_key_len > Costs::kAloneKeys / keys * keys ? ctas / p.heads : 0;
        if (alone < 2) return false;
        k.alone = alone;
        // The device reads all lengths: equal ones must be divided like any others.
        k.uniform = false;
        return true;
    }
    if (p.max_key_len <= Costs::kMaxUnsplitKvTiles * keys) return false;
    // The range of Divisor. No device has memory for more.
    if (p.max_key_len > int64_t(keys) << 20) return false;
    const bool uniform = host_says_uniform(p);
    const int64_t tiles = std::max<int64_t>(p.query_tokens / kQueries, p.requests) * p.heads;
    if (tiles > k.slots) return !uniform && may_outlast<keys>(p, k, ctas);
    // The longest query tile determines the end only if each query tile has a CTA of its own.
    const int64_t rows = p.query_tokens + int64_t(p.requests) * (kQueries - 1);
    if (!uniform && rows / kQueries * p.heads > ctas) return true;
    // A batch of equal requests is equivalent to one request with as many heads as all of them
    // have. Other requests are taken to be equal, of their mean length.
    const int query[2] = {0, uniform ? p.max_query_len : ceil_of(p.query_tokens, p.requests)};
    const int key[2] = {0, uniform ? p.max_key_len : ceil_of(p.key_tokens, p.requests)};
    const Lengths one = one_request(k, p.heads * p.requests, query, key);
    if (!uniform)
        return SplitPlan<keys>(one, ctas, k.slots)
            .pays_to_read_lengths(ceil_of(p.max_key_len, keys));
    auto plan = SplitPlan<keys>::in_rows(one, ctas, k.slots);
    plan.load_lengths();
    if (!plan.plan_splits()) return false;
    k.uniform_items =
        SplitPlan<keys>::in_rows(Lengths(k), ctas, k.slots, plan.length()).uniform_items();
    return true;
}

}  // namespace mla::sm90::prefill
