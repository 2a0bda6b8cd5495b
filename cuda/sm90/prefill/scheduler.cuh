// Tile scheduler of query tiles whose keys are not split. Its order is longest processing time
// first, with an L2 swizzle.
//
// A query tile has 128 query rows of a request and a head. The tiles of a request are numbered from
// its first rows on. Under causal attention, the cost of a tile grows with its number. Tiles are
// therefore handed out from the highest number in any request down to 0. The rest of a tile's cost
// is that of the context, and tile 0 sees little else. Requests are therefore put into buckets by
// the number of KV tiles that their tile 0 sees, rounded up to a power of two. This approximates
// longest processing time first: the longest tiles come first and the last ones are short, whatever
// the mix of lengths. Requests with less than a small share of a CTA's work stay in their own
// order. It matters little when they come, and among longer tiles the loads and stores of a short
// one are hidden. A counter hands tiles out, because CTAs run at different speeds.
//
// If all heads ran at once, the keys of all heads would be read between two tiles of one head. The
// L2 swizzle therefore takes heads in blocks. A block is so small that its keys stay in the L2
// cache from tile to tile, or that several tiles of a head run at the same time. Short requests are
// taken in blocks of a few, too. The tiles that run at the same time then lie close together in
// memory. In other batches, one block holds all requests. The host chooses the sizes of both blocks
// (`l2_swizzle` in api.cu):
//
//     for bucket from high to low:
//         for block of its requests:
//             for block of heads:
//                 for tile number from high to low:
//                     for request with that tile:
//                         for head in block
//
// All of this is computed from the lengths, by one warp on the device or by one thread on the host.
// The scheduler claims tiles in this order and advances with them. Each step goes from a run of
// tile numbers that the same requests reach to the next lower run.
#pragma once

#include "../../common/lanes.cuh"
#include "../../common/warp_bitset.cuh"
#include "config.cuh"
#include "params.cuh"
#include "work_item.cuh"

namespace mla::sm90::prefill {

// A query tile as a single split.
template <int keys>
__host__ __device__ inline WorkItem whole(const KernelParams& p, WorkItem item, int tile) {
    item.query = tile * kQueries;
    item.end = visible_kv_tiles<keys>(p.causal, item.query, item.query_len, item.key_len);
    item.splits = 1;
    return item;
}

// Finds the tile at `index` if every request is as long as the bounds. No length is read.
template <int keys>
__device__ __forceinline__ WorkItem find_uniform(const KernelParams& p, int index) {
    WorkItem item = {};
    item.request = -1;
    const UniformTiles& by = p.uniform_tiles;
    if (index >= by.count) return item;
    int request_block, head_block, position, in_block, down, nth;
    by.request_block(request_block, index, index);
    const int first_request = request_block * p.swizzle_requests;
    const bool last_requests = p.requests - first_request < p.swizzle_requests;
    by.head_block[last_requests](head_block, in_block, index);
    const int first_head = head_block * p.swizzle_heads;
    const bool last_heads = p.heads - first_head < p.swizzle_heads;
    by.heads[last_heads](position, item.head, in_block);
    by.requests[last_requests](down, nth, position);
    item.head += first_head;
    item.request = first_request + nth;
    item.query_start = item.request * p.max_query_len;
    item.query_len = p.max_query_len;
    item.key_start = item.request * p.max_key_len;
    item.key_len = p.max_key_len;
    return whole<keys>(p, item, p.max_request_tiles - 1 - down);
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
struct TileScheduler {
    const KernelParams& p;
    // Buckets, as bit widths. `bucket` is the current one. `below` is the highest one below it
    // among the requests seen so far. `lowest` is the lowest one, which holds all shorter requests,
    // too.
    int bucket = kMaxBits, below = -1, lowest = 0;
    // Requests of that bucket among the WarpBitset::kMax requests from `chunk` on. The current
    // block of requests is the range `first` to `end` of them. `start` tiles come before the block,
    // and each head has `per_head` tiles in it.
    WarpBitset in_bucket;
    int chunk = 0, first = 0, end = 0, start = 0, per_head = 0;
    // `head_block` is the current block of heads within the block of requests. The current run of
    // tile numbers goes from `top` down to `bottom`. `requests` requests have a tile of each of
    // these numbers, and a head has `before` tiles of higher numbers.
    int head_block = -1, top = 0, bottom = 0, requests = 0, before = 0;

    __host__ __device__ explicit TileScheduler(const KernelParams& params) : p(params) {}

    // The tile at `index`, as a single split. The index rises from call to call.
    __host__ __device__ WorkItem find(int index) {
        WorkItem item = {};
        item.request = -1;
        while (index - start >= per_head * p.heads) {
            start += per_head * p.heads;
            if (!advance()) return item;
        }
        index -= start;
        const int own_block = index / (per_head * p.swizzle_heads);
        const int first_head = own_block * p.swizzle_heads;
        const int heads =
            p.swizzle_heads < p.heads - first_head ? p.swizzle_heads : p.heads - first_head;
        const int within = index - own_block * (per_head * p.swizzle_heads);
        item.head = first_head + within % heads;
        const int position = within / heads;

        if (own_block != head_block) {
            head_block = own_block;
            before = 0;
            enter(p.max_request_tiles - 1);
        }
        while (position - before >= requests * (top - bottom + 1)) {
            before += requests * (top - bottom + 1);
            enter(bottom - 1);
        }
        const int tile = top - (position - before) / requests;
        const int nth = (position - before) % requests;
        return describe(item, chunk + nth_with(tile, nth), tile);
    }

  private:
    // Above the bit width of any int.
    static constexpr int kMaxBits = 33;

    __host__ __device__ int tiles_of(int request) const {
        const int tiles = (p.cu_q[request + 1] - p.cu_q[request] + kQueries - 1) / kQueries;
        return tiles < p.max_request_tiles ? tiles : p.max_request_tiles;
    }

    // Number of KV tiles that the request's first query tile sees. -1 if the request has no tiles,
    // or if there is no such request.
    __host__ __device__ int first_kv_tiles(int request) const {
        // The lengths are read in any case, so that the loads for several requests do not wait for
        // one another.
        const int existing = request < p.requests ? request : 0;
        const int query_len = p.cu_q[existing + 1] - p.cu_q[existing];
        const int key_len = p.cu_k[existing + 1] - p.cu_k[existing];
        const int kv_tiles = visible_kv_tiles<keys>(p.causal, 0, query_len, key_len);
        return request < p.requests && query_len > 0 ? kv_tiles : -1;
    }

    // Goes to the next block of requests; returns false if there is none.
    __host__ __device__ bool advance() {
        if (bucket == kMaxBits) look_at_all();
        while (end == in_bucket.count) {
            chunk += WarpBitset::kMax;
            if (chunk >= p.requests) {
                if (below < 0) return false;
                bucket = below;
                below = -1;
                chunk = 0;
            }
            enter_chunk();
        }
        enter_request_block();
        return true;
    }

    // Chooses the lowest bucket, and finds the highest one.
    __host__ __device__ void look_at_all() {
        float work = 0;
        int longest = -1;
#pragma unroll 1
        for (int r = Lanes::own(); r < p.requests; r += Lanes::kCount) {
            const int kv_tiles = first_kv_tiles(r);
            if (kv_tiles < 0) continue;
            work += float(tiles_of(r)) * (float(kv_tiles) + Costs::kItem);
            if (kv_tiles > longest) longest = kv_tiles;
        }
        const float of_cta = Lanes::sum(work) * float(p.heads) / float(p.ctas);
        lowest = bits_of(int(fminf(of_cta * Costs::kOrdered, 1e9f)));
        longest = Lanes::highest(longest);
        if (longest >= 0) below = bucket_of(longest);
        chunk = p.requests;
    }

    __host__ __device__ int bucket_of(int kv_tiles) const {
        const int bits = bits_of(kv_tiles);
        return kv_tiles < 0 ? -1 : bits > lowest ? bits : lowest;
    }

    // Finds the requests of the current bucket, and the next lower bucket.
    __host__ __device__ void enter_chunk() {
        int lower = below;
        in_bucket.set(p.requests - chunk, [&](int nth) {
            const int own = bucket_of(first_kv_tiles(chunk + nth));
            if (own < bucket && own > lower) lower = own;
            return own == bucket;
        });
        below = Lanes::highest(lower);
        end = 0;
    }

    // Query tiles of each lane's request of a bitset's block; 0 if it does not belong to the
    // current block of requests.
    __host__ __device__ int tiles_in(int block) const {
        const bool belongs = in_bucket.has(block, first, end);
        return belongs ? tiles_of(chunk + block + Lanes::own()) : 0;
    }

    __host__ __device__ void enter_request_block() {
        first = end;
        end = p.swizzle_requests < in_bucket.count - first ? first + p.swizzle_requests
                                                           : in_bucket.count;
        head_block = -1;
        per_head = end - first;
        if (p.max_request_tiles == 1) return;
        int tiles = 0;
        const int last = in_bucket.block_of(end - 1);
#pragma unroll 1
        for (int b = in_bucket.block_of(first); b <= last; b += Lanes::kCount) tiles += tiles_in(b);
        per_head = Lanes::sum(tiles);
    }

    // Enters the run of tile numbers that begins with `highest`. The run ends above the next number
    // that one more request reaches.
    __host__ __device__ void enter(int highest) {
        top = highest;
        bottom = 0;
        requests = end - first;
        if (p.max_request_tiles == 1) return;
        int reach = 0, next = 0;
        const int last = in_bucket.block_of(end - 1);
#pragma unroll 1
        for (int b = in_bucket.block_of(first); b <= last; b += Lanes::kCount) {
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

    // Index, from `chunk` on, of the n-th request of the block that has the tile. n counts from 0.
    __host__ __device__ int nth_with(int tile, int n) const {
        // If the longest request has a single tile, all requests of a bucket have that tile.
        if (p.max_request_tiles == 1) return in_bucket.at(first + n);
#pragma unroll 1
        for (int block = in_bucket.block_of(first);; block += Lanes::kCount) {
            const unsigned has = Lanes::ballot(tiles_in(block) > tile);
            const int count = Lanes::count(has);
            if (n < count) return block + Lanes::nth(has, n);
            n -= count;
        }
    }

    __host__ __device__ WorkItem describe(WorkItem item, int request, int tile) const {
        item.request = request;
        item.query_start = p.cu_q[request];
        item.query_len = p.cu_q[request + 1] - item.query_start;
        item.key_start = p.cu_k[request];
        item.key_len = p.cu_k[request + 1] - item.key_start;
        return whole<keys>(p, item, tile);
    }
};

}  // namespace mla::sm90::prefill
