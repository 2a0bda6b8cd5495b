// Copies rows of queries, keys and values to shared memory, and zeros behind a request's last row.
#pragma once

#include "config.cuh"
#include "ptx/sm80.cuh"
#include "ptx/special.cuh"

namespace mla::sm80::prefill {

// Rows of one tensor, or of two side by side. Strides are in bytes.
struct Source {
    const char* first;
    int64_t first_stride;
    // Columns from `split` on, a multiple of 64.
    const char* second;
    int64_t second_stride;
    int split;
};

// A tile of kTileRows rows, copied by all threads: eight threads copy 128 bytes of a row, and each
// of them copies one chunk of every kStep-th row.
template <int kTileRows, int kColumns, int kThreads>
class TileCopy {
    using Tile = Rows<kColumns>;
    static constexpr int kStep = kThreads / 8, kChunks = Tile::kChunks;
    static_assert(kTileRows % kStep == 0 && kStep % 8 == 0);

  public:
    // Prepares this thread's copies of the rows from `begin` on.
    __device__ TileCopy(const Source& source, int begin, unsigned thread)
        : source_(source), thread_(thread) {
        const int64_t row = unsigned(begin) + own_row();
        source_.first += row * source.first_stride + own_chunk() * 16;
        source_.second += row * source.second_stride + own_chunk() * 16 - source.split * 2;
    }

    // Copies to `tile`; all rows exist.
    __device__ __forceinline__ void run(uint32_t tile) const {
        Source from = source_;
        const uint32_t to = tile + Tile::at(own_row(), own_chunk());
#pragma unroll
        for (int i = 0; i < kTileRows / kStep; ++i) {
            copy_row(to + i * kStep * Tile::kPitch, from, nullptr);
            from.first += kStep * from.first_stride;
            from.second += kStep * from.second_stride;
        }
    }

    // Copies to `tile`; `exist` rows exist, at least one, and the others are filled with zeros.
    __device__ __forceinline__ void run(uint32_t tile, int exist) const {
        if (exist >= kTileRows) return run(tile);
        Source from = source_;
        // Behind the last row, addresses may be invalid. The address of the tile's first row is
        // used instead.
        const char* some = from.first - int64_t(own_row()) * from.first_stride;
        uint32_t to = tile + Tile::at(own_row(), own_chunk());
#pragma unroll 1
        for (int row = own_row(); row < kTileRows; row += kStep) {
            copy_row(to, from, row < exist ? nullptr : some);
            from.first += kStep * from.first_stride;
            from.second += kStep * from.second_stride;
            to += kStep * Tile::kPitch;
        }
    }

  private:
    __device__ unsigned own_row() const { return thread_ / 8; }
    __device__ unsigned own_chunk() const { return thread_ % 8; }

    // Writes zeros if `instead` is given. cp.async then gets `instead` as its address.
    __device__ __forceinline__ void copy_row(uint32_t to, const Source& from,
                                             const char* instead) const {
#pragma unroll
        for (int j = 0; j < (kChunks + 7) / 8; ++j) {
            if (kChunks % 8 != 0 && j * 8 + own_chunk() >= kChunks) continue;
            const char* at = (j * 64 < from.split ? from.first : from.second) + j * 128;
            ptx::cp_async_16(to + j * 128, instead ? instead : at, !instead);
        }
    }

    Source source_;
    unsigned thread_;
};

}  // namespace mla::sm80::prefill
