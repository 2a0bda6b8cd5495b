// Equal shares of all rows' tiles of keys, one row after the other: whatever the lengths are, CTAs
// end together. Each of them reads all lengths, so rows must be few.
#pragma once

#include "../../ptx/lanes.cuh"
#include "rows.cuh"

namespace mla::sm90::indexer {

// Keys of one product of a warpgroup.
constexpr int kTileKeys = 64;

__host__ __device__ constexpr int tiles_for(int keys) { return (keys + kTileKeys - 1) / kTileKeys; }

// The tiles that a row has, each lane another row; 0 if there is no such row.
__device__ __forceinline__ int tiles_of(const Requests& p, int row, int rows, int lane) {
    const int token = p.first_token + min(row, rows - 1);
    int request = min(token, p.requests - 1);
    int start = p.query_starts[request], end = p.query_starts[request + 1];
    int len = p.seq_lens[request];
    for (uint32_t other = __ballot_sync(~0u, start > token || end <= token); other;
         other &= other - 1) {
        const int of = __ffs(other) - 1;
        request = request_of(p, __shfl_sync(~0u, token, of), lane);
        if (lane == of) end = p.query_starts[request + 1], len = p.seq_lens[request];
    }
    return row < rows ? tiles_for(seen_by(p, len, end - 1 - token)) : 0;
}

// A CTA's share of all rows' tiles, and the row in which it begins.
struct Share {
    int begin, end;
    int row;
    int before;  // tiles of the rows before that one
};

// The same in every lane.
__device__ __forceinline__ Share share_of(const Requests& p, int rows, int cta, int ctas,
                                          int lane) {
    int all = 0;
    for (int base = 0; base < rows; base += 32) all += tiles_of(p, base + lane, rows, lane);
    all = __reduce_add_sync(~0u, all);
    const int each = (all + ctas - 1) / ctas;
    Share share = {cta * each, min((cta + 1) * each, all), 0, 0};
    for (int base = 0; share.begin < share.end; base += 32) {
        const int own = tiles_of(p, base + lane, rows, lane);
        const int up_to = share.before + int(ptx::inclusive_sum(uint32_t(own)));
        const uint32_t behind = __ballot_sync(~0u, up_to > share.begin);
        if (behind) {
            const int of = __ffs(behind) - 1;
            share.row = base + of;
            share.before = __shfl_sync(~0u, up_to - own, of);
            break;
        }
        share.before = __shfl_sync(~0u, up_to, 31);
    }
    return share;
}

}  // namespace mla::sm90::indexer
