// The tile scheduler. It derives the work items of each CTA group on the device, from the lengths
// alone. A group is one CTA, or several neighbouring ones that do different rows of the same query
// tile.
//
// A query tile has up to N rows for each CTA of a group, all of one request. Rows count query
// tokens and heads together. The cost of a query tile is its number of KV tiles (at least one) plus
// a constant. There are two ways to divide query tiles among groups:
//
//   in line   All query tiles of all requests, in order, form one line of cost units. The line is
//             divided into equal ranges, one per group. A group walks its range tile by tile. A
//             tile that a boundary crosses is done in splits, which are combined afterwards.
//   apart     No group has parts of two query tiles. If there are at least as many groups as tiles,
//             each tile has groups of its own. A number of KV tiles is chosen that no split may
//             exceed: the smallest for which the groups suffice. A tile has one group, or as many
//             as this bound demands, and its KV tiles are divided equally among them. If there are
//             more tiles than groups, and all have the same cost, they are dealt out whole.
//
// Apart is preferred unless it takes noticeably longer: it makes fewer splits and fewer second
// items.
//
// Two warps of every CTA do this, each for itself. One is the cache producer, which then begins at
// once. The other is the scheduler, which passes the items to the other warps through a queue in
// shared memory. A third warp plans a made-up batch before the lengths arrive, because instructions
// are slow to come the first time. On the host, one thread does the same
// (mla_decode_sm90_work_items), so that it can be tested.
#pragma once

#include "../../../common/lanes.cuh"
#include "params.cuh"

namespace mla::sm90::decode {

struct WorkItem {
    // -1 behind the last item.
    int request;
    // First row of this query tile within its request, for the whole group.
    int first_row;
    int q_len, q_begin, kv_len;
    // KV tiles of this split of the query tile.
    int kv_tile_begin, kv_tile_end;
    // This is split `split` of `splits`; split i was given to group first_group + i.
    int split, splits, first_group;
    // Number of groups that combine the results. These are the groups that have no work item after
    // this one, and they have the first splits.
    int16_t combiners;
    // True if the group has no work item after this one.
    bool last;

    __host__ __device__ bool is_valid() const { return request >= 0; }
};

// A KV tile of a request.
struct Start {
    int request, kv_tile;
};

// One whole warp calls its functions, or one thread of the host.
class TileScheduler {
  public:
    // `lens` will hold the lengths of all requests, one after the other. If `lens_step` is 0, one
    // length is that of all requests.
    __host__ __device__ TileScheduler(const KernelParams& p, const int* lens, int lens_step,
                                      int tile_rows, int group_id, int groups)
        : p_(p),
          lens_(lens),
          lens_step_(lens_step),
          tile_rows_(tile_rows),
          group_(group_id),
          groups_(groups) {}

    // Makes the split plan: divides the batch among the groups.
    __host__ __device__ void plan() {
        if (plan_uniform()) return;
        const int requests = p_.requests;
        // Each lane has neighbouring requests.
        const int own = unsigned(requests + Lanes::kCount - 1) / unsigned(Lanes::kCount),
                  first = Lanes::own() * own;
        const int last = first + own < requests ? first + own : requests;
        int tiles = 0, low = INT32_MAX, high = 0;
        split_size_ = splits_ = 0;
        total_ = 0;
#pragma unroll 1
        for (int request = first; request < last; ++request) {
            const int of_request = tiles_of(request), cost = cost_of(request);
            if (of_request > 0) {
                tiles += of_request;
                total_ += of_request * cost;
                low = low < cost ? low : cost;
                high = high > cost ? high : cost;
            }
        }
        low = Lanes::lowest(low);
        high = Lanes::highest(high);
        tiles = Lanes::sum(tiles);
        total_ = Lanes::sum(total_);
        kv_tiles_ = total_ - tiles * p_.tile_cost;
        step_ = unsigned(total_) / unsigned(groups_);
        longer_ = total_ - step_ * groups_;
        if (tiles > 0 && tiles <= groups_) {
            const int longest = high - p_.tile_cost;
            int split_size = longest;
            // If tiles would have one group each, whole tiles are tried first, because the search
            // takes time.
            if (2 * tiles <= groups_ || !worth(high, false))
                split_size = smallest_split_size(tiles, low, high);
            if (stays_whole(longest, split_size)) split_size = longest;
            if (worth(split_size + p_.tile_cost, split_size < longest)) {
                split_size_ = split_size;
                if (split_size == longest || low == high) splits_ = splits_of(longest, split_size);
            }
        } else if (tiles > 0 && low == high) {
            const int whole = unsigned(tiles + groups_ - 1) / unsigned(groups_) * high;
            if (worth(whole, false)) {
                step_ = whole;
                longer_ = 0;
            }
        }
        int units = 0;
#pragma unroll 1
        for (int request = first; request < last; ++request) units += units_of(request);
        const int sum = Lanes::running_sum(units);
        total_ = Lanes::last(sum);
        begin_at_boundary();
        // The position lies in a request of the first lane whose requests end after it.
        const int lane = Lanes::first_or_zero(sum > position_);
        request_ = Lanes::of(first, lane);
        begins_ = Lanes::of(sum - units, lane);
        ends_ = begins_ + units_of(request_);
    }

#ifdef __CUDACC__
    // Start of the group if all requests have the same number of KV tiles. It is found in a
    // fraction of the time that `plan` takes. Otherwise, the result is some KV tile of the batch.
    // Its request is negative if there is no KV tile.
    __device__ Start likely_start() const {
        const Estimate& g = p_.estimate;
        const Start none = {-1, 0};
        // Exact for quotients that a float holds.
        if (g.groups_of_tile == 0) {
            const int tile = group_ * g.tiles_of_group;
            return tile < g.tiles ? Start{int((tile + 0.5f) * g.inverse_tiles_of_request), 0}
                                  : none;
        }
        // The other requests are taken to be like the first one.
        const int kv_tiles = kv_tiles_of(0);
        const SplitPlan plan = split_plan_of(kv_tiles);
        const int tile = int((group_ + 0.5f) * plan.inverse_splits),
                  split = group_ - tile * plan.splits;
        const int request = int((tile + 0.5f) * g.inverse_tiles_of_request);
        if (kv_tiles == 0 || tile >= g.tiles) return none;
        return {request, begin_of_split(kv_tiles_of(request), split, plan.inverse_splits)};
    }
#endif

    // Number of KV tiles of all query tiles of the batch.
    __host__ __device__ int kv_tiles() const { return kv_tiles_; }

    // The next work item of this group's range; its request is -1 at the end.
    __host__ __device__ WorkItem next() {
        WorkItem item;
        while (position_ < end_) {
            while (ends_ <= position_) {
                begins_ = ends_;
                ends_ += units_of(++request_);
            }
            const int kv_tiles = kv_tiles_of(request_);
            const int offset = position_ - begins_;
            item.request = request_;
            item.q_len = query_len(request_);
            item.q_begin = p_.cu_q_lens ? p_.cu_q_lens[request_] : request_ * p_.query_len;
            item.kv_len = lens_[request_ * lens_step_];
            if (split_size_ > 0) {
                const int splits = splits_of(request_),
                          tile = offset < splits ? 0 : unsigned(offset) / unsigned(splits);
                item.first_row = tile * tile_rows_;
                item.split = offset - tile * splits;
                item.splits = splits;
                item.combiners = int16_t(splits);
                item.first_group = group_ - item.split;
                item.kv_tile_begin = 0;
                item.kv_tile_end = kv_tiles;
                if (splits > 1) {
                    const float inverse = inverse_of(splits);
                    item.kv_tile_begin = begin_of_split(kv_tiles, item.split, inverse);
                    if (item.split + 1 < splits)
                        item.kv_tile_end = begin_of_split(kv_tiles, item.split + 1, inverse);
                }
                item.last = true;
                position_ = end_;
                return item;
            }
            const int cost = cost_of(request_), idle = cost - kv_tiles;
            const int tile = offset < cost ? 0 : unsigned(offset) / unsigned(cost);
            const int tile_begin = begins_ + tile * cost, tile_end = tile_begin + cost;
            const int stop = end_ < tile_end ? end_ : tile_end;
            const int begin = position_ - tile_begin - idle, finish = stop - tile_begin - idle;
            const bool empty = kv_tiles == 0 && position_ == tile_begin;
            position_ = stop;
            if (finish <= 0 && !empty) continue;
            item.first_row = tile * tile_rows_;
            item.kv_tile_begin = begin > 0 ? begin : 0;
            item.kv_tile_end = finish > 0 ? finish : 0;
            const int2 group_id = Lanes::both([&](int unit) { return group_of(unit); },
                                              tile_begin + idle, tile_end - 1);
            item.first_group = empty ? group_ : group_id.x;
            item.splits = empty ? 1 : group_id.y - group_id.x + 1;
            item.split = group_ - item.first_group;
            item.last = position_ >= end_;
            // Every split but the last one ends where its group's range ends.
            item.combiners =
                int16_t(item.splits - (boundary(item.first_group + item.splits) != tile_end));
            return item;
        }
        item.request = -1;
        return item;
    }

  private:
    __host__ __device__ int query_len(int request) const {
        return p_.cu_q_lens ? p_.cu_q_lens[request + 1] - p_.cu_q_lens[request] : p_.query_len;
    }
    __host__ __device__ int tiles_of(int request) const {
        return unsigned(query_len(request) * p_.heads + tile_rows_ - 1) / unsigned(tile_rows_);
    }
    __host__ __device__ int kv_tiles_of(int request) const {
        return (lens_[request * lens_step_] + kTileTokens - 1) / kTileTokens;
    }
    __host__ __device__ int cost_of(int request) const {
        const int kv_tiles = kv_tiles_of(request);
        return (kv_tiles > 0 ? kv_tiles : 1) + p_.tile_cost;
    }
    // Number of splits of `kv_tiles` KV tiles, if none may have more than `split_size`.
    __host__ __device__ static int splits_of(int kv_tiles, int split_size) {
        return kv_tiles <= split_size ? 1
                                      : unsigned(kv_tiles + split_size - 1) / unsigned(split_size);
    }
    // First KV tile of a split other than the first one. Splits are in order and none is empty.
    // Their lengths differ by at most one KV tile. They may differ by more in a query tile with so
    // many KV tiles that rounding moves the quotient to another integer.
    __host__ __device__ static int begin_of_split(int kv_tiles, int split, float inverse_splits) {
        return int((float(kv_tiles) * split + 0.5f) * inverse_splits);
    }
    __host__ __device__ int splits_of(int request) const {
        return splits_ > 0 ? splits_ : splits_of(kv_tiles_of(request), split_size_);
    }
    // Length of a request's tiles in the line. It is their cost or, if tiles are kept apart, their
    // number of splits, since each split has a group.
    __host__ __device__ int units_of(int request) const {
        return tiles_of(request) * (split_size_ > 0 ? splits_of(request) : cost_of(request));
    }

    // Division of a query tile's KV tiles among the groups that it has of its own.
    struct SplitPlan {
        int split_size, splits;
        float inverse_splits;
    };
    __host__ __device__ SplitPlan split_plan_of(int kv_tiles) const {
        const Estimate& g = p_.estimate;
        const int split_size = int((kv_tiles + g.groups_of_tile - 0.5f) * g.inverse_groups_of_tile);
        const int splits = int((kv_tiles + split_size - 0.5f) * inverse_of(split_size));
        return {split_size, splits, inverse_of(splits)};
    }

    // Does the same as `plan` in a fraction of its time, if all requests are equal, and their tiles
    // are kept apart and have groups of their own. Returns false otherwise. A single tile is always
    // kept apart, whatever worth() would say.
    __host__ __device__ bool plan_uniform() {
        const Estimate& g = p_.estimate;
        const int kv_tiles = kv_tiles_of(0);
        // The quotients below are exact up to this number.
        bool uniform = g.groups_of_tile > 0 && kv_tiles > 0 && kv_tiles < 1 << 18;
#pragma unroll 1
        for (int request = Lanes::own(); request < p_.requests; request += Lanes::kCount)
            uniform = uniform && kv_tiles_of(request) == kv_tiles &&
                      (!p_.cu_q_lens || tiles_of(request) == g.tiles_of_request);
        if (!Lanes::all(uniform)) return false;
        const int cost = kv_tiles + p_.tile_cost;
        step_ = g.tiles > 1 ? int((g.tiles * cost + 0.5f) * g.inverse_groups) : 0;
        SplitPlan plan = split_plan_of(kv_tiles);
        if (stays_whole(kv_tiles, plan.split_size)) plan = {kv_tiles, 1, 1.f};
        if (g.tiles > 1 && !worth(plan.split_size + p_.tile_cost, plan.splits > 1)) return false;
        split_size_ = plan.split_size;
        splits_ = plan.splits;
        kv_tiles_ = g.tiles * kv_tiles;
        total_ = g.tiles * splits_;
        begin_at_boundary();
        const int of_request = g.tiles_of_request * splits_;
        request_ = int((group_ + 0.5f) * plan.inverse_splits * g.inverse_tiles_of_request);
        begins_ = request_ * of_request;
        ends_ = begins_ + of_request;
        return true;
    }

    // Inverse of a small number. It need not be exact, since the quotients it is used for are
    // rounded down.
    __host__ __device__ static float inverse_of(int x) {
#ifdef __CUDA_ARCH__
        return __fdividef(1.f, float(x));
#else
        return 1.f / float(x);
#endif
    }

    __host__ __device__ void begin_at_boundary() {
        if (split_size_ > 0) {
            // Each unit of the line is now a group.
            step_ = 1;
            longer_ = 0;
        }
        position_ = boundary(group_);
        end_ = boundary(group_ + 1);
    }

    // The smallest number of KV tiles that no split has to exceed, given the number of groups.
    // `low` and `high` bound the tiles' costs.
    __host__ __device__ int smallest_split_size(int tiles, int low, int high) const {
        const int longest = high - p_.tile_cost;
        if (low == high) {
            const int splits = unsigned(groups_) / unsigned(tiles);
            return unsigned(longest + splits - 1) / unsigned(splits);
        }
        // If splits had fewer than kv_tiles_ / groups_ KV tiles, there would be more splits than
        // groups. If they have kv_tiles_ / (groups_ - tiles), they are few enough, since at most
        // one split of each tile is not full.
        int low_size = unsigned(kv_tiles_ + groups_ - 1) / unsigned(groups_);
        int high_size = longest;
        if (tiles < groups_) {
            const int enough =
                unsigned(kv_tiles_ + groups_ - tiles - 1) / unsigned(groups_ - tiles);
            high_size = high_size < enough ? high_size : enough;
        }
#pragma unroll 1
        while (low_size < high_size) {
            const int split_size = (low_size + high_size) / 2;
            int needed = 0;
#pragma unroll 1
            for (int request = Lanes::own(); request < p_.requests; request += Lanes::kCount)
                needed += tiles_of(request) * splits_of(kv_tiles_of(request), split_size);
            if (Lanes::sum(needed) <= groups_)
                high_size = split_size;
            else
                low_size = split_size + 1;
        }
        return low_size;
    }

    // True if a tile stays whole although it could have splits of this size. Combining takes a
    // little longer than a KV tile. With more than 64 rows, one CTA takes just as long to write the
    // whole output, so tiles are split to save even one KV tile.
    __host__ __device__ bool stays_whole(int kv_tiles, int split_size) const {
        return kv_tiles - split_size <= (tile_rows_ > 64 ? 0 : 1);
    }

    // True if it is faster to keep tiles apart. The longest group then costs `cost`, and `divided`
    // is true if query tiles have splits. In line, all groups cost step_, but some of them have two
    // items, and the end takes as long as three to seven KV tiles. Up to 64 rows, a KV tile also
    // takes less time while some SMs leave the memory to the others. The numbers come from measured
    // times of plans (docs/log/decode.md).
    __host__ __device__ bool worth(int cost, bool divided) const {
        // 17/16 of a step and 3 KV tiles.
        if (tile_rows_ > 64) return cost * 16 <= step_ * 17 + 48;
        if (tile_rows_ > 32)
            // 17/16 of a step and 7 KV tiles; 4/3 and 4.
            return divided ? cost * 16 <= step_ * 17 + 112 : cost * 3 <= step_ * 4 + 12;
        // 5/3 and 5 1/3; 23/16 and 4.
        return divided ? cost * 3 <= step_ * 5 + 16 : cost * 16 <= step_ * 23 + 64;
    }

    // Begin of a group's range. Ranges are step_ long, and the first longer_ of them one unit more.
    // A range past the end is empty.
    __host__ __device__ int boundary(int group_id) const {
        const int end = group_id * step_ + (group_id < longer_ ? group_id : longer_);
        return end < total_ ? end : total_;
    }
    // The group whose range holds a cost unit.
    __host__ __device__ int group_of(int unit) const {
        const int in_longer = longer_ * (step_ + 1);
        const bool longer = unit < in_longer;
        return (longer ? 0 : longer_) +
               unsigned(longer ? unit : unit - in_longer) / unsigned(longer ? step_ + 1 : step_);
    }

    const KernelParams& p_;
    const int* lens_;
    int lens_step_, tile_rows_, group_, groups_;
    // The maximum number of KV tiles of a split if tiles are kept apart, and 0 in line.
    int split_size_;
    // The number of splits of each tile if tiles are kept apart and all have the same number, else
    // 0.
    int splits_;
    // KV tiles of all query tiles, without the tiles' constant.
    int kv_tiles_;
    // The line: the length of all tiles, and the begin and end of the request of the next work
    // item, request_.
    int total_, begins_, ends_;
    // See `boundary`.
    int step_, longer_;
    // The rest of this group's range, and the request at its position.
    int position_, end_, request_;
};

}  // namespace mla::sm90::decode
