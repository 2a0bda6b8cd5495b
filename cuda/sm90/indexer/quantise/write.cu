// Writes the rows of a layer's cache, the rows of its index cache, and the index queries, in one
// launch. The first blocks write index keys. The next ones write the rows of the layer's cache
// (all/cache_write.cuh), and the last ones queries.
#include "../../../all/cache_write.cuh"
#include "../../../common/one_row.cuh"
#include "../launch.cuh"
#include "check.cuh"
#include "sm90/mla_sm90.h"

namespace mla::sm90::quantise {
namespace {

static_assert(kThreads == kWriteThreads, "one size of block for both");

// Numbers of blocks for index keys, and for rows of the layer's cache.
struct Blocks {
    uint32_t keys, rows;
};

template <typename T, MlaCacheFormat Format, bool Rotated>
__global__ void __launch_bounds__(kThreads, 8)
    write_kernel(const __grid_constant__ MlaCacheWriteParams rows,
                 const __grid_constant__ WritePlan plan,
                 const __grid_constant__ MlaIndexKeysParams keys,
                 const __grid_constant__ MlaIndexQueriesParams queries, Blocks blocks) {
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    if (blockIdx.x < blocks.keys)
        write_keys(keys, blockIdx.x);
    else if (blockIdx.x < blocks.keys + blocks.rows)
        write_block<T, Format, true, Rotated, true, kThreads>(rows, plan, blockIdx.x - blocks.keys);
    else
        write_queries(queries, blockIdx.x - blocks.keys - blocks.rows);
}

using Kernel = void (*)(MlaCacheWriteParams, WritePlan, MlaIndexKeysParams, MlaIndexQueriesParams,
                        Blocks);

template <typename T, MlaCacheFormat Own>
Kernel kernel_of(int format, bool rotated) {
    switch (format) {
        case Own: return rotated ? write_kernel<T, Own, true> : write_kernel<T, Own, false>;
        case MLA_CACHE_FP8:
            return rotated ? write_kernel<T, MLA_CACHE_FP8, true>
                           : write_kernel<T, MLA_CACHE_FP8, false>;
        case MLA_CACHE_FP8_DS_MLA:
            return rotated ? write_kernel<T, MLA_CACHE_FP8_DS_MLA, true>
                           : write_kernel<T, MLA_CACHE_FP8_DS_MLA, false>;
        default: return nullptr;
    }
}

// Returns null unless the rows are those of models that have an indexer.
Kernel kernel_for(const MlaCacheWriteParams& rows, const WriteLaunch& write) {
    if (write.blocks == 0 || !write.wide || !write.r1) return nullptr;
    switch (rows.dtype) {
        case MLA_DTYPE_BF16:
            return kernel_of<__nv_bfloat16, MLA_CACHE_BF16>(rows.cache_format, write.rotated);
        case MLA_DTYPE_F16:
            return kernel_of<__half, MLA_CACHE_F16>(rows.cache_format, write.rotated);
        default: return nullptr;
    }
}

}  // namespace
}  // namespace mla::sm90::quantise

using namespace mla;
using namespace mla::sm90::quantise;

extern "C" MlaStatus mla_index_write_sm90(const MlaCacheWriteParams* rows_params,
                                          const MlaIndexKeysParams* keys_params,
                                          const MlaIndexQueriesParams* queries_params,
                                          void* stream) {
    if (!rows_params) return refuse("rows", 0, "a pointer");
    if (!keys_params) return refuse("keys", 0, "a pointer");
    const MlaCacheWriteParams rows = with_rope(*rows_params);
    const MlaIndexKeysParams& keys = *keys_params;
    const MlaIndexQueriesParams queries =
        queries_params ? *queries_params : MlaIndexQueriesParams{};
    WriteLaunch write;
    MlaStatus s = plan_write(rows, kThreads, write);
    if (s.code != MLA_OK) return s;
    s = check_tokens(keys.tokens);
    if (s.code == MLA_OK) s = check_tokens(queries.tokens);
    if (s.code != MLA_OK) return s;
    const Kernel kernel = keys.tokens > 0 ? kernel_for(rows, write) : nullptr;
    if (!kernel) {
        s = mla_cache_write(rows_params, stream);
        if (s.code == MLA_OK) s = mla_index_keys_sm90(keys_params, stream);
        return s.code == MLA_OK ? mla_index_queries_sm90(&queries, stream) : s;
    }
    s = check(keys);
    if (s.code == MLA_OK && queries.tokens > 0) s = check(queries);
    if (s.code != MLA_OK) return s;
    const Blocks blocks = {uint32_t(ceil_div(keys.tokens, kRows)), uint32_t(write.blocks)};
    const int64_t of_queries = ceil_div(int64_t(queries.tokens) * queries.heads, int64_t(kRows));
    const dim3 ctas(blocks.keys + blocks.rows + uint32_t(of_queries));
    return sm90::indexer::launch_early("index write", kernel, {ctas, kThreads}, stream, rows,
                                       write.plan, keys, queries, blocks);
}
