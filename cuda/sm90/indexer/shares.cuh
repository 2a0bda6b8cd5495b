// Equal shares of all requests' tiles of keys, one request after the other: whatever the lengths
// are, CTAs end together. Each of them reads all lengths, so requests must be few.
#pragma once

#include "../../ptx/lanes.cuh"
#include "rows.cuh"

namespace mla::sm90::indexer {

// Keys of one product of a warpgroup.
constexpr int kTileKeys = 64;

__host__ __device__ constexpr int tiles_for(int keys) { return (keys + kTileKeys - 1) / kTileKeys; }

// The rows of a request among a batch's `rows`, and what is known of it.
struct RequestRows {
    int begin, end;
    int last;    // the request's last row, which may be behind `rows`
    int length;  // of the request

    // `request` is one of the batch.
    static __device__ __forceinline__ RequestRows of(const Requests& p, int request, int rows) {
        const int start = p.query_starts[request] - p.first_token;
        const int end = p.query_starts[request + 1] - p.first_token;
        return {max(start, 0), min(end, rows), end - 1, p.seq_lens[request]};
    }

    // What the last of up to `block` rows from `row` on sees, which is the most that any of them
    // does.
    __device__ __forceinline__ int seen(const Requests& p, int row, int block) const {
        return seen_by(p, length, last - (min(row + block, end) - 1));
    }

    // Blocks of so many rows share the tiles of what they see.
    __device__ __forceinline__ int tiles(const Requests& p, int block) const {
        int all = 0;
        for (int row = begin; row < end; row += block) all += tiles_for(seen(p, row, block));
        return all;
    }
};

// A CTA's share of all requests' tiles, and the request in which it begins.
struct Share {
    int begin, end;
    int request;
    int before;  // tiles of the requests before that one
};

// The same in every lane.
template <int block>
__device__ __forceinline__ Share share_of(const Requests& p, int rows, int cta, int ctas,
                                          int lane) {
    int first = 0, last = p.requests - 1;
    // If there are more requests than rows, some have none of these.
    if (last >= rows) {
        first = request_of(p, p.first_token, lane);
        last = request_of(p, p.first_token + rows - 1, lane);
    }
    int all = 0;
    // Several are asked for before the first is looked at: what is known of requests may be far
    // away. The second time it is near.
    constexpr int kAtOnce = 4;
    for (int base = first; base <= last; base += 32 * kAtOnce) {
        RequestRows of[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            of[i] = RequestRows::of(p, min(base + 32 * i + lane, last), rows);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            if (base + 32 * i + lane <= last) all += of[i].tiles(p, block);
    }
    all = __reduce_add_sync(~0u, all);
    const int each = (all + ctas - 1) / ctas;
    Share share = {cta * each, min((cta + 1) * each, all), first, 0};
    for (int base = first; share.begin < share.end; base += 32) {
        const int request = base + lane;
        const int own = request <= last ? RequestRows::of(p, request, rows).tiles(p, block) : 0;
        const int up_to = share.before + int(ptx::inclusive_sum(uint32_t(own)));
        const uint32_t behind = __ballot_sync(~0u, up_to > share.begin);
        if (behind) {
            const int of = __ffs(behind) - 1;
            share.request = base + of;
            share.before = __shfl_sync(~0u, up_to - own, of);
            break;
        }
        share.before = __shfl_sync(~0u, up_to, 31);
    }
    return share;
}

}  // namespace mla::sm90::indexer
