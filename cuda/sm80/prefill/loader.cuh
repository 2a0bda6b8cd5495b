// Copies rows of queries, keys and values to shared memory, zeros behind a request's last row.
#pragma once

#include "config.cuh"
#include "ptx/sm80.cuh"
#include "ptx/special.cuh"

namespace mla::sm80::prefill {

// Rows of one tensor, or of two side by side.
struct Rows {
    const char* first;
    int64_t first_stride;
    // From column chunk `split` on.
    const char* second;
    int64_t second_stride;
    int split;
};

// Rows first to first + kRows - 1 of those that end at `end`. Called by all threads.
template <int kRows, int kColumns, int kPitch, int kThreads>
__device__ __forceinline__ void copy_rows(uint32_t to, const Rows& rows, int first, int end) {
    // Eight threads copy 128 bytes of a row, one row after another: the addresses of several take
    // registers that the kernel has not got.
    constexpr int kAtOnce = kThreads / 8, kChunks = kColumns / 8;
    static_assert(kRows % kAtOnce == 0);
    const int thread = ptx::tid_x(), lane = thread % 8;
#pragma unroll 1
    for (int i = 0; i < kRows / kAtOnce; ++i) {
        const int row = i * kAtOnce + thread / 8;
        const bool exists = first + row < end;
        const int64_t source = exists ? first + row : 0;
        const char* left = rows.first + source * rows.first_stride;
        const char* right = rows.second + source * rows.second_stride;
#pragma unroll
        for (int j = 0; j < (kChunks + 7) / 8; ++j) {
            const int chunk = j * 8 + lane;
            const char* from =
                chunk < rows.split ? left + chunk * 16 : right + (chunk - rows.split) * 16;
            if (kChunks % 8 == 0 || chunk < kChunks)
                ptx::cp_async_16(to + row * kPitch + chunk * 16, from, exists);
        }
    }
}

}  // namespace mla::sm80::prefill
