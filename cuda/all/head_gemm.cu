// The kernels of the GEMM per head, and their C interface, which checks every argument, chooses the
// kernel, and launches it.

#include "head_gemm.cuh"
#include "helpers.cuh"

namespace mla {
namespace {

// The width that W_UV sums over in published models, which the compiler then knows.
constexpr int kLatent = 512;

template <typename T, int Tiles, int K, bool EvictFirst>
__global__ void __launch_bounds__(kGemmThreads) rows_kernel(const __grid_constant__ HeadPlan p) {
    ptx::griddepcontrol_launch_dependents();
    rows_gemm<T, Tiles, K, EvictFirst>(p, blockIdx.x, blockIdx.y, blockIdx.z * Tiles * kTile);
    // When this kernel has ended, the previous one has ended, too, because one CTA waits for that.
    if (p.ready && blockIdx.x + blockIdx.y + blockIdx.z == 0) ptx::griddepcontrol_wait();
}

// GEMM with weights that are contiguous along k.
template <typename T, int Tiles, int K, bool EvictFirst>
__global__ void __launch_bounds__(kGemmThreads) columns_kernel(const __grid_constant__ HeadPlan p) {
    constexpr uint32_t kN = 16, kSlice = 64, kChunk = kGemmWarps * kSlice, kTokens = Tiles * kTile;
    constexpr bool kWhole = K > 0 && K % kChunk == 0;
    // Each warp's k of the weights and, behind them, of the input, in rows of 8 units. The warp's
    // sums take the same place later.
    __shared__ __align__(128) char slices[kGemmWarps][(kN + kTokens) * kSlice * 2];
    ptx::griddepcontrol_launch_dependents();
    const uint32_t head = blockIdx.y, first_token = blockIdx.z * kTokens, k = K ? K : p.k;
    if (!p.constant_weights) ptx::griddepcontrol_wait();

    float c[Tiles][2][4] = {};
    const uint32_t chunks = kWhole ? K / kChunk : (k + kChunk - 1) / kChunk;
#pragma unroll 1
    for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
        __syncwarp();
        const uint32_t base = chunk * kChunk + threadIdx.x / 32 * kSlice;
        {
            const uint32_t row = threadIdx.x % 32 / 8, unit = threadIdx.x % 8,
                           to = ptx::shared_address(slices[threadIdx.x / 32]);
            const uint4* from = p.weights_at(head, blockIdx.x * kN + row) + (base / 8 + unit);
#pragma unroll
            for (uint32_t i = 0; i < kN; i += 4)
                if (kWhole || base + unit * 8 < k)
                    copy_weights<EvictFirst>(to + place<8>(row + i, unit),
                                             from + uint64_t(i) * p.weights_stride);
        }
        const uint32_t thread = thread_again(), lane = thread % 32;
        const uint32_t weights = ptx::shared_address(slices[thread / 32]),
                       input = weights + kN * kSlice * 2;
        // Fetches a line per token into L2 before the wait. The previous kernel may still be
        // writing it, but L2 sees the writes.
        if (lane < kTokens && first_token + lane < p.tokens && (kWhole || base < k))
            ptx::prefetch_global_l2(p.input_at(first_token + lane, head) + base / 8);
        ptx::griddepcontrol_wait();
        {
            const uint32_t row = lane / 8, unit = lane % 8;
            const uint4* from = p.input_at(first_token + row, head) + (base / 8 + unit);
#pragma unroll
            for (uint32_t i = 0; i < kTokens; i += 4)
                if (kWhole || base + unit * 8 < k)
                    ptx::cp_async_16(input + place<8>(row + i, unit),
                                     from + uint64_t(i) * p.input_token_stride,
                                     first_token + row + i < p.tokens);
        }
        ptx::cp_async_wait_all();
        __syncwarp();
#pragma unroll
        for (uint32_t step = 0; step < kSlice / 16; ++step) {
            if (!kWhole && base + step * 16 >= k) break;
            uint32_t w[4];
            ptx::ldmatrix_x4(w,
                             weights + place<8>(lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
#pragma unroll
            for (uint32_t tile = 0; tile < Tiles; ++tile) {
                uint32_t x[4];
                ptx::ldmatrix_x4(x,
                                 input + place<8>(tile * kTile + lane % 16, step * 2 + lane / 16));
                ptx::mma_m16n8k16<T>(c[tile][0], x, w[0], w[1]);
                ptx::mma_m16n8k16<T>(c[tile][1], x, w[2], w[3]);
            }
        }
    }
    // One warp adds up the sums of a fragment. Each thread adds its own, always in the same order.
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < 2 * Tiles; ++i) {
        const float (&own)[4] = c[i / 2][i % 2];
        reinterpret_cast<float4*>(slices[warp])[32 * i + lane] = {own[0], own[1], own[2], own[3]};
    }
    __syncthreads();
    if (warp >= 2 * Tiles) return;
    float4 total = {};
#pragma unroll
    for (uint32_t i = 0; i < kGemmWarps; ++i) {
        const float4 sum = reinterpret_cast<const float4*>(slices[i])[32 * warp + lane];
        total = {total.x + sum.x, total.y + sum.y, total.z + sum.z, total.w + sum.w};
    }
    p.put<T>(first_token + warp / 2 * kTile, head, blockIdx.x * kN + warp % 2 * 8, total);
}

using Kernel = void (*)(HeadPlan);

template <typename T, int Tiles, bool EvictFirst>
Kernel kernel_of(bool rows, int k) {
    if (rows)
        return k == kNope ? rows_kernel<T, Tiles, kNope, EvictFirst>
                          : rows_kernel<T, Tiles, 0, EvictFirst>;
    return k == kLatent ? columns_kernel<T, Tiles, kLatent, EvictFirst>
                        : columns_kernel<T, Tiles, 0, EvictFirst>;
}

template <typename T>
Kernel kernel_of(bool rows, int tiles, bool evict_first, int k) {
    if (tiles > 1) return kernel_of<T, kTiles, true>(rows, k);
    return evict_first ? kernel_of<T, 1, true>(rows, k) : kernel_of<T, 1, false>(rows, k);
}

Kernel head_gemm_kernel(int dtype, bool rows, int tiles, bool evict_first, int k) {
    return dtype == MLA_DTYPE_F16 ? kernel_of<__half>(rows, tiles, evict_first, k)
                                  : kernel_of<__nv_bfloat16>(rows, tiles, evict_first, k);
}

}  // namespace

MlaStatus load_head_gemm_kernels() {
    for (const int dtype : {MLA_DTYPE_BF16, MLA_DTYPE_F16})
        for (const bool rows : {false, true})
            for (const int k : {rows ? kNope : kLatent, 0})
                for (const auto& [tiles, evict_first] :
                     {std::pair(1, false), std::pair(1, true), std::pair(kTiles, true)}) {
                    const MlaStatus status =
                        load("head GEMM", head_gemm_kernel(dtype, rows, tiles, evict_first, k));
                    if (status.code != MLA_OK) return status;
                }
    return ok();
}

namespace {

// True if weights are contiguous along n; otherwise they are contiguous along k.
bool along_n(const MlaHeadGemmParams& p) { return p.weights_n_stride == 1; }

void check_extents(Check& check, const MlaHeadGemmParams& p) {
    const bool rows = along_n(p);
    check
        .that(p.dtype == MLA_DTYPE_BF16 || p.dtype == MLA_DTYPE_F16, "dtype", p.dtype,
              "MLA_DTYPE_BF16 (0) or MLA_DTYPE_F16 (1)")
        .that(p.tokens >= 0 && p.tokens <= 65535 * kTiles * kTile, "tokens", p.tokens,
              "0..=2097120")
        .that(p.heads >= 0 && p.heads <= 65535, "heads", p.heads, "0..=65535")
        .that(rows || p.weights_k_stride == 1, "weights_k_stride", p.weights_k_stride,
              "1, or a weights_n_stride of 1")
        .that(p.k > 0 && p.k <= 65536 && p.k % (rows ? 16 : 32) == 0, "k", p.k,
              "a multiple of 16, of 32 where neighbours lie along k, to 65536")
        .that(p.n > 0 && p.n <= 65536 && p.n % (rows ? 64 : 16) == 0, "n", p.n,
              "a multiple of 64, of 16 where neighbours lie along k, to 65536");
}

void check_tensors(Check& check, const MlaHeadGemmParams& p) {
    const bool rows = along_n(p);
    const struct {
        const void* pointer;
        const char* name;
    } pointers[] = {{p.input, "input"}, {p.weights, "weights"}, {p.out, "out"}};
    for (const auto& [pointer, name] : pointers)
        check.that(pointer && is_aligned(pointer, 16), name, address(pointer),
                   "a device pointer aligned to 16 bytes");
    const struct {
        int64_t stride, extent, min;
        const char* name;
    } strides[] = {{p.input_token_stride, p.tokens, 0, "input_token_stride"},
                   {p.input_head_stride, p.heads, 0, "input_head_stride"},
                   {p.weights_head_stride, p.heads, 0, "weights_head_stride"},
                   {rows ? p.weights_k_stride : p.weights_n_stride, 2, 0,
                    rows ? "weights_k_stride" : "weights_n_stride"},
                   {p.out_token_stride, p.tokens, p.n, "out_token_stride"},
                   {p.out_head_stride, p.heads, p.n, "out_head_stride"}};
    for (const auto& [stride, extent, min, name] : strides)
        if (extent > 1)
            check.stride(stride, name, min)
                .that(stride % 8 == 0 && stride / 8 <= UINT32_MAX, name, stride,
                      "a multiple of 8 below 2^35");
}

}  // namespace

MlaStatus plan_gemm(const MlaHeadGemmParams& p, GemmLaunch& launch) {
    const bool rows = along_n(p);
    Check check;
    check_extents(check, p);
    launch.grid = dim3(0);
    if (check.failed() || p.tokens == 0 || p.heads == 0) return check.status();
    check_tensors(check, p);
    if (check.failed()) return check.status();

    const auto units = [](int64_t stride, int64_t extent) {
        return extent > 1 ? uint32_t(stride / 8) : 0u;
    };
    launch.plan = {static_cast<const uint4*>(p.input),
                   static_cast<const uint4*>(p.weights),
                   static_cast<uint4*>(p.out),
                   units(p.input_token_stride, p.tokens),
                   units(p.input_head_stride, p.heads),
                   units(p.weights_head_stride, p.heads),
                   units(rows ? p.weights_k_stride : p.weights_n_stride, 2),
                   units(p.out_token_stride, p.tokens),
                   units(p.out_head_stride, p.heads),
                   uint32_t(p.tokens),
                   uint32_t(p.k),
                   p.constant_weights != 0,
                   p.ready != 0};
    launch.rows = rows;
    launch.tiles = p.tokens <= kTile ? 1 : kTiles;
    launch.few = p.heads <= kFewHeads;
    launch.grid = dim3(uint32_t(p.n / (rows ? kRowsN : 16)), uint32_t(p.heads),
                       uint32_t(ceil_div(p.tokens, launch.tiles * kTile)));
    return ok();
}

MlaStatus launch_gemm(const MlaHeadGemmParams& p, const GemmLaunch& launch, void* stream) {
    if (launch.grid.x == 0) return ok();
    const auto kernel = head_gemm_kernel(p.dtype, launch.rows, launch.tiles, !launch.few, p.k);
    return launch_early("head GEMM", kernel, launch.grid, launch.few, stream, launch.plan);
}

}  // namespace mla

using namespace mla;

extern "C" MlaStatus mla_head_gemm(const MlaHeadGemmParams* params, void* stream) {
    if (!params) return refuse("params", 0, "a pointer");
    GemmLaunch gemm;
    const MlaStatus status = plan_gemm(*params, gemm);
    return status.code == MLA_OK ? launch_gemm(*params, gemm, stream) : status;
}
