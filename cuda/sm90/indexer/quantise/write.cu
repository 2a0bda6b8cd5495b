// The rows of a layer's cache and of its index cache, in one launch: the first blocks write index
// keys, the others are those of all/cache_write.cuh.
#include "../../../all/cache_write.cuh"
#include "../launch.cuh"
#include "check.cuh"
#include "sm90/mla_sm90.h"

namespace mla::sm90::quantise {
namespace {

static_assert(kThreads == kWriteThreads, "one size of block for both");

template <typename T, MlaCacheFormat Format, bool Turned>
__global__ void __launch_bounds__(kThreads, 8)
    write_kernel(const __grid_constant__ MlaCacheWriteParams rows,
                 const __grid_constant__ WritePlan plan,
                 const __grid_constant__ MlaIndexKeysParams keys, uint32_t key_blocks) {
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    if (blockIdx.x < key_blocks)
        write_keys(keys, blockIdx.x);
    else
        write_block<T, Format, true, Turned, true, kThreads>(rows, plan, blockIdx.x - key_blocks);
}

using Kernel = void (*)(MlaCacheWriteParams, WritePlan, MlaIndexKeysParams, uint32_t);

template <typename T, MlaCacheFormat Own>
Kernel kernel_of(int format, bool turned) {
    switch (format) {
        case Own: return turned ? write_kernel<T, Own, true> : write_kernel<T, Own, false>;
        case MLA_CACHE_FP8:
            return turned ? write_kernel<T, MLA_CACHE_FP8, true>
                          : write_kernel<T, MLA_CACHE_FP8, false>;
        case MLA_CACHE_FP8_DS_MLA:
            return turned ? write_kernel<T, MLA_CACHE_FP8_DS_MLA, true>
                          : write_kernel<T, MLA_CACHE_FP8_DS_MLA, false>;
        default: return nullptr;
    }
}

// None if the rows are not those of the models that have an indexer.
Kernel kernel_for(const MlaCacheWriteParams& rows, const WriteLaunch& write) {
    if (write.blocks == 0 || !write.wide || !write.r1) return nullptr;
    switch (rows.dtype) {
        case MLA_DTYPE_BF16:
            return kernel_of<__nv_bfloat16, MLA_CACHE_BF16>(rows.cache_format, write.turned);
        case MLA_DTYPE_F16:
            return kernel_of<__half, MLA_CACHE_F16>(rows.cache_format, write.turned);
        default: return nullptr;
    }
}

}  // namespace
}  // namespace mla::sm90::quantise

using namespace mla;
using namespace mla::sm90::quantise;

extern "C" MlaStatus mla_index_write_sm90(const MlaCacheWriteParams* rows_params,
                                          const MlaIndexKeysParams* keys_params, void* stream) {
    if (!rows_params) return refuse("rows", 0, "a pointer");
    if (!keys_params) return refuse("keys", 0, "a pointer");
    const MlaCacheWriteParams& rows = *rows_params;
    const MlaIndexKeysParams& keys = *keys_params;
    WriteLaunch write;
    MlaStatus s = plan_write(rows, kThreads, write);
    if (s.code != MLA_OK) return s;
    s = check_tokens(keys.tokens);
    if (s.code != MLA_OK) return s;
    const Kernel kernel = keys.tokens > 0 ? kernel_for(rows, write) : nullptr;
    if (!kernel) {
        s = mla_cache_write(rows_params, stream);
        return s.code == MLA_OK ? mla_index_keys_sm90(keys_params, stream) : s;
    }
    s = check(keys);
    if (s.code != MLA_OK) return s;
    const auto key_blocks = uint32_t(ceil_div(keys.tokens, kRows));
    const dim3 ctas(uint32_t(write.blocks) + key_blocks);
    return sm90::indexer::launch_early("index write", kernel, {ctas, kThreads}, stream, rows,
                                       write.plan, keys, key_blocks);
}
