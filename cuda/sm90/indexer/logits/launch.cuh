// How rows and columns are divided, and the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <numeric>

#include "../../../common/device.cuh"
#include "../launch.cuh"
#include "kernel.cuh"

namespace mla::sm90::logits {

// One token for each request: memory is the limit, and several CTAs of an SM hide waits.
template <int heads>
using OneToken = Config<heads, 1, false, 2, 1, 3>;
// Two tokens share a request's keys. Three CTAs of an SM, each with a warp that loads for it, take
// less time than more warpgroups of one; with 64 heads there are no registers for two in each.
template <int heads>
using TwoTokens = Config<heads, 2, false, heads == 32 ? 2 : 1, 1, 3>;
// Many tokens: each warpgroup has 128 columns of its own.
template <int heads>
using ManyTokens = Config<heads, 128 / heads, true, 3, 1, 1>;

// What beginning an item costs, in keys.
constexpr int kItemKeys = 192;

// The number of ranges of columns that keeps all CTAs busy for the shortest time.
inline int choose_ranges(int64_t blocks, int columns, int64_t ctas) {
    int best = 1;
    int64_t least = INT64_MAX;
    const int most = int(std::min<int64_t>(ceil_div(columns, kTileKeys), 512));
    for (int ranges = 1; ranges <= most; ++ranges) {
        const int64_t keys = ceil_div(ceil_div(columns, ranges), kTileKeys) * kTileKeys;
        const int64_t cost = ceil_div(blocks * ceil_div(columns, keys), ctas) * (keys + kItemKeys);
        if (cost < least) least = cost, best = ranges;
    }
    return best;
}

inline MlaStatus describe(CUtensorMap& map, const void* base, const cuuint64_t (&sizes)[3],
                          const cuuint64_t (&strides)[2], cuuint32_t box) {
    EncodeTiled encode;
    const MlaStatus s = encode_tiled(encode);
    if (s.code != MLA_OK) return s;
    const cuuint32_t boxes[3] = {kWidth, box, 1}, steps[3] = {1, 1, 1};
    const CUresult r =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(base), sizes, strides,
               boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS)
        return {MLA_CUDA_ERROR, int32_t(r), "cuTensorMapEncodeTiled", int64_t(r), "success"};
    return ok();
}

// Blocks of rows whose lengths every CTA reads, to find its share.
constexpr int kMostSharing = 512;

template <typename C>
MlaStatus launch(KernelParams p, const void* queries, int multiprocessors, void* stream) {
    const int ctas = C::kCtas * multiprocessors;
    p.blocks = int(ceil_div(p.count, C::kBlock));
    // Ranges of one block are equal anyway.
    p.shares = C::kShares && p.ranges == 0 && p.blocks > 1 && p.blocks <= kMostSharing;
    if (p.ranges == 0) p.ranges = choose_ranges(p.blocks, p.rows.columns, ctas);
    const int64_t keys = ceil_div(p.rows.columns, p.ranges);
    p.keys_of_range = int(ceil_div(keys, kTileKeys)) * kTileKeys;
    p.ranges = int(ceil_div(p.rows.columns, p.keys_of_range));
    p.box = std::gcd(p.rows.page_size, kTileKeys);
    p.stream_once = p.blocks <= p.rows.requests;

    const cuuint64_t rows = cuuint64_t(p.rows.page_size), stride = cuuint64_t(p.page_stride);
    MlaStatus s = describe(p.keys, p.cache, {kWidth, rows, cuuint64_t(p.pages)}, {kWidth, stride},
                           cuuint32_t(p.box));
    if (s.code != MLA_OK) return s;
    const cuuint64_t heads = cuuint64_t(p.count) * C::kHeads;
    s = describe(p.queries, queries, {kWidth, heads, 1}, {kWidth, heads * kWidth}, C::kColumns);
    if (s.code != MLA_OK) return s;

    const auto kernel = &logits_kernel<C>;
    s = cuda_status(
        "cudaFuncSetAttribute",
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<C>));
    if (s.code != MLA_OK) return s;
    const int64_t items =
        int64_t(p.blocks) * (p.shares ? indexer::tiles_for(p.rows.columns) : p.ranges);
    const dim3 grid(unsigned(std::min<int64_t>(ctas, items)));
    return indexer::launch_early("index logits", kernel, {grid, C::kThreads, kSharedBytes<C>},
                                 stream, p);
}

// By how many tokens a request has.
inline MlaStatus launch(const KernelParams& p, const void* queries, int heads, int multiprocessors,
                        void* stream) {
    const int64_t rows = p.count, requests = p.rows.requests;
    if (2 * rows <= 3 * requests)
        return heads == 32 ? launch<OneToken<32>>(p, queries, multiprocessors, stream)
                           : launch<OneToken<64>>(p, queries, multiprocessors, stream);
    if (rows <= 2 * requests)
        return heads == 32 ? launch<TwoTokens<32>>(p, queries, multiprocessors, stream)
                           : launch<TwoTokens<64>>(p, queries, multiprocessors, stream);
    return heads == 32 ? launch<ManyTokens<32>>(p, queries, multiprocessors, stream)
                       : launch<ManyTokens<64>>(p, queries, multiprocessors, stream);
}

}  // namespace mla::sm90::logits
