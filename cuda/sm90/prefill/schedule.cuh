// In which order tiles are worked through.
//
// A tile is (request, head, level): level l is the l-th 128 query rows of a request. Under causal
// attention its cost grows with the level, so tiles are handed out from the highest level of any
// request down to level 0: the longest come first and the last ones are short, whatever the mix of
// lengths, without sorting anything. A counter hands them out, because CTAs run at different
// speeds.
//
// All heads at once would touch the keys of all heads between two tiles of one head. So heads are
// taken in groups, small enough that a group's keys stay in the L2 cache from level to level, or
// that several levels of a head run at the same time. Short requests, too, are taken in sections,
// few at a time, so that what runs at the same time lies close together in memory; all others are
// one section. The host says how many heads and requests (`together` in api.cu):
//
//     for section of requests:
//         for group of heads:
//             for level from high to low:
//                 for request with that level:
//                     for head in group
//
// Everything here is done by one warp, from the lengths on the device. It claims tiles in this
// order, so it walks along with them: from each run of levels that the same requests reach to the
// next lower one.
#pragma once

#include "item.cuh"
#include "params.cuh"
#include "tile.cuh"

namespace mla::sm90::prefill {

// A query tile as one split.
template <int keys>
__device__ __forceinline__ Item whole(const KernelParams& p, Item item, int level) {
    item.query = level * kQueries;
    item.end = visible_kv_tiles<keys>(p.causal, item.query, item.query_len, item.key_len);
    item.splits = 1;
    return item;
}

// The tile at `index` if every request is as long as the bounds say: no length is read.
template <int keys>
__device__ __forceinline__ Item find_alike(const KernelParams& p, int index) {
    Item item = {};
    item.request = -1;
    const AlikeTiles& by = p.alike_tiles;
    if (index >= by.count) return item;
    int section, group, position, in_group, down, nth;
    by.section(section, index, index);
    const int first_request = section * p.section;
    const bool last_section = p.requests - first_request < p.section;
    by.group[last_section](group, in_group, index);
    const int first_head = group * p.group;
    const bool last_group = p.heads - first_head < p.group;
    by.heads[last_group](position, item.head, in_group);
    by.requests[last_section](down, nth, position);
    item.head += first_head;
    item.request = first_request + nth;
    item.query_start = item.request * p.max_query_len;
    item.query_len = p.max_query_len;
    item.key_start = item.request * p.max_key_len;
    item.key_len = p.max_key_len;
    return whole<keys>(p, item, p.levels - 1 - down);
}

template <typename Tile>
struct Schedule {
    const KernelParams& p;
    int lane;
    // The section at hand: its first request, the one behind its last, the tiles before it, and its
    // tiles of one head.
    int first = 0, end = 0, start = 0, per_head = 0;
    // The group of heads at hand within it and the run of levels within that, from `top` down to
    // `bottom`: `requests` requests reach each of them, and a head has `before` tiles at the levels
    // above.
    int group = -1, top = 0, bottom = 0, requests = 0, before = 0;

    __device__ Schedule(const KernelParams& params, int lane_) : p(params), lane(lane_) {
        enter_section(0);
    }

    // The tile at `index`, in one split. From call to call the index rises.
    __device__ Item find(int index) {
        Item item = {};
        item.request = -1;
        while (index - start >= per_head * p.heads) {
            if (end == p.requests) return item;
            start += per_head * p.heads;
            enter_section(end);
        }
        index -= start;
        const int at_group = index / (per_head * p.group);
        const int first_head = at_group * p.group;
        const int heads = min(p.group, p.heads - first_head);
        const int within = index - at_group * (per_head * p.group);
        item.head = first_head + within % heads;
        const int position = within / heads;

        if (at_group != group) {
            group = at_group;
            before = 0;
            enter(p.levels - 1);
        }
        while (position - before >= requests * (top - bottom + 1)) {
            before += requests * (top - bottom + 1);
            enter(bottom - 1);
        }
        const int level = top - (position - before) / requests;
        int nth = (position - before) % requests;
        for (int request = first;; request += 32) {
            unsigned has = __ballot_sync(~0u, tiles_of(request + lane) > level);
            int count = __popc(has);
            if (nth < count) return describe(item, request + __fns(has, 0, nth + 1), level);
            nth -= count;
        }
    }

  private:
    __device__ int tiles_of(int request) const {
        return request < end
                   ? min((p.cu_q[request + 1] - p.cu_q[request] + kQueries - 1) / kQueries,
                         p.levels)
                   : 0;
    }

    // Goes to the section that begins with a request.
    __device__ void enter_section(int request) {
        first = request;
        end = request + min(p.section, p.requests - request);
        group = -1;
        int tiles = 0;
#pragma unroll 1
        for (int r = first + lane; r < end; r += 32) tiles += tiles_of(r);
        per_head = __reduce_add_sync(~0u, tiles);
    }

    // Goes to the run that begins with a level: it ends at the first level that another request
    // reaches.
    __device__ void enter(int level) {
        top = level;
        int reach = 0, next = 0;
#pragma unroll 1
        for (int r = first + lane; r < end; r += 32) {
            const int tiles = tiles_of(r);
            if (tiles > level) {
                reach++;
            } else {
                next = max(next, tiles);
            }
        }
        bottom = __reduce_max_sync(~0u, next);
        requests = __reduce_add_sync(~0u, reach);
    }

    __device__ Item describe(Item item, int request, int level) const {
        item.request = request;
        item.query_start = p.cu_q[request];
        item.query_len = p.cu_q[request + 1] - item.query_start;
        item.key_start = p.cu_k[request];
        item.key_len = p.cu_k[request + 1] - item.key_start;
        return whole<Tile::kKeys>(p, item, level);
    }
};

}  // namespace mla::sm90::prefill
