// What the kernel of index logits is given.
#pragma once

#include <cstdint>

#include "../rows.cuh"

namespace mla::sm90::logits {

// One warpgroup; an SM runs several such CTAs, which hide each other's waits.
constexpr int kThreads = 128;
// Keys of one product.
constexpr int kTileKeys = 64;
// Values of a key and of a query: bytes of e4m3.
constexpr int kWidth = 128;

struct KernelParams {
    indexer::Requests rows;
    const uint8_t* queries;  // [rows, heads, 128] e4m3
    const float* weights;    // [rows, heads]
    const uint8_t* cache;    // pages of [page_size, 128] e4m3 and [page_size] f32
    float* logits;           // [rows, columns]
    int64_t page_stride;     // in bytes
    int64_t logits_stride;
    int parts;  // CTAs of a row
    int keys;   // of a part, a multiple of kTileKeys
};

}  // namespace mla::sm90::logits
