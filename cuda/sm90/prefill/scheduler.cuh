// Order of query tiles whose keys are not divided.
//
// A tile is (request, head, level): level l is the l-th 128 query rows of a request. Under causal
// attention its cost grows with the level, so tiles are handed out from the highest level of any
// request down to level 0. The rest of the cost is the context, which is all that level 0 sees. So
// requests are put into buckets by the number of KV tiles that level 0 sees: a bucket is given by
// the lowest power of two above that number. This approximates longest processing time first: the
// longest tiles come first and the last ones are short, whatever the mix of lengths. Requests with
// less than a small share of a CTA's work stay in their own order: it matters little when they
// come, and among longer tiles the loads and stores of a short one are hidden. A counter hands
// tiles out, because CTAs run at different speeds.
//
// If all heads ran at once, the keys of all heads would be read between two tiles of one head. So
// heads are taken in groups, small enough that a group's keys stay in the L2 cache from level to
// level, or that several levels of a head run at the same time. Short requests, too, are taken in
// sections of a few, so that what runs at the same time lies close together in memory; in other
// batches one section holds all requests. The host chooses the sizes of sections and groups
// (`together` in api.cu):
//
//     for bucket from high to low:
//         for section of its requests:
//             for group of heads:
//                 for level from high to low:
//                     for request with that level:
//                         for head in group
//
// All of this is computed from the lengths on the device by one warp, or by a thread on the host.
// It claims tiles in this order, so it advances with them: from each run of levels that the same
// requests reach to the next lower run.
#pragma once

#include "../../common/lanes.cuh"
#include "../../common/warp_bitset.cuh"
#include "config.cuh"
#include "params.cuh"
#include "work_item.cuh"

namespace mla::sm90::prefill {

// A query tile as a single split.
template <int keys>
__host__ __device__ inline Item whole(const KernelParams& p, Item item, int level) {
    item.query = level * kQueries;
    item.end = visible_kv_tiles<keys>(p.causal, item.query, item.query_len, item.key_len);
    item.splits = 1;
    return item;
}

// The tile at `index` if every request is as long as the bounds: no length is read.
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

// Bit width of x, which is not negative.
__host__ __device__ inline int bits_of(int x) {
#ifdef __CUDA_ARCH__
    return 32 - __clz(x);
#else
    return x > 0 ? 32 - __builtin_clz(unsigned(x)) : 0;
#endif
}

// The order of tiles by their requests' lengths.
template <int keys>
struct Schedule {
    const KernelParams& p;
    // The current bucket, as a bit width; the next lower one of the requests seen so far; and the
    // lowest one, which holds all shorter requests, too.
    int power = kMostBits, below = -1, lowest = 0;
    // Requests of that bucket among Marks::kMost from `chunk` on. The current section is the range
    // `first` to `end` of them; `start` tiles come before it, and a head has `per_head` tiles in
    // it.
    Marks of_power;
    int chunk = 0, first = 0, end = 0, start = 0, per_head = 0;
    // The current group of heads within the section, and the current run of levels within the
    // group, from `top` down to `bottom`: `requests` requests reach each of these levels, and a
    // head has `before` tiles at the levels above.
    int group = -1, top = 0, bottom = 0, requests = 0, before = 0;

    __host__ __device__ explicit Schedule(const KernelParams& params) : p(params) {}

    // The tile at `index`, as a single split. The index rises from call to call.
    __host__ __device__ Item find(int index) {
        Item item = {};
        item.request = -1;
        while (index - start >= per_head * p.heads) {
            start += per_head * p.heads;
            if (!advance()) return item;
        }
        index -= start;
        const int at_group = index / (per_head * p.group);
        const int first_head = at_group * p.group;
        const int heads = p.group < p.heads - first_head ? p.group : p.heads - first_head;
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
        const int of_level = top - (position - before) / requests;
        const int nth = (position - before) % requests;
        return describe(item, chunk + nth_with(of_level, nth), of_level);
    }

  private:
    // Above the bit width of any int.
    static constexpr int kMostBits = 33;
    // Requests whose first query tile takes less than this share of a CTA's work come in any order.
    static constexpr float kShare = 1 / 24.f;

    __host__ __device__ int tiles_of(int request) const {
        const int tiles = (p.cu_q[request + 1] - p.cu_q[request] + kQueries - 1) / kQueries;
        return tiles < p.levels ? tiles : p.levels;
    }

    // KV tiles that the first query tile sees; -1 without tiles, or if there is no such request.
    __host__ __device__ int first_kv_tiles(int request) const {
        // Reads in any case, so that the loads for several requests do not wait for one another.
        const int existing = request < p.requests ? request : 0;
        const int query_len = p.cu_q[existing + 1] - p.cu_q[existing];
        const int key_len = p.cu_k[existing + 1] - p.cu_k[existing];
        const int kv_tiles = visible_kv_tiles<keys>(p.causal, 0, query_len, key_len);
        return request < p.requests && query_len > 0 ? kv_tiles : -1;
    }

    // Goes to the next section; returns false if there is none.
    __host__ __device__ bool advance() {
        if (power == kMostBits) look_at_all();
        while (end == of_power.count) {
            chunk += Marks::kMost;
            if (chunk >= p.requests) {
                if (below < 0) return false;
                power = below;
                below = -1;
                chunk = 0;
            }
            enter_chunk();
        }
        enter_section();
        return true;
    }

    // Chooses the lowest bucket, and finds the highest one.
    __host__ __device__ void look_at_all() {
        float work = 0;
        int most = -1;
#pragma unroll 1
        for (int r = Lanes::own(); r < p.requests; r += Lanes::kCount) {
            const int kv_tiles = first_kv_tiles(r);
            if (kv_tiles < 0) continue;
            work += float(tiles_of(r)) * (float(kv_tiles) + kItemCost);
            if (kv_tiles > most) most = kv_tiles;
        }
        const float of_cta = Lanes::sum(work) * float(p.heads) / float(p.ctas);
        lowest = bits_of(int(fminf(of_cta * kShare, 1e9f)));
        most = Lanes::highest(most);
        if (most >= 0) below = power_of(most);
        chunk = p.requests;
    }

    __host__ __device__ int power_of(int kv_tiles) const {
        const int bits = bits_of(kv_tiles);
        return kv_tiles < 0 ? -1 : bits > lowest ? bits : lowest;
    }

    // Finds the requests of the current bucket, and the next lower bucket.
    __host__ __device__ void enter_chunk() {
        int lower = below;
        of_power.set(p.requests - chunk, [&](int nth) {
            const int own = power_of(first_kv_tiles(chunk + nth));
            if (own < power && own > lower) lower = own;
            return own == power;
        });
        below = Lanes::highest(lower);
        end = 0;
    }

    // Query tiles of each lane's request of a block; 0 if it does not belong to the current
    // section.
    __host__ __device__ int tiles_in(int of_block) const {
        const bool belongs = of_power.has(of_block, first, end);
        return belongs ? tiles_of(chunk + of_block + Lanes::own()) : 0;
    }

    __host__ __device__ void enter_section() {
        first = end;
        end = p.section < of_power.count - first ? first + p.section : of_power.count;
        group = -1;
        per_head = end - first;
        if (p.levels == 1) return;
        int tiles = 0;
        const int last = of_power.block_of(end - 1);
#pragma unroll 1
        for (int b = of_power.block_of(first); b <= last; b += Lanes::kCount) tiles += tiles_in(b);
        per_head = Lanes::sum(tiles);
    }

    // Enters the run of levels that begins with `highest`. It ends above the first level that one
    // more request reaches.
    __host__ __device__ void enter(int highest) {
        top = highest;
        bottom = 0;
        requests = end - first;
        if (p.levels == 1) return;
        int reach = 0, next = 0;
        const int last = of_power.block_of(end - 1);
#pragma unroll 1
        for (int b = of_power.block_of(first); b <= last; b += Lanes::kCount) {
            const int tiles = tiles_in(b);
            if (tiles > highest) {
                reach++;
            } else if (tiles > next) {
                next = tiles;
            }
        }
        bottom = Lanes::highest(next);
        requests = Lanes::sum(reach);
    }

    // Index, from `chunk` on, of the section's n-th request, from 0 on, that has the level.
    __host__ __device__ int nth_with(int level, int n) const {
        // With a single level, all requests of a bucket have it.
        if (p.levels == 1) return of_power.at(first + n);
#pragma unroll 1
        for (int block = of_power.block_of(first);; block += Lanes::kCount) {
            const unsigned has = Lanes::ballot(tiles_in(block) > level);
            const int count = Lanes::count(has);
            if (n < count) return block + Lanes::nth(has, n);
            n -= count;
        }
    }

    __host__ __device__ Item describe(Item item, int request, int of_level) const {
        item.request = request;
        item.query_start = p.cu_q[request];
        item.query_len = p.cu_q[request + 1] - item.query_start;
        item.key_start = p.cu_k[request];
        item.key_len = p.cu_k[request + 1] - item.key_start;
        return whole<keys>(p, item, of_level);
    }
};

}  // namespace mla::sm90::prefill
