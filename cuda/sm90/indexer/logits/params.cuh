// The parameters of the index logits kernel, and its layout of shared memory.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "../../../common/pipeline.cuh"
#include "../scheduler.cuh"

namespace mla::sm90::logits {

// Width of a key and of a query, in e4m3 values of one byte.
constexpr int kWidth = 128;
using indexer::kTileKeys;
constexpr int kTileBytes = kTileKeys * kWidth;

struct KernelParams {
    CUtensorMap keys;     // [pages, page_size, 128] e4m3, in boxes of `box` keys
    CUtensorMap queries;  // [rows * heads, 128] e4m3, in boxes of the columns of a warpgroup
    indexer::Requests rows;
    const float* weights;  // [rows, heads]
    const uint8_t* cache;  // pages of [page_size, 128] e4m3 and [page_size] f32
    float* logits;         // [rows, columns]
    int64_t page_stride;   // in bytes
    int64_t logits_stride;
    int count;          // number of rows
    int blocks;         // number of blocks; a CTA handles the rows of a block together
    int equal_ranges;   // true if CTAs have equal ranges of all tiles, instead of items
    int ranges;         // number of ranges of columns
    int keys_of_range;  // a multiple of kTileKeys
    int pages;
    int box;          // keys of a box, a divisor of pages and tiles
    int stream_once;  // true if only one CTA reads a key
    int facts_ahead;  // true if requests are known before the previous kernel has ended
};

// The config of a CTA. `tokens` query tokens are the B operand of an MMA. The consumer warpgroups
// either take turns with KV tiles, or have tokens of their own.
template <int heads, int tokens, bool own_tokens, int consumers, int ctas>
struct Config {
    static constexpr int kHeads = heads;
    static constexpr int kTokens = tokens;
    static constexpr bool kOwnTokens = own_tokens;
    // Consumer warpgroups.
    static constexpr int kConsumers = consumers;
    // CTAs of an SM.
    static constexpr int kCtas = ctas;
    static constexpr int kColumns = heads * tokens;
    // A warpgroup multiplies a tile in parts: it sums over the heads of one part while the MMAs of
    // the next one run.
    static constexpr int kParts = (kColumns + 127) / 128;
    static constexpr int kColumnsOfPart = kColumns / kParts;
    static constexpr int kTokensOfPart = tokens / kParts;
    // One warp loads. If there are several parts, the producer gives registers away. Only a whole
    // warpgroup can do that.
    static constexpr bool kGivesRegisters = kParts > 1;
    static constexpr int kThreads = consumers * 128 + (kGivesRegisters ? 128 : 32);
    static constexpr int kBlock = own_tokens ? tokens * consumers : tokens;
    static constexpr int kQueryBytes = kBlock * heads * kWidth;
    // Distance from one KV tile of a warpgroup to its next one.
    static constexpr int kStep = own_tokens ? 1 : consumers;
    // A stage always belongs to the same warpgroup, which thus sees every phase of its barrier.
    static constexpr int kStages =
        (220 * 1024 / ctas - 2 * kQueryBytes - 2048) / (kTileBytes + kTileKeys * 4) / kStep * kStep;
};

// Work item: tokens of one request, and a range of its positions.
struct WorkItem {
    int first;       // row of the block's first token
    int begin, end;  // rows that belong to the request
    int length;      // length of the request
    int behind;      // tokens of the request that come after row `begin`
    int key, keys;   // first position; number of positions, 0 after the last item
};

template <typename C>
struct Shared {
    char keys[C::kStages][kTileBytes];
    char queries[2][C::kQueryBytes];
    float scales[C::kStages][kTileKeys];
    WorkItem items[2];
    Barrier<1> keys_full[C::kStages];
    // The warps of the stage's warpgroup arrive; with kOwnTokens, those of all consumer warpgroups.
    Barrier<C::kOwnTokens ? 4 * C::kConsumers : 4> keys_empty[C::kStages];
    Barrier<1> queries_full[2];
    // All consumer threads arrive, since each of them reads the item.
    Barrier<128 * C::kConsumers> queries_empty[2];
};

// Tiles begin at multiples of 1024 bytes, but dynamic shared memory may begin anywhere.
template <typename C>
constexpr int kSharedBytes = int(sizeof(Shared<C>)) + 1024;

}  // namespace mla::sm90::logits
