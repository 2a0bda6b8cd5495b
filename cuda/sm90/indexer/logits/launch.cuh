// The division of rows and columns among CTAs, and the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <numeric>

#include "../../../common/device.cuh"
#include "../launch.cuh"
#include "kernel.cuh"

namespace mla::sm90::logits {

// A config whose warpgroups take turns with the KV tiles of a block of tokens. The block fills
// `columns` columns. If it has one token, memory is the limit. Several CTAs of an SM, each with a
// loading warp of its own, then hide latency. With 128 columns, the registers suffice for one
// consumer warpgroup in each of these CTAs; with 256 columns, they suffice for one CTA.
template <int heads, int columns>
using AlternateTiles =
    Config<heads, columns / heads, false, columns == 128 ? 1 : 2, columns == 256 ? 1 : 3>;
// A config whose warpgroups each have tokens of their own, which fill `columns` columns.
template <int heads, int columns, int consumers>
using OwnTokens = Config<heads, columns / heads, true, consumers, 1>;

// Cost of beginning a work item, as a number of keys.
constexpr int kItemKeys = 192;

// Number of ranges of columns with which all CTAs are done earliest.
inline int choose_ranges(int64_t blocks, int columns, int64_t ctas) {
    int best = 1;
    int64_t min_cost = INT64_MAX;
    const int max_ranges = int(std::min<int64_t>(ceil_div(columns, kTileKeys), 512));
    for (int ranges = 1; ranges <= max_ranges; ++ranges) {
        const int64_t keys = ceil_div(ceil_div(columns, ranges), kTileKeys) * kTileKeys;
        const int64_t cost = ceil_div(blocks * ceil_div(columns, keys), ctas) * (keys + kItemKeys);
        if (cost < min_cost) min_cost = cost, best = ranges;
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

// Maximum number of blocks of rows for which CTAs have equal ranges of tiles. To find its range,
// every CTA reads the lengths of all of them.
constexpr int kMaxSharing = 512;

template <typename C>
MlaStatus launch(KernelParams p, const void* queries, int multiprocessors, void* stream) {
    const int ctas = C::kCtas * multiprocessors;
    p.blocks = int(ceil_div(p.count, C::kBlock));
    // The ranges of a single block are equal anyway.
    p.equal_ranges = p.blocks > 1 && p.blocks <= kMaxSharing;
    p.ranges = choose_ranges(p.blocks, p.rows.columns, ctas);
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
        int64_t(p.blocks) * (p.equal_ranges ? indexer::tiles_for(p.rows.columns) : p.ranges);
    const dim3 grid(unsigned(std::min<int64_t>(ctas, items)));
    return indexer::launch_early("index logits", kernel, {grid, C::kThreads, kSharedBytes<C>},
                                 stream, p);
}

// Chooses the config by the mean number of query tokens of a request. Each block of a request's
// tokens is multiplied with all of the request's keys. A block that is not full takes as long as a
// full one.
template <int heads>
MlaStatus launch_of(const KernelParams& p, const void* queries, int multiprocessors, void* stream) {
    const auto with = [&](auto config) {
        return launch<decltype(config)>(p, queries, multiprocessors, stream);
    };
    const int64_t rows = p.count, requests = p.rows.requests;
    if (2 * rows <= 3 * requests) return with(AlternateTiles<heads, heads>());
    const int64_t columns = ceil_div(rows, requests) * heads;
    if (columns <= 2 * heads) return with(AlternateTiles<heads, 2 * heads>());
    if (columns <= 128) return with(AlternateTiles<heads, 128>());
    // Relative times of the blocks of a request, as measured on an H100.
    const int64_t by_256 = ceil_div(columns, 256) * 72, by_384 = ceil_div(columns, 384) * 105,
                  by_512 = ceil_div(columns, 512) * 130;
    if (by_256 <= std::min(by_384, by_512)) return with(AlternateTiles<heads, 256>());
    if (by_384 <= by_512) return with(OwnTokens<heads, 128, 3>());
    return with(OwnTokens<heads, 256, 2>());
}

inline MlaStatus launch(const KernelParams& p, const void* queries, int heads, int multiprocessors,
                        void* stream) {
    return heads == 32 ? launch_of<32>(p, queries, multiprocessors, stream)
                       : launch_of<64>(p, queries, multiprocessors, stream);
}

}  // namespace mla::sm90::logits
