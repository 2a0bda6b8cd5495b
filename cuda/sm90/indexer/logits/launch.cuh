// How rows are divided, and the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "../../../common/device.cuh"
#include "kernel.cuh"

namespace mla::sm90::logits {

// CTAs that an SM runs at a time, about; several times as many leave no SM without work for long.
constexpr int kCtasPerSm = 5;
constexpr int kWaves = 4;
constexpr int kLeastKeys = 256, kMostKeys = 4096;

// The keys of a CTA.
inline int choose_keys(int64_t rows, int columns, int multiprocessors) {
    const int64_t ctas = int64_t(multiprocessors) * kCtasPerSm * kWaves;
    const int64_t even = ceil_div(rows * columns, ctas);
    const int64_t keys = std::clamp<int64_t>(even, kLeastKeys, kMostKeys);
    return int(ceil_div(keys, kTileKeys)) * kTileKeys;
}

inline MlaStatus launch(KernelParams p, int rows, int heads, int keys, void* stream) {
    p.keys = keys;
    p.parts = int(ceil_div(p.rows.columns, keys));
    const dim3 grid = {unsigned(rows) * unsigned(p.parts), 1, 1};
    const auto kernel = heads == 32 ? &logits_kernel<32> : &logits_kernel<64>;
    return mla::launch("index logits", kernel, grid, {kThreads, 1, 1}, stream, p);
}

}  // namespace mla::sm90::logits
