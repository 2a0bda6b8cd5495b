// What the top-k kernel is given, and how it lays shared memory out.
#pragma once

#include <cstdint>

#include "../../../common/pipeline.cuh"
#include "../rows.cuh"

namespace mla::sm90::topk {

using indexer::Requests;
using indexer::Row;

// Of a CTA, unless there are so many rows that each SM has four at a time.
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kThreadsOfMany = 256;
// Vectors of logits that a thread looks at together, while as many are on their way.
constexpr int kTogether = 4;
constexpr int kMostCtas = 16;
// The longest row: what shared memory holds two bits of for each position.
constexpr int kMostColumns = 786432;
// Logits that the threshold is guessed from, those that a thread looks at together, and threads
// whose logits lie together: 32 bytes of each of 256 places.
constexpr int kSamples = 2048;
constexpr int kSampled = 4;
constexpr int kSampledTogether = 2;
// Bins of a histogram of a whole cluster's keys, and the most keys that its CTAs compare: small,
// for shared memory of other CTAs is read slowly.
constexpr int kClusterBinBits = 8;
constexpr int kClusterBins = 1 << kClusterBinBits;
constexpr int kMostInside = 256;
struct KernelParams {
    Requests rows;
    const float* logits;  // [rows, columns]
    int32_t* lists;       // [rows, topk]
    int64_t logits_stride;
    int64_t list_stride;
    int topk;
    int vectors;     // whether rows begin on 16 bytes
    int candidates;  // how many a CTA has room for
    int resident;    // how many logits a CTA has room for
    int rows_ahead;  // whether `rows` are there before the kernel before has ended
};

// A logit that may be chosen: its bits and its position.
using Candidate = uint2;

// What the threads of a CTA have together.
template <int kOf>
struct SharedOf {
    static constexpr int kThreads = kOf, kWarps = kThreads / 32;
    // Bins of a histogram: so many bits of a key at a time, four bins for each thread.
    static constexpr int kBins = 4 * kThreads, kBinBits = kThreads == 512 ? 11 : 10;
    static_assert(kBins == 1 << kBinBits);
    // The most keys that are compared pair by pair.
    static constexpr int kMostPairs = kBins / 2;
    static constexpr int kSampledEach = kSamples / kSampled / kThreads;

    uint32_t bins[kBins];
    uint2 warp_range[kWarps];
    uint32_t warp_sums[kWarps];
    uint32_t bin, above, inside;
    uint32_t candidates;  // how many this CTA has found, which may be more than it has room for
    uint32_t pairs;
    uint32_t padding[3];
};

// The same of a CTA of few rows.
struct Shared : SharedOf<topk::kThreads> {
    Barrier<1> arrived;  // the logits of a resident row
    uint2 counts;        // what this CTA has above the threshold, and inside
    uint32_t totals[kClusterBins];
    uint64_t all[kMostInside];
};
static_assert(sizeof(Shared) % 16 == 0);
static_assert(sizeof(SharedOf<kThreadsOfMany>) % 16 == 0);
constexpr int kBins = Shared::kBins, kMostPairs = Shared::kMostPairs;
// A guess, four narrower rounds, and one more if the guess was wrong.
static_assert(6 * kClusterBins + kMostInside * 2 <= kBins);

// Words of a bit for each position.
__host__ __device__ constexpr int bitmap_words(int columns) {
    return (columns + 4 * 32 - 1) / (4 * 32) * 4;
}

// Behind `Shared`: the positions that are chosen, then the candidates, in whose place the list
// stands later, or the positions of logits that equal the threshold, or a resident row.
struct Buffers {
    uint32_t* chosen;
    Candidate* candidates;

    template <typename S>
    __device__ __forceinline__ Buffers(S& s, int columns)
        : chosen(reinterpret_cast<uint32_t*>(&s + 1)),
          candidates(reinterpret_cast<Candidate*>(chosen + bitmap_words(columns))) {}

    __device__ __forceinline__ uint32_t* equal() const {
        return reinterpret_cast<uint32_t*>(candidates);
    }
    __device__ __forceinline__ int32_t* positions() const {
        return reinterpret_cast<int32_t*>(candidates);
    }
    // Of a resident row: its logits, in whose place its list stands later, and the positions of
    // those that equal the threshold.
    __device__ __forceinline__ float* row() const { return reinterpret_cast<float*>(candidates); }
    __device__ __forceinline__ uint32_t* tied(int resident) const {
        return reinterpret_cast<uint32_t*>(row() + resident);
    }
};

// Of a resident row with a bit for each logit.
__host__ __device__ constexpr int resident_bytes(int logits) { return logits * 4 + logits / 8; }

}  // namespace mla::sm90::topk
