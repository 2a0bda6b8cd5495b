// Partial results of splits, and how they are combined.
//
// Split s of a query tile leaves, of each row, sums over its keys, with weights 2^(score - m_s):
//
//     l_s = sum of weights,  o_s = sum of weights times values
//
// With m the largest m_s, the row's output is sum_s 2^(m_s - m) o_s / sum_s 2^(m_s - m) l_s. The
// order of the sums is that of the splits, so the bits do not depend on who computed what and when.
#pragma once

#include "../../common/instructions.cuh"
#include "../../common/mbarrier.cuh"
#include "params.cuh"
#include "tile.cuh"

namespace mla::sm90::prefill {

// The rows of one warp in a slot of the workspace.
template <typename Tile>
struct Partial {
    float4* out;  // [V / 8, lane]: as the lane has them in registers
    float2* sum;  // [row]: (m, l)

    __device__ Partial(const KernelParams& p, int slot, int warp) {
        const int64_t rows = int64_t(slot) * kConsumerWarps + warp;
        out = p.partial_out + rows * (Tile::kValue / 8 * 32);
        sum = p.partial_sum + rows * kWarpRows;
    }
};

// One lane's four values: two columns of row 0, then of row 1.
struct Merged {
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {}, out[4] = {};

    __device__ __forceinline__ void add(const float4& part, const float2& first,
                                        const float2& second) {
        const float m[2] = {first.x, second.x}, l[2] = {first.y, second.y};
        const float o[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const float now = fmaxf(top[row], m[row]);
            // Of rows that see nothing so far both are -inf, whose difference would be NaN.
            const float shift = now == -INFINITY ? 0.f : now;
            const float mine = exp2_approx(top[row] - shift), other = exp2_approx(m[row] - shift);
            top[row] = now;
            sum[row] = sum[row] * mine + l[row] * other;
#pragma unroll
            for (int i = 2 * row; i < 2 * row + 2; i++) out[i] = out[i] * mine + o[i] * other;
        }
    }
};

// One of the shares in which a query tile's splits are combined, by the warps of all consumers. They
// wait for the splits, whose CTAs have claimed them and so go on.
template <typename Tile>
__device__ __forceinline__ void combine(const KernelParams& p, const Work& work, int warp,
                                        int lane) {
    // A line: eight columns of the rows of a warp.
    constexpr int kLines = Tile::kValue / 8;
    const int splits = work.key_len, share = work.slot - work.first_slot;
    const int rows = min(kQueries, work.query_len - work.query);
    const int lines = (rows + kWarpRows - 1) / kWarpRows * kLines;
    const int end = lines * (share + 1) / splits;
    if (lines * share / splits + warp >= end) return;
    while (load_acquire(&p.arrived[work.first_slot]) < splits * kConsumerWarps) __nanosleep(20);
    for (int line = lines * share / splits + warp; line < end; line += kConsumerWarps) {
        const int of_warp = line / kLines, column = line % kLines * 8 + lane % 4 * 2;
        Merged merged;
        // So many at a time are in flight.
        constexpr int kBatch = 8;
        for (int begin = 0; begin < splits; begin += kBatch) {
            float4 part[kBatch];
            float2 sum[kBatch][2];
#pragma unroll
            for (int i = 0; i < kBatch; i++) {
                if (begin + i >= splits) continue;
                const Partial<Tile> partial(p, work.first_slot + begin + i, of_warp);
                part[i] = __ldcg(&partial.out[line % kLines * 32 + lane]);
                sum[i][0] = __ldcg(&partial.sum[lane / 4]);
                sum[i][1] = __ldcg(&partial.sum[lane / 4 + 8]);
            }
#pragma unroll
            for (int i = 0; i < kBatch; i++) {
                if (begin + i < splits) merged.add(part[i], sum[i][0], sum[i][1]);
            }
        }
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const int query = of_warp * kWarpRows + lane / 4 + 8 * row;
            if (query >= rows) continue;
            const int64_t token = int64_t(work.query_start) + work.query + query;
            const float sum = merged.sum[row], factor = sum > 0.f ? reciprocal_approx(sum) : 0.f;
            auto* out = static_cast<typename Tile::Element*>(p.out) + token * p.out_token_stride +
                        work.head * p.out_head_stride;
            *reinterpret_cast<uint32_t*>(out + column) = pack<typename Tile::Element>(
                merged.out[2 * row] * factor, merged.out[2 * row + 1] * factor);
            if (column == 0 && p.lse) {
                p.lse[work.head * p.lse_head_stride + token] =
                    sum > 0.f ? (merged.top[row] + log2_approx(sum)) * 0.693147180559945309f
                              : -INFINITY;
            }
        }
    }
}

}  // namespace mla::sm90::prefill
