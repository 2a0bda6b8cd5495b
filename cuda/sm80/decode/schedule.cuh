// Which cached tokens of which query rows each CTA works on, derived on the device from the
// lengths.
//
// A request's query rows (its query tokens and heads together) are cut into tiles of rows, and
// `pair` of them, which CTAs side by side do, are a group. A group costs its KV tiles (at least
// one) plus a constant. All groups of all requests, in order, form one line of cost, which is cut
// into equal ranges, one per CTA group of `pair` CTAs. A group that a cut crosses is done in
// splits, which are combined afterwards.
//
// Where groups are few, ranges are even instead if they are not much longer for it: the cost of a
// group is its KV tiles, rounded up to whole ranges. Then every CTA has KV tiles of one group
// alone, and nothing else to do before it combines splits.
//
// Every warp does this for itself and keeps its items in a ring in shared memory, because it begins
// to load an item long before it computes it.
#pragma once

#include "params.cuh"

namespace mla::sm80::decode {

// Some KV tiles of one tile of rows.
struct Item {
    int request;
    // Of the request: where its query tokens begin, how many there are, cached tokens.
    int q_begin, q_len, kv_len;
    // Cached tokens before the query tokens, and those that all rows attend to.
    int before, unmasked;
    // The tile's first row, of q_len * heads.
    int first_row;
    int tile_begin, tile_end;
    // This is split `split` of `splits`; split i belongs to CTA group first_cta_group + i. The
    // first `combiners` of these CTA groups have no item after it.
    int split, splits, combiners, first_cta_group;
};

template <int kTileRows, int kTileTokens>
class Schedule {
  public:
    // Entries of the ring: what a warp computes, what it loads, and one per tile between them.
    static constexpr int kItems = 8;
    static_assert(kItems >= kMaxStages + 2);

    struct Shared {
        Item items[kItems];
        // Which CTA group this CTA belongs to, and which of its tiles of rows it does.
        int cta_group, member;
        // Of a CTA group's range: all ranges are as long. The line's length.
        int share, end, total;
        bool even;
        // The line up to where items were made, the request there, and where it begins.
        int position, request, begins;
    };

    __device__ Schedule(const KernelParams& p, Shared& shared) : p_(p), shared_(shared) {}

    // Divides the line. Called once, by the whole warp.
    __device__ void begin() {
        const int lane = threadIdx.x & 31;
        // Each lane has neighbouring requests.
        const int own = (p_.requests + 31) / 32;
        const int first = lane * own, last = min(first + own, p_.requests);
        const int cta_groups = gridDim.x / p_.pair, cta_group = blockIdx.x / p_.pair;
        const Ranges ranges = divide(first, last, cta_groups);
        const int share = ranges.share;
        int units = 0;
#pragma unroll 1
        for (int request = first; request < last; ++request)
            units += groups_of(request) *
                     (ranges.even ? cost_of<true>(request, share) : cost_of<false>(request, share));
        int sum = units;
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(~0u, sum, d);
            if (lane >= d) sum += other;
        }
        const int total = __shfl_sync(~0u, sum, 31);
        const int position = int(min(int64_t(cta_group) * share, int64_t(total)));
        // The first lane whose requests end after the position has it among them.
        const unsigned after = __ballot_sync(~0u, sum > position);
        const int owner = after ? __ffs(after) - 1 : 31;
        int request = __shfl_sync(~0u, first, owner);
        const int begins = __shfl_sync(~0u, sum - units, owner);
        if (lane == 0) {
            shared_.cta_group = cta_group;
            shared_.member = blockIdx.x - cta_group * p_.pair;
            shared_.share = share;
            shared_.even = ranges.even;
            shared_.total = total;
            shared_.end = int(min(int64_t(position) + share, int64_t(total)));
            shared_.position = position;
            shared_.request = request;
            shared_.begins = begins;
        }
        __syncwarp();
    }

    // Puts the first item into entry 0 of the ring; false if there is none. Called by the whole
    // warp, as all that follows.
    __device__ bool first() { return shared_.even ? next<true>(0) : next<false>(0); }
    // Puts the next item into entry `index`. Even ranges have no other than the first one.
    __device__ bool next(int index) { return next<false>(index); }

    __device__ const Item& item(int index) const { return shared_.items[index & (kItems - 1)]; }

  private:
    template <bool kEven>
    __device__ bool next(int index) {
        const int head = kEven ? 0 : p_.tile_cost;
        const int end = shared_.end;
        int position = shared_.position, request = shared_.request, begins = shared_.begins;
        Item& item = shared_.items[index & (kItems - 1)];
        bool found = false;
        __syncwarp();
        while (position < end && !found) {
            int cost;
            while (true) {
                cost = cost_of<kEven>(request, shared_.share);
                const int units = groups_of(request) * cost;
                if (begins + units > position) break;
                begins += units;
                ++request;
            }
            const int group = (position - begins) / cost;
            const int group_begin = begins + group * cost;
            const int from = position - group_begin - head;
            position = min(end, group_begin + cost);
            const int to = position - group_begin - head;
            const int first_row = (group * p_.pair + shared_.member) * kTileRows;
            found = to > 0 && first_row < query_len(request) * p_.heads;
            if (found && (threadIdx.x & 31) == 0) {
                item.first_row = first_row;
                item.tile_begin = max(from, 0);
                item.tile_end = kEven ? min(to, tiles_of(request)) : to;
                const int share = shared_.share;
                const int first_cta_group = (group_begin + head) / share;
                item.first_cta_group = first_cta_group;
                item.splits = (group_begin + cost - 1) / share - first_cta_group + 1;
                item.split = shared_.cta_group - first_cta_group;
                item.combiners = item.splits - (!kEven && group_begin + cost < shared_.total);
            }
        }
        if ((threadIdx.x & 31) == 0) {
            if (found) {
                item.request = request;
                item.q_begin = p_.cu_q_lens ? p_.cu_q_lens[request] : request * p_.query_len;
                item.q_len = query_len(request);
                item.kv_len = kv_len(request);
                item.before = item.kv_len - item.q_len;
                item.unmasked = p_.causal ? item.before + 1 : item.kv_len;
            }
            shared_.position = position;
            shared_.request = request;
            shared_.begins = begins;
        }
        __syncwarp();
        return found;
    }

    // How the line is cut: how long a range is, and whether groups are whole ranges.
    struct Ranges {
        int share;
        bool even;
    };

    // Each lane knows of requests `first` to `last` - 1.
    __device__ Ranges divide(int first, int last, int cta_groups) const {
        int groups = 0, tiles = 0;
#pragma unroll 1
        for (int request = first; request < last; ++request) {
            const int of_request = groups_of(request);
            groups += of_request;
            tiles += of_request * tiles_of(request);
        }
        groups = __reduce_add_sync(~0u, groups);
        tiles = __reduce_add_sync(~0u, tiles);
        const auto share_of = [&](int cost) {
            return max((cost + cta_groups - 1) / cta_groups, p_.least_share);
        };
        const int share = share_of(tiles + groups * p_.tile_cost);
        if (groups <= cta_groups) {
            const int most = min(share + p_.even_gain, INT32_MAX / cta_groups);
#pragma unroll 1
            for (int even = share_of(tiles); even <= most; ++even) {
                int ranges = 0;
#pragma unroll 1
                for (int request = first; request < last; ++request)
                    ranges += groups_of(request) * ((tiles_of(request) + even - 1) / even);
                if (__reduce_add_sync(~0u, ranges) <= cta_groups) return {even, true};
            }
        }
        return {share, false};
    }

    __device__ int query_len(int request) const {
        return p_.cu_q_lens ? p_.cu_q_lens[request + 1] - p_.cu_q_lens[request] : p_.query_len;
    }
    __device__ int kv_len(int request) const {
        return p_.kv_lens ? min(max(p_.kv_lens[request], 0), p_.max_kv_len) : p_.max_kv_len;
    }
    // KV tiles.
    __device__ int tiles_of(int request) const {
        return max((kv_len(request) + kTileTokens - 1) / kTileTokens, 1);
    }
    template <bool kEven>
    __device__ int cost_of(int request, int share) const {
        const int tiles = tiles_of(request);
        return kEven ? (tiles + share - 1) / share * share : tiles + p_.tile_cost;
    }
    __device__ int groups_of(int request) const {
        const int group_rows = kTileRows * p_.pair;
        return (query_len(request) * p_.heads + group_rows - 1) / group_rows;
    }

    const KernelParams& p_;
    Shared& shared_;
};

}  // namespace mla::sm80::decode
