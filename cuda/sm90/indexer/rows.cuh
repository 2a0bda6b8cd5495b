// The request of a query token, and the positions that it sees.
#pragma once

#include <cstdint>

namespace mla::sm90::indexer {

// Rows are query tokens of a batch: row r is token first_token + r.
struct Requests {
    const int32_t* query_starts;  // [requests + 1]
    const int32_t* seq_lens;      // [requests]
    const int32_t* block_table;   // [requests, max_pages]
    int64_t block_table_stride;
    int requests;
    int first_token;
    int columns;  // maximum number of positions of a row
    int max_pages;
    int page_size;
    int page_shift;  // log2 of page_size, or -1
    int slots;       // number of slots of the cache
};

inline int shift_of(int page_size) {
    for (int shift = 0; shift < 31; ++shift)
        if (page_size == 1 << shift) return shift;
    return -1;
}

struct Row {
    const int32_t* table;  // the request's pages
    int seen;              // number of positions that the row sees
    int length;            // length of the request
    int behind;            // query tokens of the request that come after this one
};

// Number of positions that a query token sees if `behind` query tokens of its request follow it.
__device__ __forceinline__ int seen_by(const Requests& p, int length, int behind) {
    return min(max(length - behind, 0), p.columns);
}

// The request of a token: the last one that begins at or before it, since requests without tokens
// begin where the next one does. A warp looks at 32 requests at a time.
__device__ __forceinline__ int request_of(const Requests& p, int token, int lane) {
    int first = 0, count = p.requests;
    while (count > 1) {
        const int step = (count + 31) / 32;
        const int at = first + lane * step;
        const bool before = lane * step < count && p.query_starts[at] <= token;
        // Starts ascend, so the lanes whose `before` is true come first.
        const int last = __popc(__ballot_sync(~0u, before)) - 1;
        const int skipped = max(last, 0) * step;
        first += skipped;
        count = min(step, count - skipped);
    }
    return first;
}

// The result is the same in all lanes.
__device__ __forceinline__ Row find_row(const Requests& p, int row, int lane) {
    const int token = p.first_token + row;
    // Decode usually has one token per request: then all loads are in flight at the same time.
    int request = min(token, p.requests - 1);
    const int start = p.query_starts[request];
    int end = p.query_starts[request + 1], len = p.seq_lens[request];
    if (start > token || end <= token) {
        request = request_of(p, token, lane);
        end = p.query_starts[request + 1];
        len = p.seq_lens[request];
    }
    // The request's last token sees all of its positions, and each earlier one sees one less.
    const int behind = end - 1 - token;
    return {p.block_table + request * p.block_table_stride, seen_by(p, len, behind), len, behind};
}

// The slot of a position, or -1 if the block table has no page of the cache there. With kPower, the
// page size is a power of two, and no division is needed.
template <bool kPower>
__device__ __forceinline__ int slot_of(const Requests& p, const Row& row, int position) {
    const int column = kPower ? position >> p.page_shift : position / p.page_size;
    const int offset = position - column * p.page_size;
    if (column >= p.max_pages) return -1;
    const int64_t slot = int64_t(row.table[column]) * p.page_size + offset;
    return slot >= 0 && slot < p.slots ? int(slot) : -1;
}

__device__ __forceinline__ int slot_of(const Requests& p, const Row& row, int position) {
    return p.page_shift >= 0 ? slot_of<true>(p, row, position) : slot_of<false>(p, row, position);
}

}  // namespace mla::sm90::indexer
