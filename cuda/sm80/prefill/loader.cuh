// Copies rows of queries, keys and values to shared memory, zeros behind a request's last row.
#pragma once

#include "config.cuh"
#include "ptx/sm80.cuh"
#include "ptx/special.cuh"

namespace mla::sm80::prefill {

// Rows of one tensor, or of two side by side. Strides in bytes.
struct Source {
    const char* first;
    int64_t first_stride;
    // From column `split` on, a multiple of 64.
    const char* second;
    int64_t second_stride;
    int split;
};

// Rows `begin` to `begin` + kRows - 1 of those that end at `end`. Called by all threads. Eight of
// them copy 128 bytes of a row, one row after another, so that two addresses are all they keep.
template <int kRows, int kColumns, int kThreads, bool kWhole>
__device__ __forceinline__ void copy_rows(uint32_t to, const Source& rows, int begin, int end) {
    using Tile = Rows<kColumns>;
    constexpr int kAtOnce = kThreads / 8, kChunks = Tile::kChunks;
    static_assert(kRows % kAtOnce == 0 && kAtOnce % 8 == 0);
    const int own_row = ptx::tid_x() / 8, own_chunk = ptx::tid_x() % 8;
    const char* first = rows.first + (begin + own_row) * rows.first_stride + own_chunk * 16;
    const char* second = rows.second + (begin + own_row) * rows.second_stride + own_chunk * 16;
    to += Tile::at(own_row, own_chunk);
    // Unrolled only where it is the rule: registers are few.
#pragma unroll(kWhole ? kRows / kAtOnce : 1)
    for (int i = 0; i < kRows / kAtOnce; ++i) {
        const bool exists = kWhole || begin + own_row + i * kAtOnce < end;
#pragma unroll
        for (int j = 0; j < (kChunks + 7) / 8; ++j) {
            const char* from =
                j * 64 < rows.split ? first + j * 128 : second + j * 128 - rows.split * 2;
            // An address behind the last row may be none.
            if (!exists) from = rows.first;
            if (kChunks % 8 == 0 || j * 8 + own_chunk < kChunks)
                ptx::cp_async_16(to + j * 128, from, exists);
        }
        first += kAtOnce * rows.first_stride;
        second += kAtOnce * rows.second_stride;
        to += kAtOnce * Tile::kPitch;
    }
}

template <int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void copy_rows(uint32_t to, const Source& rows, int begin, int end) {
    if (begin + kRows <= end)
        copy_rows<kRows, kColumns, kThreads, true>(to, rows, begin, end);
    else
        copy_rows<kRows, kColumns, kThreads, false>(to, rows, begin, end);
}

}  // namespace mla::sm80::prefill
