// The parameters of the top-k kernels, and their layout of shared memory.
#pragma once

#include <cstdint>

#include "../../../common/pipeline.cuh"
#include "../rows.cuh"

namespace mla::sm90::topk {

using indexer::Requests;
using indexer::Row;

// Number of threads of a CTA; it is kThreadsOfMany with enough rows for four CTAs on each SM.
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kThreadsOfMany = 256;
// Number of vectors of logits that a thread handles together. The next ones are in flight
// meanwhile.
constexpr int kTogether = 4;
constexpr int kMaxCtas = 16;
// Length of the longest row: shared memory holds two bits for each of its positions.
constexpr int kMaxColumns = 786432;
// Number of logits in a sample; number of logits that a thread loads together; number of
// neighbouring threads that load neighbouring logits. A sample thus has 32 bytes from each of 256
// places.
constexpr int kSamples = 2048;
constexpr int kSampled = 4;
constexpr int kSampledTogether = 2;
// Number of bins of a histogram of a whole cluster's keys, and maximum number of keys that its CTAs
// compare one by one (kMaxInside). Both are small, because reads of another CTA's shared memory are
// slow.
constexpr int kClusterBinBits = 8;
constexpr int kClusterBins = 1 << kClusterBinBits;
constexpr int kMaxInside = 256;
struct KernelParams {
    Requests rows;
    const float* logits;  // [rows, columns]
    int32_t* lists;       // [rows, topk]
    int64_t logits_stride;
    int64_t list_stride;
    int topk;
    int vectors;          // true if rows are aligned to 16 bytes
    int candidates;       // number of candidates that a CTA has room for
    int shared_resident;  // number of logits that a CTA has room for
    int rows_ahead;       // true if `rows` is complete before the previous kernel has ended
};

// A logit that may be chosen: its bits and its position.
using Candidate = uint2;

// Shared memory of a CTA of `kOf` threads.
template <int kOf>
struct SharedOf {
    static constexpr int kThreads = kOf, kWarps = kThreads / 32;
    // Bins of a histogram: kBinBits bits of a key at a time, four bins for each thread.
    static constexpr int kBins = 4 * kThreads, kBinBits = kThreads == 512 ? 11 : 10;
    static_assert(kBins == 1 << kBinBits);
    // Maximum number of keys that are compared pair by pair.
    static constexpr int kMaxPairs = kBins / 2;
    static constexpr int kSampledEach = kSamples / kSampled / kThreads;

    uint32_t bins[kBins];
    uint2 warp_range[kWarps];
    uint32_t warp_sums[kWarps];
    uint32_t bin, above, inside;
    uint32_t candidates;  // number that this CTA has found, which may be more than it has room for
    uint32_t pairs;
    uint32_t padding[3];
};

// Shared memory of a CTA if rows are few.
struct Shared : SharedOf<topk::kThreads> {
    // Completes when the data has come: the logits of a shared-resident row, or the candidates of a
    // register-resident one. This mbarrier is not behind the struct, because memory there is used
    // again, and only operations of mbarriers may touch a valid mbarrier.
    Barrier<0> arrived;
    uint2 counts;  // this CTA's keys above the threshold, and inside
    uint32_t totals[kClusterBins];
    uint64_t all[kMaxInside];
};
static_assert(sizeof(Shared) % 16 == 0);
static_assert(sizeof(SharedOf<kThreadsOfMany>) % 16 == 0);
constexpr int kBins = Shared::kBins, kMaxPairs = Shared::kMaxPairs;
// Each round has bins of its own: the estimate, four narrower rounds, and one more if the estimate
// was wrong.
static_assert(6 * kClusterBins + kMaxInside * 2 <= kBins);

// Words of a bitmap with a bit for each position.
__host__ __device__ constexpr int bitmap_words(int columns) {
    return (columns + 4 * 32 - 1) / (4 * 32) * 4;
}

// Memory behind `Shared`. The bitmap of chosen positions comes first. Behind it are the candidates,
// or the bitmap of logits that equal the threshold, or a shared-resident row. The list replaces the
// candidates later.
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
    // A shared-resident row: its logits, and the bitmap of those that equal the threshold. The list
    // replaces the logits later.
    __device__ __forceinline__ float* row() const { return reinterpret_cast<float*>(candidates); }
    __device__ __forceinline__ uint32_t* tied(int shared_resident) const {
        return reinterpret_cast<uint32_t*>(row() + shared_resident);
    }
};

// Bytes of a shared-resident row and of a bitmap of its logits.
__host__ __device__ constexpr int shared_resident_bytes(int logits) {
    return logits * 4 + logits / 8;
}

}  // namespace mla::sm90::topk
