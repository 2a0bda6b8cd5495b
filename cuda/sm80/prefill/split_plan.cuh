// Split plan: divides the keys of query tiles among CTAs if requests differ in length.
//
// A CTA has at most `share` KV tiles, whatever request they belong to. With a smaller share, CTAs
// end at more similar times, but dividing costs time. Each lane tries one share and predicts when
// the last CTA would end; all warps of all CTAs come to the same choice.
#pragma once

#include "config.cuh"

namespace mla::sm80::prefill {

// Patience for each KV tile of a split, in cycles: more than a KV tile takes. A CTA that has its SM
// for itself may end long before the others, and then has to wait while they work.
constexpr int64_t kCyclesOfKvTile = 10000;
// Minimum number of KV tiles for a CTA of many rows. Fewer are not worth a CTA.
constexpr int kMinKvTiles = 2;

// Numbers of a request's query tiles and KV tiles.
struct Lengths {
    int tiles, kv_tiles;

    // Number of CTAs that divide the keys of each query tile, for `rate` CTAs per KV tile.
    __device__ int splits(float rate) const {
        return max(int(ceilf(fmaf(float(kv_tiles), rate, -1e-3f))), 1);
    }
    // Number of CTAs of a head that divide keys.
    __device__ int dividing(float rate) const {
        const int of_tile = splits(rate);
        return of_tile > 1 ? tiles * of_tile : 0;
    }
};

// The lengths are zero if there is no such request.
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

// Predicted end of the last CTA, in units of a CTA's time for a KV tile. All `ctas` CTAs together
// have `work` KV tiles, and `divided` of these CTAs divide keys. `splits` CTAs divide the keys of a
// tile of the longest request.
__device__ inline float predicted_end(float share, float splits, float work, float ctas,
                                      float divided, float slots) {
    const float longest = share + 2.f + (divided > 0.f ? 3.f : 0.f);
    const float load = (work + 2.f * ctas + 3.f * divided) / slots;
    // Splits that do not all run at the same time are combined by one CTA alone.
    const float of_split = divided > slots ? 0.25f : 0.06f;
    const float end = ctas > slots ? fmaxf(longest, load + 0.5f * longest) : longest;
    return divided > 0.f ? end + splits * of_split : end;
}

// Returns 1 / `share` for the share with which the last CTA would end first. `own` has the lengths
// of the request whose number is the lane's. Called by whole warps. It is not inlined, because
// launches that do not need it would fetch its code, too.
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
        // KV tiles that causal attention hides from the earlier query tiles, if all of these see
        // some.
        const int unseen = p.causal ? of.tiles * (of.tiles - 1) / 2 * (C::kRows / C::kKeys) : 0;
        work += max(of.tiles * of.kv_tiles - unseen, of.tiles * of.kv_tiles / 2);
    }
    longest = __reduce_max_sync(~0u, unsigned(longest));
    work = __reduce_add_sync(~0u, work);

    // Lane 0's share divides nothing. The share halves with every four lanes.
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
        // Dividing has to promise an end that is 5% earlier.
        end *= 0.95f;
    else if (divided * heads > float(p.max_split_ctas) || share < kMinKvTiles)
        end = 1e9f;
    const unsigned best =
        __reduce_min_sync(~0u, unsigned(fminf(end * 8.f, 1e8f)) * 32u + unsigned(lane)) % 32;
    return rate_of(int(best));
}

}  // namespace mla::sm80::prefill
