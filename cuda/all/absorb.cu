// The start of a step on the absorbed path, in one launch: the new tokens' rows are written to the
// cache, and the queries are rotated and multiplied by W_UK. None of these depends on another.
//
//   blockIdx.y   0 .. rows - 1   CTAs of cache_write.cuh
//                rows ..         a head of head_gemm.cuh each
//
// Each separate launch would cost time, on the host as well, and would begin when the previous one
// has ended.

#include "../common/one_row.cuh"
#include "cache_write.cuh"
#include "head_gemm.cuh"
#include "helpers.cuh"

namespace mla {
namespace {

// Maximum number of tokens of a write whose CTAs run beside the GEMM's own. For more tokens, the
// write's own kernel is better.
constexpr int kMaxTokens = 256;

// The CTAs of a write: their plan, their number, and the number of rows of the grid that they fill.
struct WriteBlocks {
    WritePlan plan;
    uint32_t count, rows;
};

// Number of CTAs of an SM. It is large enough for those of 128 heads and one tile to run at the
// same time, or nearly so.
constexpr int absorb_blocks(int tiles, bool rotated) { return tiles > 1 || rotated ? 5 : 8; }

template <typename T, int Tiles, bool EvictFirst, MlaCacheFormat Format, bool Rotated>
__global__ void __launch_bounds__(kGemmThreads, absorb_blocks(Tiles, Rotated))
    absorb_kernel(const __grid_constant__ HeadPlan gemm,
                  const __grid_constant__ MlaCacheWriteParams write,
                  const __grid_constant__ WriteBlocks blocks) {
    ptx::griddepcontrol_launch_dependents();
    if (blockIdx.y < blocks.rows) {
        const uint32_t block = blockIdx.y * gridDim.x + blockIdx.x;
        if (block >= blocks.count || blockIdx.z) return;
        ptx::griddepcontrol_wait();
        write_block<T, Format, true, Rotated, true, kGemmThreads>(write, blocks.plan, block);
        return;
    }
    rows_gemm<T, Tiles, kNope, EvictFirst>(gemm, blockIdx.x, blockIdx.y - blocks.rows,
                                           blockIdx.z * Tiles * kTile);
}

using Kernel = void (*)(HeadPlan, MlaCacheWriteParams, WriteBlocks);

template <typename T, MlaCacheFormat Format, bool Rotated>
Kernel kernel_of(int tiles, bool evict_first) {
    if (tiles > 1) return absorb_kernel<T, kTiles, true, Format, Rotated>;
    return evict_first ? absorb_kernel<T, 1, true, Format, Rotated>
                       : absorb_kernel<T, 1, false, Format, Rotated>;
}

template <typename T, MlaCacheFormat Own>
Kernel kernel_of(int format, bool rotated, int tiles, bool evict_first) {
    if (format == Own)
        return rotated ? kernel_of<T, Own, true>(tiles, evict_first)
                       : kernel_of<T, Own, false>(tiles, evict_first);
    if (format == MLA_CACHE_FP8)
        return rotated ? kernel_of<T, MLA_CACHE_FP8, true>(tiles, evict_first)
                       : kernel_of<T, MLA_CACHE_FP8, false>(tiles, evict_first);
    return nullptr;
}

// Returns null for a cache of another format.
Kernel absorb_kernel_of(int dtype, int format, bool rotated, int tiles, bool evict_first) {
    return dtype == MLA_DTYPE_F16
               ? kernel_of<__half, MLA_CACHE_F16>(format, rotated, tiles, evict_first)
               : kernel_of<__nv_bfloat16, MLA_CACHE_BF16>(format, rotated, tiles, evict_first);
}

}  // namespace

MlaStatus load_absorb_kernels() {
    for (const int dtype : {MLA_DTYPE_BF16, MLA_DTYPE_F16})
        for (const int format :
             {dtype == MLA_DTYPE_BF16 ? MLA_CACHE_BF16 : MLA_CACHE_F16, MLA_CACHE_FP8})
            for (const bool rotated : {false, true})
                for (const auto& [tiles, evict_first] :
                     {std::pair(1, false), std::pair(1, true), std::pair(kTiles, true)}) {
                    const MlaStatus status = load(
                        "absorb", absorb_kernel_of(dtype, format, rotated, tiles, evict_first));
                    if (status.code != MLA_OK) return status;
                }
    return ok();
}

}  // namespace mla

using namespace mla;

extern "C" MlaStatus mla_absorb(const MlaCacheWriteParams* write_params,
                                const MlaHeadGemmParams* gemm_params, void* stream) {
    if (!write_params) return refuse("write", 0, "a pointer");
    if (!gemm_params) return refuse("product", 0, "a pointer");
    const MlaCacheWriteParams w = with_rope(*write_params);
    const MlaHeadGemmParams& p = *gemm_params;
    WriteLaunch write;
    MlaStatus status = plan_write(w, kGemmThreads, write);
    if (status.code != MLA_OK) return status;
    GemmLaunch gemm;
    status = plan_gemm(p, gemm);
    if (status.code != MLA_OK) return status;
    const bool together = write.blocks > 0 && w.tokens <= kMaxTokens && write.wide && write.r1 &&
                          gemm.grid.x > 0 && gemm.rows && p.k == kNope && w.dtype == p.dtype;
    const auto kernel =
        together ? absorb_kernel_of(p.dtype, w.cache_format, write.rotated, gemm.tiles, !gemm.few)
                 : nullptr;
    if (!kernel) {
        status = mla_cache_write(write_params, stream);
        return status.code == MLA_OK ? launch_gemm(p, gemm, stream) : status;
    }
    const uint32_t rows = uint32_t(ceil_div(write.blocks, gemm.grid.x));
    const WriteBlocks blocks = {write.plan, uint32_t(write.blocks), rows};
    const dim3 grid(gemm.grid.x, gemm.grid.y + rows, gemm.grid.z);
    return launch_early("absorb", kernel, grid, gemm.few, stream, gemm.plan, w, blocks);
}
