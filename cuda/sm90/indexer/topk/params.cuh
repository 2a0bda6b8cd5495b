// What the top-k kernel is given, and how it lays shared memory out.
#pragma once

#include <cstdint>

#include "../rows.cuh"

namespace mla::sm90::topk {

using indexer::Requests;
using indexer::Row;

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
// Bins of a histogram: 11 bits of a key at a time.
constexpr int kBinBits = 11;
constexpr int kBins = 1 << kBinBits;
constexpr int kMostCtas = 16;
// The most keys of one CTA: what its shared memory holds beside the rest.
constexpr int kMostKeys = 49152;

struct KernelParams {
    Requests rows;
    const float* logits;  // [rows, columns]
    int32_t* lists;       // [rows, topk]
    int64_t logits_stride;
    int64_t list_stride;
    int topk;
    int vectors;  // whether rows begin on 16 bytes
};

// What is found once for a row, by one CTA for the others to read or by each for itself.
struct Shared {
    uint32_t totals[kBins];  // the cluster's histogram
    uint32_t bins[kBins];    // this CTA's
    uint2 warp_range[kWarps];
    uint2 range;  // the least and the largest key of this CTA
    uint32_t warp_sums[kWarps];
    uint2 warp_counts[kWarps];
    uint2 counts;  // keys above the threshold, and equal to it, of this CTA
    uint32_t bin, above, inside;
    uint32_t padding;
};
static_assert(sizeof(Shared) % 16 == 0);

constexpr int shared_bytes(int keys) { return int(sizeof(Shared)) + keys * 4; }

}  // namespace mla::sm90::topk
