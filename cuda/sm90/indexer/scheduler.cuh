// Tile scheduler that gives CTAs equal ranges of the KV tiles of all requests, one request after
// the other. CTAs therefore end together, whatever the lengths are. Every CTA reads all lengths, so
// requests must be few.
#pragma once

#include "../../ptx/lanes.cuh"
#include "rows.cuh"

namespace mla::sm90::indexer {

// Keys of one MMA of a warpgroup.
constexpr int kTileKeys = 64;

__host__ __device__ constexpr int tiles_for(int keys) { return (keys + kTileKeys - 1) / kTileKeys; }

// The rows of a request among a batch's `rows` rows, and the request's length.
struct RequestRows {
    int begin, end;
    int last;    // the request's last row, which may be behind `rows`
    int length;  // length of the request

    // `request` must exist in the batch.
    static __device__ __forceinline__ RequestRows of(const Requests& p, int request, int rows) {
        const int start = p.query_starts[request] - p.first_token;
        const int end = p.query_starts[request + 1] - p.first_token;
        return {max(start, 0), min(end, rows), end - 1, p.seq_lens[request]};
    }

    // Number of positions that the last of up to `block` rows from `row` on sees. None of these
    // rows sees more.
    __device__ __forceinline__ int seen(const Requests& p, int row, int block) const {
        return seen_by(p, length, last - (min(row + block, end) - 1));
    }

    // Number of KV tiles of all blocks of `block` rows. The rows of a block share its KV tiles.
    __device__ __forceinline__ int tiles(const Requests& p, int block) const {
        int all = 0;
        for (int row = begin; row < end; row += block) all += tiles_for(seen(p, row, block));
        return all;
    }
};

// A CTA's range of the tiles of all requests, and the request in which it begins.
struct TileRange {
    int begin, end;
    int request;
    int before;  // tiles of the requests before that one
};

// The result is the same in all lanes.
template <int block>
__device__ __forceinline__ TileRange tile_range_of(const Requests& p, int rows, int cta, int ctas,
                                                   int lane) {
    int first = 0, last = p.requests - 1;
    // With more requests than rows, some requests have none of these rows.
    if (last >= rows) {
        first = request_of(p, p.first_token, lane);
        last = request_of(p, p.first_token + rows - 1, lane);
    }
    int all = 0;
    // Each lane loads the lengths of four requests before it uses the first of them, because these
    // loads may miss L2. The loop below loads the lengths again, and then hits a cache.
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
    TileRange range = {cta * each, min((cta + 1) * each, all), first, 0};
    for (int base = first; range.begin < range.end; base += 32) {
        const int request = base + lane;
        const int own = request <= last ? RequestRows::of(p, request, rows).tiles(p, block) : 0;
        const int up_to = range.before + int(ptx::inclusive_sum(uint32_t(own)));
        const uint32_t behind = __ballot_sync(~0u, up_to > range.begin);
        if (behind) {
            const int of = __ffs(behind) - 1;
            range.request = base + of;
            range.before = __shfl_sync(~0u, up_to - own, of);
            break;
        }
        range.before = __shfl_sync(~0u, up_to, 31);
    }
    return range;
}

}  // namespace mla::sm90::indexer
