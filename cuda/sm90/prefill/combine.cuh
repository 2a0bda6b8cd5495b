// Partial results of splits, and how they are combined.
//
// Split s of a query tile leaves, of each row, sums over its keys, with weights 2^(score - m_s):
//
//     l_s = sum of weights,  o_s = sum of weights times values
//
// With m the largest m_s, the row's output is sum_s 2^(m_s - m) o_s / sum_s 2^(m_s - m) l_s. The
// order of the sums is that of the splits, so the bits do not depend on who computed what and when.
#pragma once

#include "../../common/softmax.cuh"
#include "../../ptx/sm90.cuh"
#include "params.cuh"
#include "softmax.cuh"
#include "tile.cuh"

namespace mla::sm90::prefill {

// The rows of one warp in a slot of the workspace.
template <typename Tile>
struct Partial {
    float4* out;  // [V / 8, lane]: as the lane has them in registers
    float4* sum;  // [row % 8]: (m, l) of the row, then of the one 8 further

    __device__ Partial(const KernelParams& p, int slot, int warp) {
        const int64_t rows = int64_t(slot) * kConsumerWarps + warp;
        out = p.partial_out + rows * (Tile::kValue / 8 * 32);
        sum = p.partial_sum + rows * (kWarpRows / 2);
    }
};

// One lane's four values: two columns of one row, then of the row 8 further.
struct Merged {
    SoftmaxState<Base2> state[2];
    float out[4] = {};

    __device__ __forceinline__ void add(const float4& part, const float4& sums) {
        const SoftmaxState<Base2> other[2] = {{sums.x, sums.y}, {sums.z, sums.w}};
        const float values[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const float top = fmaxf(state[row].maximum, other[row].maximum);
            const float by = other[row].factor(top), before = state[row].raise(top);
            state[row].add(other[row], by);
#pragma unroll
            for (int i = 2 * row; i < 2 * row + 2; i++) out[i] = out[i] * before + values[i] * by;
        }
    }
};

// What a warp combines of a query tile: `lines`, each eight columns of the rows of a warp. It brings
// all that it can hold of them into shared memory at the same time, each lane what it reads itself.
template <typename Tile>
struct Combine {
    const KernelParams& p;
    const Work& work;
    int lane;
    uint32_t staged;  // kStaged parts of kPartBytes

    static constexpr int kLines = Tile::kValue / 8;
    static constexpr int kPartBytes = 32 * 2 * sizeof(float4);
    static constexpr int kStaged =
        kStages * (Tile::kKeyBytes + Tile::kValueBytes) / kConsumerWarps / kPartBytes;

    // Share `share` of `splits` of them, by the warps of all consumers. They wait for the splits,
    // whose CTAs have claimed them and so go on.
    __device__ __forceinline__ void run(int splits, int share, int warp) const {
        const int rows = min(kQueries, work.query_len - work.query);
        const int lines = (rows + kWarpRows - 1) / kWarpRows * kLines;
        const int begin = lines * share / splits, end = lines * (share + 1) / splits;
        const int each = (end - begin + kConsumerWarps - 1) / kConsumerWarps;
        int line = begin + warp * each;
        int parts = (min(line + each, end) - line) * splits;
        if (parts <= 0) return;
        while (ptx::ld_acquire(&p.arrived[work.first_slot]) < splits * kConsumerWarps) {
            __nanosleep(20);
        }
        int split = 0;
        Merged merged;
        for (; parts > 0; parts -= kStaged) {
            const int count = min(parts, kStaged);
            bring(line, split, splits, count);
            ptx::cp_async_wait_group<0>();
#pragma unroll 1
            for (int i = 0; i < count; i++) {
                merged.add(part(i, 0), part(i, 1));
                if (++split < splits) continue;
                store(merged, line, rows);
                merged = {};
                split = 0, line++;
            }
        }
    }

    __device__ __forceinline__ void bring(int line, int split, int splits, int count) const {
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            const Partial<Tile> partial(p, work.first_slot + split, line / kLines);
            ptx::cp_async_16(at(i, 0), &partial.out[line % kLines * 32 + lane], true);
            ptx::cp_async_16(at(i, 1), &partial.sum[lane / 4], true);
            if (++split == splits) split = 0, line++;
        }
        ptx::cp_async_commit_group();
    }

    __device__ uint32_t at(int i, int half) const {
        return staged + i * kPartBytes + (half * 32 + lane) * sizeof(float4);
    }

    __device__ float4 part(int i, int half) const {
        const uint4 bits = ptx::ld_shared_v4(at(i, half));
        return make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y),
                           __uint_as_float(bits.z), __uint_as_float(bits.w));
    }

    __device__ __forceinline__ void store(const Merged& merged, int line, int rows) const {
        const int column = line % kLines * 8 + lane % 4 * 2;
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const int query = line / kLines * kWarpRows + lane / 4 + 8 * row;
            if (query >= rows) continue;
            const int64_t token = int64_t(work.query_start) + work.query + query;
            const SoftmaxState<Base2>& state = merged.state[row];
            const float factor = row_factor(state.sum);
            auto* out = static_cast<typename Tile::Element*>(p.out) + token * p.out_token_stride +
                        work.head * p.out_head_stride;
            *reinterpret_cast<uint32_t*>(out + column) = ptx::cvt_rn_x2<typename Tile::Element>(
                merged.out[2 * row] * factor, merged.out[2 * row + 1] * factor);
            if (column == 0 && p.lse) {
                p.lse[work.head * p.lse_head_stride + token] =
                    row_log_sum_exp(state.maximum, state.sum);
            }
        }
    }
};

}  // namespace mla::sm90::prefill
