// Converts log-sum-exps of another convention to natural ones, heads first.

#include "helpers.cuh"

namespace mla {
namespace {

constexpr int kTile = 32;
constexpr int kRowsAtOnce = 8;

// If the axes change places, the values go through a tile of shared memory, so that both sides move
// whole sectors. The odd row length puts a column's elements into different banks.
template <bool HeadsFirst>
__global__ void __launch_bounds__(kTile* kRowsAtOnce)
    lse_kernel(const __grid_constant__ MlaLseParams p, uint32_t token_tiles) {
    __shared__ float tile[HeadsFirst ? 1 : kTile][kTile + 1];
    const int64_t token = int64_t(blockIdx.x % token_tiles) * kTile,
                  head = int64_t(blockIdx.x / token_tiles) * kTile;
    if constexpr (!HeadsFirst) {
#pragma unroll
        for (int i = threadIdx.y; i < kTile; i += kRowsAtOnce)
            if (token + i < p.tokens && head + threadIdx.x < p.heads)
                tile[i][threadIdx.x] = p.from[(token + i) * p.from_row_stride + head + threadIdx.x];
        __syncthreads();
    }
#pragma unroll
    for (int i = threadIdx.y; i < kTile; i += kRowsAtOnce) {
        const int64_t t = token + threadIdx.x, h = head + i;
        if (t >= p.tokens || h >= p.heads) continue;
        const float x = HeadsFirst ? p.from[h * p.from_row_stride + t] : tile[threadIdx.x][i];
        p.to[h * p.to_head_stride + t] = x * p.unit;
    }
}

}  // namespace

MlaStatus load_lse_kernels() {
    const MlaStatus status = load("lse", lse_kernel<false>);
    return status.code == MLA_OK ? load("lse", lse_kernel<true>) : status;
}

}  // namespace mla

using namespace mla;

extern "C" MlaStatus mla_lse_natural(const MlaLseParams* params, void* stream) {
    if (!params) return refuse("params", 0, "a pointer");
    const MlaLseParams& p = *params;
    Check check;
    check.that(p.tokens >= 0, "tokens", p.tokens, "0 and up")
        .that(p.heads >= 0, "heads", p.heads, "0 and up")
        .that(p.unit > 0.f && p.unit <= 3.402823466e38f, "unit", truncated(p.unit),
              "a finite number above 0");
    if (check.failed() || p.tokens == 0 || p.heads == 0) return check.status();
    const bool one_row = p.heads_first ? p.heads == 1 : p.tokens == 1;
    const int64_t token_tiles = ceil_div(p.tokens, kTile),
                  blocks = token_tiles * ceil_div(p.heads, kTile);
    check.pointer(p.from, 4, "from")
        .pointer(p.to, 4, "to")
        .stride(p.from_row_stride, "from_row_stride",
                one_row         ? 0
                : p.heads_first ? p.tokens
                                : p.heads)
        .stride(p.to_head_stride, "to_head_stride", p.heads > 1 ? p.tokens : 0)
        .that(blocks <= INT32_MAX, "tokens", p.tokens, "fewer tokens times heads");
    if (check.failed()) return check.status();
    return launch("lse", p.heads_first ? lse_kernel<true> : lse_kernel<false>,
                  dim3(uint32_t(blocks)), dim3(kTile, kRowsAtOnce), stream, p,
                  uint32_t(token_tiles));
}
