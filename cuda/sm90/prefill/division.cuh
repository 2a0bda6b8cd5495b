// How the keys of few query tiles are divided among CTAs.
//
// Where query tiles do not fill the GPU, the KV tiles of each are divided into splits of about
// equal length, and the items of work are (request, head, split, query tile), in this order:
//
//     for request: for head: for split from the first keys on: for query tile from the last one up
//
// (where keys are hidden, with the last splits beside the first ones, see Head), so that all query
// tiles of a head go through the same keys at the same time, which L2 then holds.
// A split of a request has the same length for all of its query tiles; where keys are hidden from
// the upper ones, their last splits are shorter, or void. A query tile that has one split is stored
// as it is; the splits of others leave partial results in the workspace, which are combined in the
// order of the splits, whoever computed them.
//
// The number of splits of the longest query tile is the one of 1 to 128 for which the end is
// predicted to come first (`predicted`); 1 leaves the order to schedule.cuh. Where query tiles are
// many, but few of them long, it is found among fewer numbers. All of it follows from the lengths on
// the device. One warp does this, or a thread on the host (mla_prefill_sm90_items).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../../common/lanes.cuh"
#ifdef __CUDACC__
#include "../../ptx/sm90.cuh"
#endif
#include "item.cuh"
#include "lengths.cuh"
#include "params.cuh"
#include "tile.cuh"

namespace mla::sm90::prefill {

// What the prediction counts with beside an item's cost, in KV tiles: what combining takes at the
// end, for any number of splits, for all rows of a query tile, and for each split.
constexpr float kCombineCost = 3.f, kCombineCostOfRows = 1.5f, kCombineCostOfSplit = 0.02f;
// Dividing has to promise so much.
constexpr float kWorthwhile = 0.95f;
// The more items there are the later all have begun, and the more partial results are written and
// read: what each adds where the lengths have to be asked, for all rows of a query tile, and at
// least, where as much is gained because more CTAs read at the same time.
constexpr float kAskCostOfItem = 0.034f, kCostOfItemRows = 0.05f, kLeastCostOfItemRows = 0.019f;
// What each request adds where query tiles are many: every CTA goes over all lengths. And the
// numbers of splits that are tried then.
constexpr float kCostOfRequest = 0.05f;
constexpr int kFewNumbers = 25;

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

// Divides numbers below 2^20 by one that is no larger, exactly: a division of integers takes 20 to
// 30 instructions, and on the way to the first tile each is fetched for one use. What is rounded is
// half of 1 / n away from any integer, at least.
struct Divisor {
    float reciprocal_;

    __host__ __device__ explicit Divisor(int n) : reciprocal_(reciprocal(float(n))) {}
    __host__ __device__ int floor(int a) const { return int((float(a) + 0.5f) * reciprocal_); }
    __host__ __device__ float ceil(float a) const { return ceilf((a - 0.5f) * reciprocal_); }
    __host__ __device__ int ceil(int a) const { return int(ceil(float(a))); }
};

template <int keys>
class Division {
  public:
    // `ctas`: those of the launch. `room`: for how many partial results the workspace has a place.
    __host__ __device__ Division(const Lengths& batch, int ctas, int room)
        : batch_(batch), ctas_(ctas), room_(room) {}

    // The same for requests of which the host says that they are alike, where the items of a head
    // are in rows.
    static Division in_rows(const Lengths& batch, int ctas, int room, int length = 1) {
        Division division(batch, ctas, room);
        division.in_rows_ = true;
        division.length_ = length;
        return division;
    }

    // Asks for the lengths of the first requests, one for each lane, which are on their way until
    // divide() or whoever asks for starts() needs them.
    __host__ __device__ void ask() { read(0); }

    // How many query and key rows stand before the lane's request, of the first ones.
    __host__ __device__ int2 starts() const { return make_int2(own_.query_start, own_.key_start); }

    // Chooses the length of a split. False: query tiles are not divided.
    __host__ __device__ bool divide() { return count() && may_gain() && choose(); }

    // KV tiles of a split, at most.
    __host__ __device__ int length() const { return length_; }

    // The items of requests which are all as long as the bounds say, divided into splits of the
    // length that was chosen.
    AlikeItems alike_items() const {
        const int query_len = batch_.max_query_len, key_len = batch_.max_key_len;
        const int splits = splits_of(kv_tiles(query_len, key_len, batch_.levels - 1));
        const Head head = head_of(query_len, key_len, splits, length_);
        AlikeItems items;
        items.request = {batch_.heads * head.items};
        items.head = {head.items};
        items.row = {head.width};
        items.length = {length_};
        items.tiles = head.tiles;
        items.splits = head.splits;
        return items;
    }

    // Takes these items for its own. Lengths are no longer read, then.
    __host__ __device__ void divide_alike(const AlikeItems& items) {
        length_ = items.length.divisor;
        of_alike_ = items.request.divisor;
        slots_of_alike_ = batch_.heads * items.tiles * items.splits;
    }

    // Is no longer of alike requests.
    __host__ __device__ void divide_by_lengths() { of_alike_ = 0; }

    // Counts query tiles and KV tiles. False where there is nothing to divide.
    __host__ __device__ bool count() {
        int tiles = 0;
        longest_ = 0;
        shortest_ = INT32_MAX;
        total_ = 0.f;
        alike_ = true;
        const int query_len = Lanes::of(own_.query_len(), 0),
                  key_len = Lanes::of(own_.key_len(), 0);
#pragma unroll 1
        for (int begin = 0;;) {
            const Request own = request();
            alike_ = alike_ && Lanes::all(begin + Lanes::own() >= batch_.requests ||
                                          (own_.query_len() == query_len &&
                                           own_.key_len() == key_len));
            tiles += Lanes::sum(own.tiles);
            longest_ = Lanes::highest(own.top > longest_ ? own.top : longest_);
            shortest_ = Lanes::lowest(own.tiles && own.bottom < shortest_ ? own.bottom : shortest_);
            // A sum that is cut is one of tiles that are divided anyway.
            total_ += float(Lanes::sum(int(fminf(float(own.tiles) * own.mean, float(1 << 25)))));
            begin += Lanes::kCount;
            if (begin >= batch_.requests) break;
            read(begin);
        }
        tiles_ = tiles * batch_.heads;
        total_ *= float(batch_.heads);
        return tiles > 0 && longest_ > 1 && (!is_many() || is_countable(batch_.heads, batch_.levels));
    }

    // Whether Divisor can divide the number of any item of a request.
    __host__ __device__ static bool is_countable(int heads, int levels) {
        return int64_t(heads) * levels <= (1 << 20) / kMostSplits;
    }

    // Whether an even division would end earlier. Most launches have their answer here.
    __host__ __device__ bool may_gain() const {
        const float even = total_ * per_cta() + kItemCost + combine_cost() +
                           (is_many() ? kCostOfRequest * float(batch_.requests) : 0.f);
        return whole() * kWorthwhile > even;
    }

    // Whether asking the lengths on the device is predicted to pay, by what the host knows: this
    // batch is as long in all, of requests which are alike, and the longest query tile has no more
    // than so many KV tiles.
    bool is_worth_asking(int longest) {
        ask();
        count();
        longest_ = longest;
        const float whole = (float(longest) + kItemCost) * kWorthwhile;
        const int most = least(longest, kMostSplits);
        for (int splits = 2; splits <= most; splits++) {
            const int length = ceil_of(longest, splits);
            const float items = fmaxf(total_ / float(length), float(tiles_));
            if (predicted(length).end + kAskCostOfItem * items < whole) return true;
        }
        return false;
    }

    // Chooses the best number of splits.
    __host__ __device__ bool choose() {
        const float undivided = whole() * kWorthwhile;
        float best = 1e30f;
        int splits = 1;
        if (is_many()) {
            // 2, 3, 4, 5, 6, 7, 8, 10, ... 128: one for each lane.
#pragma unroll 1
            for (int first = 0; first < kFewNumbers; first += Lanes::kCount) {
                const int number = first + Lanes::own();
                consider(((4 + number % 4) << number / 4) / 2, undivided, best, splits);
            }
        } else {
            // With more, splits are shorter than what all CTAs have to do on average.
            const float room = float(room_) * float(longest_) * reciprocal(total_);
            const int most =
                least(longest_, room < float(kMostSplits) ? int(room) + 1 : kMostSplits);
#pragma unroll 1
            for (int first = 2; first <= most; first += Lanes::kCount)
                consider(least(first + Lanes::own(), most), undivided, best, splits);
        }
        // Positive numbers are in the order of their bits.
        int bits;
        memcpy(&bits, &best, sizeof bits);
        const int lowest = Lanes::lowest(bits);
        splits = Lanes::lowest(bits == lowest ? splits : kMostSplits);
        length_ = Divisor(splits).ceil(longest_);
        return splits > 1;
    }

    // The item of an index. After rewind(), the index rises from call to call. `by`: what
    // divide_alike() was given, if it was.
    __host__ __device__ Item find(int index, const AlikeItems& by) {
        return of_alike_ > 0 ? find_alike(index, by) : find_by_lengths(index);
    }

    // The same where divide_alike() was the last word.
    __host__ __device__ Item find_alike(int index, const AlikeItems& by) const {
        Item item = {};
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
            // Void.
            if (other <= item.split || column >= see(other)) {
                item.split = item.splits = 1;
                return item;
            }
            item.split = other;
        }
        const int tile = head.tiles - 1 - column;
        const int visible = kv_tiles(item.query_len, item.key_len, tile);
        item.splits = visible > 0 ? by.length.div(visible + length_ - 1) : 1;
        item.first_slot = item.request * slots_of_alike_;
        return cut(item, head, tile, visible);
    }

    // Lets find() begin anew.
    __host__ __device__ void rewind() {
        if (of_alike_ > 0) return;
        before_ = {};
        if (chunk_ != 0) read(0);
        enter();
    }

    // Places of partial results: one behind the last slot.
    __host__ __device__ int slots() {
        if (of_alike_ > 0) return batch_.requests * slots_of_alike_;
        if (batch_.requests <= Lanes::kCount) return of_chunk_.slots;
        int slots = 0;
        for (int at = 0; at < batch_.requests; at += Lanes::kCount) {
            read(at);
            slots += Lanes::sum(places_of(request()).slots);
        }
        return slots;
    }

  private:
    // The items of one head of a request: rows of `width`, of which row r has split r of the query
    // tiles that see it, from the last one up, and behind these, where keys are hidden from the
    // upper ones, split `splits - 1 - r` of those that see it. The fewer tiles see a split the more
    // see the other, so few items of a row are void. A middle split has the last row for itself.
    struct Head {
        int tiles, splits, length, width, items;
        __host__ __device__ bool is_folded() const { return width > tiles; }
        __host__ __device__ int slots() const { return tiles * splits; }
    };

    // Of the query tiles, how many see keys of a split. The first split is one of all of them.
    __host__ __device__ int seeing(int query_len, int key_len, const Head& head, int split) const {
        if (!batch_.causal || split == 0) return head.tiles;
        const int hidden = (split * head.length * keys + query_len - key_len) >> kQueriesLog2;
        return hidden > 0 ? head.tiles - hidden : head.tiles;
    }

    // Of splits of `length` KV tiles, `splits` for the last query tile.
    __host__ __device__ Head head_of(int query_len, int key_len, int splits, int length) const {
        const int tiles = tiles_of(query_len);
        Head head = {tiles, splits, length, tiles, tiles * splits};
        if (!batch_.causal || splits == 1 || tiles == 1) return head;
        const auto see = [&](int split) { return seeing(query_len, key_len, head, split); };
        // The middle rows are the widest, but for what rounding adds; and a first split is one of
        // tiles that see nothing, too.
        const int half = splits / 2, rounding = length * keys % kQueries != 0;
        const int middle = see(half - 1) + see(splits - half) + rounding;
        const int first = tiles + see(splits - 1), width = middle > first ? middle : first;
        const int items = half * width + (splits % 2 ? see(half) : 0);
        if (width > tiles && items < head.items) head.width = width, head.items = items;
        return head;
    }

    __host__ __device__ Item find_by_lengths(int index) {
        Item item = {};
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
        const int most = splits_of(top), length = Divisor(most).ceil(top);
        const int per_head = tiles * most, own = batch_.heads * per_head;
        item.first_slot = before_.slots + of_lane(running_.slots) - own;
        const int of_request = index - (before_.items + of_lane(running_.items) - own);
        item.head = Divisor(per_head).floor(of_request);
        const int of_head = of_request - item.head * per_head;
        item.split = Divisor(tiles).floor(of_head);
        const int tile = tiles - 1 - (of_head - item.split * tiles);
        const int visible = kv_tiles(item.query_len, item.key_len, tile);
        item.splits = visible > 0 ? Divisor(length).ceil(visible) : 1;
        return cut(item, {tiles, most, length, tiles, per_head}, tile, visible);
    }

    // Of query tile `tile`, with so many KV tiles, the item's split.
    __host__ __device__ static Item cut(Item item, const Head& head, int tile, int visible) {
        item.query = tile * kQueries;
        item.first_slot += (item.head * head.tiles + tile) * head.splits;
        item.begin = least(item.split * head.length, visible);
        item.end = least(item.begin + head.length, visible);
        return item;
    }

    struct Request {
        // Query tiles, the KV tiles of the last of them and of the first, and what they have on
        // average: they see ever more where keys are hidden.
        int tiles, top, bottom;
        float mean;
    };

    // Where a lane's request of those at hand begins and ends.
    struct Rows {
        int query_start, query_end, key_start, key_end;

        __host__ __device__ int query_len() const { return query_end - query_start; }
        __host__ __device__ int key_len() const { return key_end - key_start; }
    };

    __host__ __device__ static int least(int a, int b) { return a < b ? a : b; }

    __host__ __device__ int tiles_of(int query_len) const {
        return least((unsigned(query_len) + kQueries - 1) / kQueries, batch_.levels);
    }

    __host__ __device__ int kv_tiles(int query_len, int key_len, int tile) const {
        return visible_kv_tiles<keys>(batch_.causal, tile * kQueries, query_len, key_len);
    }

    // Asks for the requests from `chunk` on, one for each lane; behind the last one they are empty.
    __host__ __device__ void read(int chunk) {
        chunk_ = chunk;
        const int at = least(chunk + Lanes::own(), batch_.requests),
                  next = least(at + 1, batch_.requests);
        own_ = {batch_.cu_q[at], batch_.cu_q[next], batch_.cu_k[at], batch_.cu_k[next]};
    }

    // Without any tile where it has no rows.
    __host__ __device__ Request request() const {
        const int query_len = own_.query_len(), tiles = tiles_of(query_len),
                  key_len = tiles > 0 ? own_.key_len() : 0;
        const int top = kv_tiles(query_len, key_len, tiles - 1),
                  bottom = kv_tiles(query_len, key_len, 0);
        return {tiles, top, bottom, 0.5f * float(top + bottom)};
    }

    // Splits of a query tile of so many KV tiles.
    __host__ __device__ int splits_of(int kv_tiles) const {
        return kv_tiles > 0 ? Divisor(length_).ceil(kv_tiles) : 1;
    }

    // How many items there are, and how many places of partial results: query tiles of one split
    // leave none.
    struct Places {
        int items, slots;
    };

    __host__ __device__ Places places_of(const Request& r) const {
        const int splits = splits_of(r.top), items = batch_.heads * r.tiles * splits;
        return {items, splits > 1 ? items : 0};
    }

    // Goes to the requests at hand.
    __host__ __device__ void enter() {
        const Places own = places_of(request());
        running_ = {Lanes::running_sum(own.items), Lanes::running_sum(own.slots)};
        of_chunk_ = {Lanes::last(running_.items), Lanes::last(running_.slots)};
    }

    // Whether query tiles are so many that not all of them could have a partial result.
    __host__ __device__ bool is_many() const { return tiles_ > room_; }

    // In KV tiles, before when the last query tile cannot end if they are not divided: the longest
    // one, all of them, and as many of the shortest as some CTA has.
    __host__ __device__ float whole() const {
        const float alone = float(longest_) + kItemCost;
        const float even = (total_ + kItemCost * float(tiles_)) * per_cta();
        const float waves = waves_of(float(tiles_)) * (float(shortest_) + kItemCost);
        return fmaxf(alone, fmaxf(even, waves));
    }

    __host__ __device__ float per_cta() const { return reciprocal(float(ctas_)); }
    // Waves of so many items, of which some are counted by halves or less: what rounding adds to
    // whole waves is no wave.
    __host__ __device__ float waves_of(float items) const {
        return ceilf((items - 0.01f) * per_cta());
    }

    // Of any number of splits.
    __host__ __device__ float combine_cost() const {
        return kCombineCost + kCombineCostOfRows / kQueries * float(batch_.rows());
    }

    // Takes so many splits if they bring an earlier end than what is best so far, and than none.
    __host__ __device__ void consider(int candidate, float undivided, float& best, int& splits) {
        // Their cost counts if they are in rows; if not, what void ones cost has kept them few.
        const float rows = in_rows_ ? float(batch_.rows()) / kQueries : 0.f;
        const Prediction of = predicted(Divisor(candidate).ceil(longest_));
        const float time = of.end + kCostOfItemRows * rows * of.begun;
        if (candidate > 1 && candidate <= least(longest_, kMostSplits) && time < best &&
            of.end + kLeastCostOfItemRows * rows * of.begun < undivided)
            best = time, splits = candidate;
    }

    // By when the last one is combined if none of them has splits of more than `length`, but for
    // what items add; and how many of these begin at the same time, of those of about that length.
    struct Prediction {
        float end, begun;
    };
    __host__ __device__ Prediction predicted(int length) {
        const float factor = reciprocal(float(length));
        // Items of about this length, how many of these are not void, and what those of half of it
        // and less take. Void items take no KV tiles, but the places of others in a wave.
        float places = 0.f, items = 0.f, short_items = 0.f, short_work = 0.f;
#pragma unroll 1
        for (int begin = 0; begin < batch_.requests; begin += Lanes::kCount) {
            if (begin != chunk_) read(begin);
            const Request own = request();
            const float tiles = float(own.tiles), last = float(own.top) - 0.5f;
            const int count = alike_ ? 1 : least(batch_.requests - begin, Lanes::kCount);
#pragma unroll 1
            for (int lane = 0; lane < count; lane++) {
                const float times = Lanes::of(tiles, lane), mean = Lanes::of(own.mean, lane);
                const float of_length = Lanes::of(last, lane) * factor;
                if (of_length > 0.5f) {
                    // Exact as long as KV tiles are fewer than 2^20.
                    const float splits = ceilf(of_length);
                    places += times * splits;
                    items += times * fminf(splits, mean * factor + 1.f);
                } else {
                    short_items += times;
                    short_work += times * mean;
                }
            }
            if (alike_) break;
        }
        if (in_rows_) {
            const int query_len = batch_.cu_q[1] - batch_.cu_q[0],
                      key_len = batch_.cu_k[1] - batch_.cu_k[0];
            const int top = kv_tiles(query_len, key_len, tiles_of(query_len) - 1),
                      splits = top > 0 ? ceil_of(top, length) : 1;
            items = places = float(head_of(query_len, key_len, splits, length).items);
        }
        const float times = float(alike_ ? batch_.heads * batch_.requests : batch_.heads);
        items *= times;
        if (places * times > float(room_)) return {1e30f, 0.f};
        const float item = float(length) + kItemCost, all = (places + short_items) * times;
        // Where query tiles are many: all work, shared evenly, and then an item that begins when no
        // CTA is free of it.
        float end = (total_ + kItemCost * all) * per_cta() + item +
                    kCostOfRequest * float(batch_.requests);
        if (!is_many()) {
            end = waves_of(items) * float(length) + waves_of(places * times) * kItemCost;
            // Behind these waves the short items, which all CTAs share, until the last one ends.
            if (all > float(ctas_)) {
                const float work = (short_work + kItemCost * short_items) * times;
                if (work > 0.f) end += work * per_cta() + 0.5f * item;
            }
        }
        return {end + combine_cost() + kCombineCostOfSplit * float(longest_) * factor,
                fminf(items, float(ctas_))};
    }

    Lengths batch_;
    int ctas_, room_;
    // KV tiles of the longest and the shortest query tile, and of a split at most; all query tiles
    // and KV tiles; whether all requests are alike.
    int longest_ = 0, shortest_ = 0, length_ = 1, tiles_ = 0;
    float total_ = 0.f;
    bool alike_ = false, in_rows_ = false;
    // Items and slots of a request where requests are as long as the bounds say; 0: their lengths
    // are read.
    int of_alike_ = 0, slots_of_alike_ = 0;
    // The requests at hand: the first one, the lane's, what stands before the first, what there is
    // up to the lane's and of all of them.
    int chunk_ = 0;
    Rows own_;
    Places before_ = {}, running_ = {}, of_chunk_ = {};
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

// Whether some request is so much longer than the others that its query tiles end long after all
// others, though these are many, by what the host knows. The more work is supposed the less is
// asked: for each request there is a query tile, and all have as many KV tiles on average.
template <int keys>
bool may_outlast(const MlaPrefillParams& p, const KernelParams& k, int ctas) {
    if (!Division<keys>::is_countable(p.heads, k.levels)) return false;
    const double tiles = fmax(double(p.query_tokens) / kQueries, double(p.requests)) * p.heads;
    const double mean = double(p.key_tokens) / p.requests / keys * (p.causal ? 0.5 : 1.0);
    const double even = tiles * (mean + kItemCost) / ctas;
    const double longest = double(p.max_key_len) / keys + kItemCost;
    return longest * kWorthwhile > even + kItemCost + kCombineCost + kCostOfRequest * p.requests;
}

// Whether the launch has to be of the kernel that may divide the keys of query tiles: asking the
// lengths takes it some time. If a graph is replayed they may be shorter than said here, which
// costs time at most. Where requests are alike the length of a split is chosen here.
template <int keys>
bool may_divide(const MlaPrefillParams& p, KernelParams& k, int ctas) {
    // With fewer KV tiles combining takes longer than what dividing saves.
    if (p.max_key_len <= 5 * keys) return false;
    // What Divisor divides. Nobody's device has memory for more.
    if (p.max_key_len > int64_t(keys) << 20) return false;
    const bool alike = are_said_alike(p);
    const int64_t tiles = std::max<int64_t>(p.query_tokens / kQueries, p.requests) * p.heads;
    if (tiles > k.slots) return !alike && may_outlast<keys>(p, k, ctas);
    // If each query tile has a CTA of its own the longest one is the end.
    const int64_t rows = p.query_tokens + int64_t(p.requests) * (kQueries - 1);
    if (!alike && rows / kQueries * p.heads > ctas) return true;
    // As many heads of one request come to the same as requests which are alike. Others are taken
    // to be so, of their mean length.
    const int query[2] = {0, alike ? p.max_query_len : ceil_of(p.query_tokens, p.requests)};
    const int key[2] = {0, alike ? p.max_key_len : ceil_of(p.key_tokens, p.requests)};
    const Lengths one = one_request(k, p.heads * p.requests, query, key);
    if (!alike)
        return Division<keys>(one, ctas, k.slots).is_worth_asking(ceil_of(p.max_key_len, keys));
    auto division = Division<keys>::in_rows(one, ctas, k.slots);
    division.ask();
    if (!division.divide()) return false;
    k.alike_items =
        Division<keys>::in_rows(Lengths(k), ctas, k.slots, division.length()).alike_items();
    return true;
}

}  // namespace mla::sm90::prefill
