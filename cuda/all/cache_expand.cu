// The C interface of expansions from a cache. It checks every argument, describes the tensors, and
// launches the kernel.

#include <algorithm>

#include "../common/device.cuh"
#include "../common/one_row.cuh"
#include "cache_expand.cuh"
#include "helpers.cuh"

namespace mla {
namespace {

using Kernel = void (*)(ExpandPlan, ExpandMaps);

Kernel expand_kernel(int dtype) {
    return dtype == MLA_DTYPE_F16 ? cache_expand_kernel<__half>
                                  : cache_expand_kernel<__nv_bfloat16>;
}

// The tables of a tensor's rows: one segment of any number of them, on page 0.
__device__ const int32_t tensor_tables[2] = {0, INT32_MAX};

// Makes a tensor's rows those of one page.
MlaStatus make_page(MlaCacheGatherParams& rows) {
    void* tables = nullptr;
    const cudaError_t e = cudaGetSymbolAddress(&tables, tensor_tables);
    rows.row_starts = rows.token_starts = rows.block_table = static_cast<const int32_t*>(tables);
    rows.rope = nullptr;
    rows.cache_page_stride = rows.cache_slot_stride;
    rows.page_size = std::max(rows.rows, 1);
    rows.pages = rows.max_pages = rows.segments = 1;
    return cuda_status("cudaGetSymbolAddress", e);
}

// Extents of axes, innermost first; strides of all but the first, in bytes; extents of a box.
struct Tensor {
    const void* base;
    cuuint64_t extents[4], strides[3];
    cuuint32_t box[4];
};

MlaStatus describe(EncodeTiled encode, int dtype, int rank, const Tensor& t, CUtensorMap& map) {
    constexpr cuuint32_t steps[4] = {1, 1, 1, 1};
    const CUresult r = encode(
        &map,
        dtype == MLA_DTYPE_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        rank, const_cast<void*>(t.base), t.extents, t.strides, t.box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA);
    return cuda_status("cuTensorMapEncodeTiled", cudaError_t(r));
}

MlaStatus describe_all(const MlaCacheExpandParams& p, ExpandMaps& maps) {
    EncodeTiled encode;
    const MlaStatus found = encode_tiled(encode);
    if (found.code != MLA_OK) return found;
    const MlaCacheGatherParams& c = p.rows;
    const cuuint64_t columns = p.columns, rows = c.rows, page_size = c.page_size, pages = c.pages;
    const cuuint64_t page = c.cache_page_stride, slot = c.cache_slot_stride;
    const cuuint64_t weights = p.weights_stride * 2, out = p.out_row_stride * 2;
    const struct {
        int rank;
        Tensor tensor;
        CUtensorMap& map;
    } all[] = {
        {3, {c.cache, {kExpandDepth, page_size, pages}, {slot, page}, {64, 64, 1}}, maps.latents},
        {3, {c.cache, {kExpandDepth, page_size, pages}, {slot, page}, {64, 1, 1}}, maps.latent_row},
        {3,
         {p.weights, {kExpandDepth, columns, 1}, {weights, weights * columns}, {64, 128, 1}},
         maps.weights},
        {4,
         {p.out, {columns, rows, 1, 1}, {out, out * rows, out * rows}, {64, 128, 1, 1}},
         maps.out}};
    for (const auto& one : all) {
        const MlaStatus s = describe(encode, c.dtype, one.rank, one.tensor, one.map);
        if (s.code != MLA_OK) return s;
    }
    return ok();
}

// Number of runs into which the tiles of rows are divided, so that all clusters end at about the
// same time. Loading the weights takes a CTA about as long as a tile.
int runs_of(int columns, int tiles, int clusters) {
    int best = 1;
    int64_t min_time = INT64_MAX;
    for (int runs = 1; runs <= std::min(tiles, clusters); ++runs) {
        const int64_t rounds = ceil_div(int64_t(columns) * runs, clusters);
        const int64_t time = rounds * (ceil_div(tiles, runs) + 1);
        if (time < min_time) min_time = time, best = runs;
    }
    return best;
}

MlaStatus check_expand(const MlaCacheExpandParams& p, bool paged) {
    const MlaCacheGatherParams& c = p.rows;
    Check check;
    check
        .that(c.dtype == MLA_DTYPE_BF16 || c.dtype == MLA_DTYPE_F16, "dtype", c.dtype,
              "MLA_DTYPE_BF16 (0) or MLA_DTYPE_F16 (1)")
        .that(c.cache_format == (c.dtype == MLA_DTYPE_F16 ? MLA_CACHE_F16 : MLA_CACHE_BF16),
              "cache_format", c.cache_format, "that of dtype")
        .that(c.latent_dim == kExpandDepth, "latent_dim", c.latent_dim, "512")
        .that(c.rope_dim == 64, "rope_dim", c.rope_dim, "64")
        .that(c.rows >= 0, "rows", c.rows, "0 and up")
        .that(c.segments >= (c.rows > 0) && c.segments <= kExpandSegments, "segments", c.segments,
              "1..=32")
        .that(!paged || (c.page_size >= 64 && c.page_size % 64 == 0), "page_size", c.page_size,
              "a multiple of 64")
        .that(c.pages >= 1 && c.pages <= INT32_MAX / c.page_size, "pages", c.pages,
              "at least 1, and at most 2147483647 slots")
        .that(c.max_pages >= 1, "max_pages", c.max_pages, "1 and up")
        .that(p.columns > 0 && p.columns % (kExpandColumns * kExpandCtas) == 0, "columns",
              p.columns, "a multiple of 256")
        .pointer(c.token_starts, 4, "token_starts")
        .pointer(c.row_starts, 4, "row_starts")
        .pointer(c.block_table, 4, "block_table")
        .stride(c.block_table_stride, "block_table_stride", c.segments > 1 ? c.max_pages : 0);
    const int64_t row = paged && is_one_row(c, 1024) ? 1152 : 1024;
    const struct {
        const void* pointer;
        const char* name;
        int64_t bytes, min;
        const char* stride;
        bool of_pages = false;
    } tensors[] = {
        {c.cache, "cache", c.cache_slot_stride, row, "cache_slot_stride"},
        {c.cache, "cache", c.cache_page_stride, row, "cache_page_stride"},
        {c.cache_rope, "cache_rope", c.cache_rope_slot_stride, 128, "cache_rope_slot_stride", true},
        {c.cache_rope, "cache_rope", c.cache_rope_page_stride, 128, "cache_rope_page_stride", true},
        {c.rope, "rope", c.rope_row_stride * 2, 128, "rope_row_stride", true},
        {p.weights, "weights", p.weights_stride * 2, 1024, "weights_stride"},
        {p.out, "out", p.out_row_stride * 2, p.columns * int64_t(2), "out_row_stride"}};
    for (const auto& t : tensors) {
        if (t.of_pages && !paged) continue;
        check
            .that(t.pointer && is_aligned(t.pointer, 16), t.name, address(t.pointer),
                  "a device pointer aligned to 16 bytes")
            .that(t.bytes >= t.min && t.bytes < int64_t(1) << 40 && t.bytes % 16 == 0, t.stride,
                  t.bytes, "whole units of 16 bytes under which rows do not overlap");
    }
    return check.status();
}

}  // namespace

MlaStatus load_expand_kernels() {
    for (const int dtype : {MLA_DTYPE_BF16, MLA_DTYPE_F16}) {
        const MlaStatus status = load("cache expand", expand_kernel(dtype));
        if (status.code != MLA_OK) return status;
    }
    return ok();
}

}  // namespace mla

extern "C" MlaStatus mla_cache_expand(const MlaCacheExpandParams* params, void* stream) {
    using namespace mla;
    if (!params) return refuse("params", 0, "a pointer");
    MlaCacheExpandParams p = *params;
    p.rows = with_rope(p.rows);
    const bool paged = p.rows.row_starts != nullptr;
    MlaStatus s = paged ? ok() : make_page(p.rows);
    if (s.code != MLA_OK) return s;
    s = check_expand(p, paged);
    if (s.code != MLA_OK || p.rows.rows == 0) return s;
    DeviceFacts facts;
    s = sm90_facts(facts);
    if (s.code != MLA_OK) return s;
    ExpandMaps maps;
    s = describe_all(p, maps);
    if (s.code != MLA_OK) return s;

    // Each segment may end within a tile.
    const int tiles = p.rows.rows / kExpandRows + p.rows.segments;
    const int clusters = facts.multiprocessors / kExpandCtas,
              columns = p.columns / (kExpandColumns * kExpandCtas),
              runs = runs_of(columns, tiles, clusters);
    const ExpandPlan plan = {p.rows, p.out, p.out_row_stride * 2, columns, runs};
    const Kernel kernel = expand_kernel(p.rows.dtype);
    const cudaError_t e =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kExpandBytes);
    if (e != cudaSuccess) return cuda_status("cudaFuncSetAttribute", e);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(uint32_t(std::min(clusters, columns * runs) * kExpandCtas));
    config.blockDim = dim3(kExpandThreads);
    config.dynamicSmemBytes = kExpandBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kExpandCtas, 1, 1};
    config.attrs = &cluster;
    config.numAttrs = 1;
    return cuda_status("cache expand", cudaLaunchKernelEx(&config, kernel, plan, maps));
}
