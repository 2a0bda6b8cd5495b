// What the kernel of index logits is given, and how it lays shared memory out.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "../../../common/pipeline.cuh"
#include "../shares.cuh"

namespace mla::sm90::logits {

// Values of a key and of a query: bytes of e4m3.
constexpr int kWidth = 128;
using indexer::kTileKeys;
constexpr int kTileBytes = kTileKeys * kWidth;

struct KernelParams {
    CUtensorMap keys;     // [pages, page_size, 128] e4m3, in boxes of `box` keys
    CUtensorMap queries;  // [rows * heads, 128] e4m3, in boxes of what is multiplied at once
    indexer::Requests rows;
    const float* weights;  // [rows, heads]
    const uint8_t* cache;  // pages of [page_size, 128] e4m3 and [page_size] f32
    float* logits;         // [rows, columns]
    int64_t page_stride;   // in bytes
    int64_t logits_stride;
    int count;          // rows
    int blocks;         // of as many rows as a CTA does together
    int shares;         // whether CTAs have equal shares of all tiles, instead of items
    int ranges;         // of the columns
    int keys_of_range;  // a multiple of kTileKeys
    int pages;
    int box;          // what pages and tiles are multiples of
    int stream_once;  // whether keys are read by one CTA alone
    int facts_ahead;  // whether requests are known before the kernel before has ended
};

// How a CTA works: so many query tokens are the second operand of a product, and its warpgroups
// either take turns with tiles of keys, or multiply each with tokens of their own.
template <int heads, int tokens, bool own_tokens, int consumers, int ctas>
struct Config {
    static constexpr int kHeads = heads;
    static constexpr int kTokens = tokens;
    static constexpr bool kOwnTokens = own_tokens;
    // Warpgroups that multiply.
    static constexpr int kConsumers = consumers;
    // CTAs of an SM.
    static constexpr int kCtas = ctas;
    static constexpr int kColumns = heads * tokens;
    // A warpgroup multiplies a tile in parts: it sums over the heads of one while the next runs.
    static constexpr int kParts = (kColumns + 127) / 128;
    static constexpr int kColumnsOfPart = kColumns / kParts;
    static constexpr int kTokensOfPart = tokens / kParts;
    // One warp loads. Where there are several parts it gives registers away, which a whole
    // warpgroup has to do.
    static constexpr bool kGivesRegisters = kParts > 1;
    static constexpr int kThreads = consumers * 128 + (kGivesRegisters ? 128 : 32);
    static constexpr int kBlock = own_tokens ? tokens * consumers : tokens;
    static constexpr int kQueryBytes = kBlock * heads * kWidth;
    // Tiles of keys from one that a warpgroup has to its next.
    static constexpr int kStep = own_tokens ? 1 : consumers;
    // A stage is always the same warpgroup's, which thus sees every phase of its barrier.
    static constexpr int kStages =
        (220 * 1024 / ctas - 2 * kQueryBytes - 2048) / (kTileBytes + kTileKeys * 4) / kStep * kStep;
};

// Tokens of one request, and a range of its positions.
struct Job {
    int first;       // row of the block's first token
    int begin, end;  // rows that belong to the request
    int length;      // of the request
    int behind;      // tokens of the request that come after row `begin`
    int key, keys;   // the first position and how many; 0 after the last job
};

template <typename C>
struct Shared {
    char keys[C::kStages][kTileBytes];
    char queries[2][C::kQueryBytes];
    float scales[C::kStages][kTileKeys];
    Job jobs[2];
    Barrier<1> keys_full[C::kStages];
    // A warpgroup's warps, or those of all.
    Barrier<C::kOwnTokens ? 4 * C::kConsumers : 4> keys_empty[C::kStages];
    Barrier<1> queries_full[2];
    // All threads that multiply, each of which reads the job.
    Barrier<128 * C::kConsumers> queries_empty[2];
};

// A tile starts on 1024 bytes, which dynamic shared memory need not.
template <typename C>
constexpr int kSharedBytes = int(sizeof(Shared<C>)) + 1024;

}  // namespace mla::sm90::logits
