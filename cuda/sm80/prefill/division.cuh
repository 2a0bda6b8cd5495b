// By how many CTAs the keys of each request's tiles are divided where requests differ.
//
// A CTA has at most `share` KV tiles, whatever request they are of. A smaller share evens out when
// CTAs end, but dividing costs time. Each lane tries a share and predicts when the last CTA would
// end; all warps of all CTAs find the same one.
#pragma once

#include "config.cuh"

namespace mla::sm80::prefill {

// More than a CTA takes for a KV tile: so much earlier than others one may be done that has its SM
// for itself.
constexpr int64_t kCyclesOfKvTile = 10000;
// The fewest KV tiles that are worth a CTA of many rows.
constexpr int kLeastKvTiles = 2;

// Of a request, its tiles of query rows and of keys.
struct Lengths {
    int tiles, kv_tiles;

    // CTAs that divide the keys of each of its tiles, for `rate` CTAs per KV tile.
    __device__ int splits(float rate) const {
        return max(int(ceilf(fmaf(float(kv_tiles), rate, -1e-3f))), 1);
    }
    // CTAs of a head that divide keys.
    __device__ int dividing(float rate) const {
        const int of_tile = splits(rate);
        return of_tile > 1 ? tiles * of_tile : 0;
    }
};

// Of none: zero.
template <class C>
__device__ Lengths lengths_of(const KernelParams& p, int request) {
    if (request >= p.requests) return {0, 0};
    const int rows = p.cu_query_lens[request + 1] - p.cu_query_lens[request];
    Lengths lengths = {(rows + C::kRows - 1) / C::kRows, 0};
    if (p.splits == 0) {
        const int keys = p.cu_key_lens[request + 1] - p.cu_key_lens[request];
        lengths.kv_tiles = (keys + C::kKeys - 1) / C::kKeys;
    }
    return lengths;
}

// When the last CTA ends, in the time that one needs for a KV tile. `work` KV tiles are those of all
// `ctas`, of which `divided` divide keys; those of a tile of the longest request are `splits`.
__device__ inline float predicted_end(float share, float splits, float work, float ctas,
                                      float divided, float slots) {
    const float longest = share + 2.f + (divided > 0.f ? 3.f : 0.f);
    const float load = (work + 2.f * ctas + 3.f * divided) / slots;
    // Those that do not all run at the same time are combined by one of them alone.
    const float of_split = divided > slots ? 0.25f : 0.06f;
    const float end = ctas > slots ? fmaxf(longest, load + 0.5f * longest) : longest;
    return divided > 0.f ? end + splits * of_split : end;
}

// One over the best share. `own` are the lengths of the request whose number is the lane's. Called by
// whole warps. Not inlined: launches that need none would fetch the code, too.
template <class C>
__device__ __noinline__ float dividing_rate(const KernelParams& p, Lengths own) {
    const int lane = threadIdx.x & 31;
    const auto of_lane = [&](int first) {
        return first == 0 ? own : lengths_of<C>(p, first + lane);
    };
    int longest = 1, work = 0;
    for (int first = 0; first < p.requests; first += 32) {
        const Lengths of = of_lane(first);
        longest = max(longest, of.kv_tiles);
        // Of causal attention, what its earlier tiles do not see, as far as they see any.
        const int unseen = p.causal ? of.tiles * (of.tiles - 1) / 2 * (C::kRows / C::kKeys) : 0;
        work += max(of.tiles * of.kv_tiles - unseen, of.tiles * of.kv_tiles / 2);
    }
    longest = __reduce_max_sync(~0u, unsigned(longest));
    work = __reduce_add_sync(~0u, work);

    // The first lane's share divides nothing, and that of every fourth one is half as large.
    const auto rate_of = [&](int lane) { return exp2f(float(lane) * 0.25f) / float(longest); };
    const float rate = rate_of(lane), splits = rate * float(longest);
    int ctas = 0, divided = 0;
    for (int first = 0; first < p.requests; first += 32) {
        const Lengths of = of_lane(first);
        const int count = min(p.requests - first, 32);
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
            const Lengths one = {__shfl_sync(~0u, of.tiles, i), __shfl_sync(~0u, of.kv_tiles, i)};
            ctas += one.tiles * one.splits(rate);
            divided += one.dividing(rate);
        }
    }
    const float heads = p.heads, share = float(longest) / splits;
    float end = predicted_end(share, splits, float(work) * heads, float(ctas) * heads,
                              float(divided) * heads, float(p.slots));
    if (lane == 0)
        // A gain has to be worth it.
        end *= 0.95f;
    else if (divided * heads > float(p.most_divided) || share < kLeastKvTiles)
        end = 1e9f;
    const unsigned best =
        __reduce_min_sync(~0u, unsigned(fminf(end * 8.f, 1e8f)) * 32u + unsigned(lane)) % 32;
    return rate_of(int(best));
}

}  // namespace mla::sm80::prefill
