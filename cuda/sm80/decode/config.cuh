// One instantiation of the kernel, and the layout of its shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "formats/e4m3_words.cuh"
#include "scheduler.cuh"
#include "sm80/split_combine.cuh"

namespace mla::sm80::decode {

// Position of a warp's loader. It lies in shared memory if rows are many and registers few.
struct alignas(16) LoaderState {
    // If the cache is paged: address of the next token, and number of tokens that its page still
    // has.
    const char* from;
    int page_left;
    // Number of tokens that the request still has, including the next one.
    int left;
    // The next tile to copy: its item, the number of tiles that the item has left, and the stage
    // that the tile goes to.
    int index, tiles, stage;
    // Nonzero if there is such a tile.
    int more;
};

// Element is the type of queries and output, and of a plain cache; P has the type Operand. A warp
// has 16 * WarpTiles query rows and a quarter of the Latent columns. RowGroups * 4 warps make a
// CTA. Tokens is the number of cached tokens per KV tile.
template <typename Element_, int Latent, CacheFormat Format, int WarpTiles, int RowGroups,
          int Tokens>
struct Config {
    using Element = Element_;
    static constexpr int kLatent = Latent;
    static constexpr CacheFormat kFormat = Format;
    static constexpr int kWarpTiles = WarpTiles;
    static constexpr int kRowGroups = RowGroups;
    static constexpr int kTokens = Tokens;

    // True if warps have roles (roles/). Here, every warp does the same.
    static constexpr bool kRoles = false;
    static constexpr int kWarps = kColumnGroups * RowGroups;
    // Number of threads that have some of the output, and number of threads of the whole CTA.
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kCtaThreads = kThreads;
    static constexpr int kWarpRows = 16 * WarpTiles;
    static constexpr int kRows = kWarpRows * RowGroups;
    // Number of CTAs per SM for which registers suffice.
    static constexpr int kCtasPerSm = RowGroups > 1                                ? 1
                                      : WarpTiles > 1                              ? 2
                                      : Tokens > 16 && Format != CacheFormat::e4m3 ? 2
                                      : Tokens > 16 || Latent > 256                ? 3
                                                                                   : 4;
    // True if a CTA computes one KV tile at a time. Otherwise it computes the scores of the next
    // one before the values of this one.
    static constexpr bool kOneStage = RowGroups == 1;
    // Minimum number of KV tiles that a CTA holds: those that are computed, and one in flight.
    static constexpr int kMinCtaStages = kOneStage ? 2 : 3;
    static constexpr int kMaxCtaStages = kMaxStages;
    // Number of latent columns of a warp, and number of steps of 16 that its GEMMs take over them.
    static constexpr int kColumns = Latent / kColumnGroups;
    static constexpr int kSteps = kColumns / 16;
    static constexpr bool kBytes = Format != CacheFormat::plain;
    // kGrouped is true if the groups of a row have scales. There is a group for each warp's
    // columns. With kTokenScale, all groups of a row have the same scale.
    static constexpr bool kTokenScale = Format == CacheFormat::e4m3_token;
    static constexpr bool kGrouped = Format == CacheFormat::e4m3_grouped || kTokenScale;
    // True for e4m3 with one scale. Both GEMMs then have operands of f16, and queries of bf16 are
    // converted to f16 with a factor per row. Grouped bytes are converted to the queries' type,
    // because their scales may have any size.
    static constexpr bool kHalves = Format == CacheFormat::e4m3;
    using Operand = std::conditional_t<kHalves, __half, Element>;
    // True if P times a scale has to lie in f16's range (scale_unit.cuh).
    static constexpr bool kScaleUnits = kGrouped && std::is_same_v<Element, __half>;
    // P is multiplied by 2^kLift, so that sums, or f16 operands, have bits for small values.
    static constexpr int kLift = kHalves || kScaleUnits ? 7
                                 : kGrouped             ? E4m3Fields<Element>::kLift
                                                        : 0;
    static constexpr float kUnlift = kLift == 7 ? 0x1p-7f : kLift == 60 ? 0x1p-60f : 1.f;
    static_assert(kLift == 0 || kLift == 7 || kLift == 60);
    // Factors that still have to be applied to the sums of both GEMMs.
    static constexpr float kScoreRest = kHalves    ? kE4m3HalfRest
                                        : kGrouped ? E4m3Fields<Element>::kRest
                                                   : 1.f;
    static constexpr float kOutputRest = kLift == 7 ? kScoreRest * kUnlift : kScoreRest;
    static constexpr int kLatentBytes = kBytes ? 1 : 2;
    static constexpr int kRopeBytes = Format == CacheFormat::e4m3 ? 1 : 2;
    // Offsets of the rotary values and of the scales in a cache row, and bytes from a group's scale
    // to the next one's.
    static constexpr int kRopeOffset =
        Latent * kLatentBytes + (kGrouped && !kTokenScale ? Latent / 128 * 4 : 0);
    static constexpr int kScaleOffset = Latent * kLatentBytes + (kTokenScale ? 64 * kRopeBytes : 0);
    static constexpr int kScaleStride = kTokenScale ? 0 : 4;
    // With 16 rows per row group, every warp computes the softmax of all rows and keeps P in
    // registers. With more rows, every warp computes the softmax of a quarter of them. The quarters
    // are then exchanged through shared memory.
    static constexpr bool kShared = WarpTiles > 1;
    // True if a warp's loader is in registers: 16 rows per warp leave enough of them.
    static constexpr bool kStateInRegisters = !kShared;
    static constexpr int kBlocks = Tokens / 8;

    using Scheduler = TileScheduler<kRows, Tokens>;

    // Bytes of shared memory that the scores take.
    static constexpr int kScoreBytes =
        kShared ? RowGroups * 16 * kBlocks * 32 * 8 : 2 * kColumnGroups * kBlocks * 32 * 16;
    // After a CTA's last item, a slice of the output is combined in the memory of the scores, which
    // is free then. This is its number of bytes.
    static constexpr int kSliceBytes = kScoreBytes;
    // Rows of P, whose chunks of 16 bytes are exchanged so that eight rows lie in different banks.
    static constexpr int kProbabilityPitch = Tokens * 2;
    __device__ static int probability_offset(int row, int chunk) {
        constexpr int kChunks = Tokens / 8;
        return row * kProbabilityPitch + (chunk ^ (row / (8 / kChunks) & (kChunks - 1))) * 16;
    }
    static constexpr int kProbabilityCopies = kGrouped ? kColumnGroups : 1;
    static constexpr int kProbabilityBytes =
        kShared ? kProbabilityCopies * kRows * kProbabilityPitch : 0;
    // Bytes for each warp's copy of a tile's scales, in their groups' units. Warps that make P of
    // several groups need it.
    static constexpr int kScaleBytes =
        kScaleUnits && kShared ? kWarps * kColumnGroups * Tokens * 4 : 0;
    struct WarpShared {
        typename Scheduler::Shared scheduler;
        // In a split cache: the page of the loader's next token.
        int page;
        LoaderState loader;
        // The item that is computed.
        int index;
        // One bit per token of a KV tile, set if its slot is valid.
        uint32_t valid[kMaxStages];
    };
    struct Statistics {
        // Factor by which each row's output has to be multiplied.
        float rescale[kRows];
        SplitShared<kRows> rows;
    };
    static constexpr int kScoreOffset = 0;
    static constexpr int kProbabilityOffset = kScoreOffset + kScoreBytes;
    static constexpr int kScalesOffset = kProbabilityOffset + kProbabilityBytes;
    static constexpr int kStatisticsOffset = kScalesOffset + kScaleBytes;
    static constexpr int kWarpOffset = kStatisticsOffset + int(sizeof(Statistics));
    static constexpr int kStagesOffset =
        (kWarpOffset + int(sizeof(WarpShared)) * kWarps + 15) & ~15;
    static_assert(kStatisticsOffset % 16 == 0 && kProbabilityOffset % 16 == 0);

    // Bytes of one cache row in the cache, and in shared memory. In shared memory a row has an odd
    // number of 16-byte chunks, so that the same chunks of eight rows lie in different banks.
    static constexpr int row_bytes(int rope_dim) {
        return kRopeOffset + rope_dim * kRopeBytes + (kTokenScale ? 16 : 0);
    }
    static constexpr int pitch(int rope_dim) { return ((row_bytes(rope_dim) + 15) / 16 | 1) * 16; }
    static constexpr size_t shared_bytes(int rope_dim, int stages) {
        return kStagesOffset + size_t(stages) * Tokens * pitch(rope_dim);
    }
    // A barrier of the warps that have some of the output.
    __device__ static void sync_output() { __syncthreads(); }
    // A partial result: the output fragments of all threads, then the rows' maxima and sums.
    static constexpr int kFragments = WarpTiles * (kColumns / 8);
    static constexpr int kPartialFloats = kFragments * kThreads * 4 + 2 * kRows;
};

}  // namespace mla::sm80::decode
