// One instantiation of the kernel, and the layout of its shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>

#include "params.cuh"
#include "sm80/split_combine.cuh"

namespace mla::sm80::prefill {

// The state of a CTA. It lies in shared memory, so it occupies no registers between uses.
struct CtaState {
    // The request's first query row in the batch; the CTA's first row within the request; and the
    // number of the request's rows from that one on.
    int query_begin, first_row, rows;
    int head;
    // Addresses of the request's first key and value for the head.
    const char *nope, *rope, *values;
    // The CTA's first KV tile.
    int first_tile;
    // `needed` is the end of the CTA's keys that any of its rows sees. `seen` is the number of keys
    // that its first row would see if there were enough. `last_whole` is the last KV tile whose
    // keys are all needed.
    int needed, seen, last_whole;
    // End of the KV tiles that are followed by another whole one, or by none.
    int whole_end;
    // The CTAs that divide these keys: their number, this CTA's index among them, the index of
    // their counters, and the slot of the first one's partial result. `patience` is the number of
    // cycles that they wait for each other.
    int splits, split, counter, first_slot;
    int64_t patience;
    // The last KV tile in which a value was found that is not finite.
    int nonfinite;
};

// Rows of 16-bit numbers in shared memory. Chunks (16 bytes) in the same place of eight rows lie in
// different banks. Rows of whole 128 bytes are therefore swizzled, as by `swizzled`, and other rows
// are padded to an odd number of chunks. The first row begins at a multiple of 128 bytes.
template <int kColumns>
struct Rows {
    static constexpr int kChunks = kColumns / 8;
    static constexpr bool kSwizzled = kChunks % 8 == 0;
    static constexpr int kPitch = kSwizzled ? kColumns * 2 : kColumns * 2 + 16;
    static_assert(kSwizzled || kChunks % 2 == 0);

    // Offset in bytes from the first row. `chunk` is one of the first eight.
    __device__ static constexpr int at(unsigned row, unsigned chunk) {
        return row * kPitch + (kSwizzled ? chunk ^ row % 8 : chunk) * 16;
    }
    // The address that lies `chunks` chunks to the right of `at`. `chunks` is an even number, and
    // `at` is the address of one of a row's first two chunks.
    __device__ static constexpr uint32_t right(uint32_t at, int chunks) {
        return kSwizzled ? (at ^ chunks % 8 * 16) + chunks / 8 * 128 : at + chunks * 16;
    }
};

// A CTA has Warps * WarpTiles * 16 query rows of one head; `Keys` is the number of keys of a KV
// tile.
template <typename Element_, int QkDim, int VDim, int WarpTiles, int Warps, int Keys>
struct Config {
    using Element = Element_;
    using QkRows = Rows<QkDim>;
    using VRows = Rows<VDim>;
    static constexpr int kQkDim = QkDim;
    static constexpr int kVDim = VDim;
    static constexpr int kWarpTiles = WarpTiles;
    static constexpr int kKeys = Keys;
    static constexpr int kThreads = 32 * Warps;
    static constexpr int kWarpRows = 16 * WarpTiles;
    static constexpr int kRows = kWarpRows * Warps;
    // Number of CTAs for which the registers of an SM suffice.
    static constexpr int kCtasPerSm = WarpTiles == 1 && VDim <= 128 ? 3 : 2;

    static constexpr int kKeyOffset = kRows * QkRows::kPitch;
    static constexpr int kValueOffset = kKeyOffset + Keys * QkRows::kPitch;
    static constexpr int kStateOffset = kValueOffset + Keys * VRows::kPitch;
    static constexpr int kSharedBytes = kStateOffset + int(sizeof(CtaState));
    static_assert(kKeyOffset % 128 == 0 && kValueOffset % 128 == 0);

    // These take the place of the keys when no more keys come.
    static constexpr int kStatisticsOffset = kKeyOffset;
    static constexpr int kExchangeOffset = kStatisticsOffset + int(sizeof(SplitShared<kRows>));
    static_assert(kStatisticsOffset % 16 == 0 && sizeof(SplitShared<kRows>) % 16 == 0);
    static_assert(kExchangeOffset + kThreads * 16 <= kStateOffset);

    // Columns of a key that the head has for itself; 0 if the instantiation serves more than one
    // number.
    static constexpr int kNopeDim = QkDim == 192 ? 128 : QkDim == 256 ? 0 : 64;
};

}  // namespace mla::sm80::prefill
