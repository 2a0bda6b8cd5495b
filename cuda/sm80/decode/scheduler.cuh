// Tile scheduler: derives the work items of each CTA on the device, from the lengths.
//
// A request's query rows (its query tokens and heads together) are cut into tiles of rows. `pair`
// of these tiles are a group, and neighbouring CTAs do its tiles side by side. The cost of a group
// is its number of KV tiles (at least one) plus a constant. All groups of all requests, in order,
// form one line of cost. The line is cut into equal ranges, one per CTA group of `pair` CTAs. A
// group that a cut crosses is done in splits, which are combined afterwards.
//
// If groups are few, ranges are even instead, provided that this makes them little longer. The cost
// of a group is then its KV tiles, rounded up to whole ranges. Every CTA has KV tiles of one group
// only, and nothing else to do before it combines splits. If groups are many and equal, ranges are
// whole groups, on the same condition.
//
// In a batch-invariant launch, the splits of a group follow its own length alone (OwnSplits). Each
// is an item with the constant cost, and belongs to the CTA group in whose range it begins. Ranges
// are then equal. A CTA group may have several splits of a group, which any number of them share.
//
// Every warp does this for itself. It keeps its items in a ring in shared memory, because it begins
// to load an item long before it computes it.
#pragma once

#include "params.cuh"
#include "ptx/sm80.cuh"

namespace mla::sm80::decode {

// Some KV tiles of one tile of rows.
struct WorkItem {
    int request;
    // The request's first query token, its number of query tokens, and its number of cached tokens.
    int q_begin, q_len, kv_len;
    // Number of cached tokens before the query tokens, and number of those that all rows attend to.
    int before, unmasked;
    // The tile's first row, of q_len * heads.
    int first_row;
    int tile_begin, tile_end;
    // This is split `split` of `splits`. CTA group first_cta_group has the first one.
    int16_t split, splits, first_cta_group;
    // Number of CTA groups that have splits of the tile, and this group's number among them. Unless
    // splits follow their own length, each has one: split i belongs to group first_cta_group + i.
    int16_t sharers, share;
    // The first `combiners` of these groups have no item after this tile's.
    int16_t combiners;
    // True if this is the group's last split of the tile.
    bool ends;
};

template <int kTileRows, int kTileTokens>
class TileScheduler {
  public:
    // Up to this number of splits, combining a tile of rows takes little longer than with fewer.
    static constexpr int kFewSplits = 64;
    // Number of entries of the ring: the item that a warp computes, the item that it loads, and one
    // for each tile between them.
    static constexpr int kItems = 8;
    static_assert(kItems >= kMaxStages + 2);

    struct Shared {
        WorkItem items[kItems];
        // CTA group of this CTA, and the CTA's number within it, which decides its tile of rows.
        int cta_group, member;
        // Length of a CTA group's range, which is the same for all; end of this group's range;
        // length of the line.
        int share, end, total;
        bool even, any;
        // Position in the line up to which items have been made, the request there, and the
        // position where this request begins.
        int position, request, begins;
    };

    __device__ TileScheduler(const KernelParams& p, Shared& shared) : p_(p), shared_(shared) {}

    // Makes the split plan, and the first item, which is entry 0 of the ring. Called once. The
    // whole warp calls this and all functions below.
    __device__ void plan() {
        const int lane = threadIdx.x & 31;
        // Each lane has neighbouring requests.
        const int own = (p_.requests + 31) / 32;
        const int first = lane * own, last = min(first + own, p_.requests);
        const int cta_groups = by_pair(gridDim.x), cta_group = by_pair(blockIdx.x);
        int groups = 0, tiles = 0, splits = 0, longest = 1;
#pragma unroll 1
        for (int request = first; request < last; ++request) {
            const int of_request = groups_of(request), each = tiles_of(request);
            groups += of_request;
            tiles += of_request * each;
            splits += of_request * (own_splits() ? own_splits_of(each) : 1);
            longest = max(longest, each);
        }
        const int all_groups = __reduce_add_sync(~0u, groups);
        const int all_tiles = __reduce_add_sync(~0u, tiles);
        const int max_tiles = __reduce_max_sync(~0u, unsigned(longest));
        const int min_share = min(p_.min_share, (max_tiles + kFewSplits - 1) / kFewSplits);
        const auto share_of = [&](int cost) {
            return max(int(unsigned(cost + cta_groups - 1) / unsigned(cta_groups)), min_share);
        };
        // Sum over this lane's requests: of their cost, or of their numbers of ranges if ranges are
        // even.
        int units = tiles + splits * p_.tile_cost;
        int share = share_of(__reduce_add_sync(~0u, units));
        bool even = false;
        if (!own_splits() && all_groups <= cta_groups) {
            const int max_length = min(share + p_.even_gain, INT32_MAX / kMaxCtas);
#pragma unroll 1
            for (int length = share_of(all_tiles); length <= max_length && !even; ++length) {
                int ranges = 0;
#pragma unroll 1
                for (int request = first; request < last; ++request)
                    ranges += groups_of(request) * ranges_of(request, length);
                even = __reduce_add_sync(~0u, ranges) <= cta_groups;
                if (even) {
                    share = length;
                    units = ranges;
                }
            }
        }
        // Ranges of whole groups leave nothing to combine if groups are equal.
        if (!own_splits() && !even && all_tiles == all_groups * max_tiles) {
            const int cost = max_tiles + p_.tile_cost;
            const int whole = int(unsigned(share + cost - 1) / unsigned(cost)) * cost;
            if (whole <= share + p_.even_gain) share = whole;
        }
        int sum = units;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(~0u, sum, d);
            if (lane >= d) sum += other;
        }
        const int total = __shfl_sync(~0u, sum, 31);
        const int position = int(min(int64_t(cta_group) * (even ? 1 : share), int64_t(total)));
        // The position lies in a request of the first lane whose requests end after it.
        const unsigned after = __ballot_sync(~0u, sum > position);
        const int owner = after ? __ffs(after) - 1 : 31;
        const int begins = __shfl_sync(~0u, sum - units, owner);
        if (lane == 0) {
            shared_.cta_group = cta_group;
            shared_.member = blockIdx.x - cta_group * p_.pair;
            shared_.share = share;
            shared_.even = even;
            shared_.total = total;
            // If ranges are even, the first item is the only one.
            shared_.end = even ? position : int(min(int64_t(position) + share, int64_t(total)));
            shared_.position = position;
            shared_.request = owner * own;
            shared_.begins = begins;
        }
        __syncwarp();
        const bool any = even ? first_of_even() : next(0);
        if (lane == 0) shared_.any = any;
        __syncwarp();
    }

    // True if there is a first item.
    __device__ bool first() const { return shared_.any; }
    // Puts the next item into entry `index`.
    __device__ bool next(int index) {
        const int head = p_.tile_cost, end = shared_.end, share = shared_.share;
        int position = shared_.position, request = shared_.request, begins = shared_.begins;
        WorkItem& item = shared_.items[index & (kItems - 1)];
        bool found = false;
        __syncwarp();
        while (position < end && !found) {
            int cost;
            while (true) {
                cost = cost_of(request);
                const int units = groups_of(request) * cost;
                if (begins + units > position) break;
                begins += units;
                ++request;
            }
            const int group = unsigned(position - begins) / unsigned(cost);
            const int group_begin = begins + group * cost;
            if (own_splits()) {
                found = next_own(item, request, group, group_begin, cost, position);
                continue;
            }
            const int from = position - group_begin - head;
            position = min(end, group_begin + cost);
            const int to = position - group_begin - head;
            const int first_row = first_row_of(group);
            found = to > 0 && first_row < query_len(request) * p_.heads;
            if (found && ptx::laneid() == 0) {
                item.first_row = first_row;
                item.tile_begin = max(from, 0);
                item.tile_end = to;
                const int first_cta_group = unsigned(group_begin + head) / unsigned(share);
                item.first_cta_group = first_cta_group;
                const int last_cta_group = unsigned(group_begin + cost - 1) / unsigned(share);
                item.splits = item.sharers = last_cta_group - first_cta_group + 1;
                item.split = item.share = shared_.cta_group - first_cta_group;
                item.ends = true;
                item.combiners = item.splits - (group_begin + cost < shared_.total);
            }
        }
        if (ptx::laneid() == 0) {
            if (found) put_request(item, request);
            shared_.position = position;
            shared_.request = request;
            shared_.begins = begins;
        }
        __syncwarp();
        return found;
    }

    __device__ const WorkItem& item(int index) const { return shared_.items[index & (kItems - 1)]; }

  private:
    // Makes the first item if ranges are even. Each range then belongs to one group.
    __device__ bool first_of_even() {
        const int range = shared_.cta_group, share = shared_.share;
        int request = shared_.request, begins = shared_.begins;
        if (range >= shared_.total) return false;
        int ranges;
        while (true) {
            ranges = ranges_of(request, share);
            const int of_request = groups_of(request) * ranges;
            if (begins + of_request > range) break;
            begins += of_request;
            ++request;
        }
        const int group = unsigned(range - begins) / unsigned(ranges);
        const int first_cta_group = begins + group * ranges, split = range - first_cta_group;
        const int first_row = first_row_of(group);
        if (first_row >= query_len(request) * p_.heads) return false;
        if ((threadIdx.x & 31) == 0) {
            WorkItem& item = shared_.items[0];
            item.first_row = first_row;
            item.tile_begin = split * share;
            item.tile_end = min(item.tile_begin + share, tiles_of(request));
            item.first_cta_group = first_cta_group;
            item.split = item.share = split;
            item.splits = item.sharers = item.combiners = ranges;
            item.ends = true;
            put_request(item, request);
        }
        __syncwarp();
        return true;
    }

    // True if splits follow their own length.
    __device__ bool own_splits() const { return p_.own.tiles > 0; }
    // Maximum number of KV tiles of a split of a tile of rows with so many of them, and the number
    // of its splits. All splits but the last one have as many.
    __device__ int own_split_size(int tiles) const {
        int size = p_.own.tiles;
        while (size * OwnSplits::kMax < tiles) size *= 2;
        return size;
    }
    __device__ int own_splits_of(int tiles) const {
        const int size = own_split_size(tiles);
        return unsigned(tiles + size - 1) / unsigned(size);
    }
    __device__ int cost_of(int request) const {
        const int tiles = tiles_of(request);
        return tiles + (own_splits() ? own_splits_of(tiles) : 1) * p_.tile_cost;
    }
    // Moves `position` to behind the next split of a group that begins in this CTA group's range,
    // and makes its item. Returns false if there is none.
    __device__ bool next_own(WorkItem& item, int request, int group, int group_begin, int cost,
                             int& position) const {
        const int tiles = tiles_of(request), size = own_split_size(tiles),
                  unit = size + p_.tile_cost;
        const int splits = unsigned(tiles + size - 1) / unsigned(size),
                  split = unsigned(position - group_begin + unit - 1) / unsigned(unit);
        const int begin = group_begin + split * unit, end = shared_.end, share = shared_.share;
        const bool ends = split + 1 >= splits;
        position = ends ? group_begin + cost : begin + unit;
        if (split < splits && begin >= end) position = end;
        const int first_row = first_row_of(group);
        if (split >= splits || begin >= end || first_row >= query_len(request) * p_.heads)
            return false;
        if (ptx::laneid() == 0) {
            item.first_row = first_row;
            item.tile_begin = split * size;
            item.tile_end = min(item.tile_begin + size, tiles);
            item.split = split;
            item.splits = splits;
            const int first = unsigned(group_begin) / unsigned(share),
                      last = unsigned(group_begin + (splits - 1) * unit) / unsigned(share);
            // If a split costs more than a range, no CTA group has two of them, and some may have
            // none. Otherwise every one from the first to the last has one.
            const bool single = unit > share;
            item.first_cta_group = first;
            item.sharers = single ? splits : last - first + 1;
            item.share = single ? split : shared_.cta_group - first;
            item.combiners = item.sharers - (group_begin + cost < shared_.total);
            item.ends = ends || position >= end;
        }
        return true;
    }

    __device__ void put_request(WorkItem& item, int request) const {
        item.request = request;
        item.q_begin = p_.cu_q_lens ? p_.cu_q_lens[request] : request * p_.query_len;
        item.q_len = query_len(request);
        item.kv_len = kv_len(request);
        item.before = item.kv_len - item.q_len;
        item.unmasked = p_.causal ? item.before + 1 : item.kv_len;
    }

    __device__ int first_row_of(int group) const {
        return (group * p_.pair + shared_.member) * kTileRows;
    }

    __device__ int query_len(int request) const {
        return p_.cu_q_lens ? p_.cu_q_lens[request + 1] - p_.cu_q_lens[request] : p_.query_len;
    }
    __device__ int kv_len(int request) const {
        return p_.kv_lens ? min(max(p_.kv_lens[request], 0), p_.max_kv_len) : p_.max_kv_len;
    }
    // Number of KV tiles of a request.
    __device__ int tiles_of(int request) const {
        return max((kv_len(request) + kTileTokens - 1) / kTileTokens, 1);
    }
    // Number of ranges of `length` KV tiles that a group of the request takes.
    __device__ int ranges_of(int request, int length) const {
        return unsigned(tiles_of(request) + length - 1) / unsigned(length);
    }
    __device__ int groups_of(int request) const {
        const int tiles = (query_len(request) * p_.heads + kTileRows - 1) / kTileRows;
        return by_pair(tiles + p_.pair - 1);
    }
    // Divides by the size of a pair, which is one or two.
    __device__ int by_pair(int x) const { return x >> (p_.pair - 1); }

    const KernelParams& p_;
    Shared& shared_;
};

}  // namespace mla::sm80::decode
