// Partial results of splits, and how they are combined.
//
// Split s of a query tile leaves, of each row, sums over its keys, with weights 2^(score - m_s):
//
//     l_s = sum of weights,  o_s = sum of weights times values
//
// With m the largest m_s, the row's output is sum_s 2^(m_s - m) o_s / sum_s 2^(m_s - m) l_s. The
// order of the sums is fixed, so the bits do not depend on who computed what and when.
#pragma once

#include "../../common/softmax.cuh"
#include "../../ptx/sm90.cuh"
#include "params.cuh"
#include "repair.cuh"
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

// What a warp combines of a query tile: some of its lines, each eight columns of the rows of a warp.
// It brings what it needs of them into shared memory, as much as it has room for at the same time.
template <typename Tile>
struct Combine {
    const KernelParams& p;
    const Work& work;
    int lane;
    // The warp's bytes of shared memory: the sums of each split's rows, the weights of its rows,
    // and lines.
    uint32_t staged;

    static constexpr int kLines = Tile::kValue / 8;
    static constexpr int kSumBytes = kWarpRows / 2 * sizeof(float4);
    static constexpr int kWeightBytes = kWarpRows / 2 * sizeof(float2);
    static constexpr int kLineBytes = 32 * sizeof(float4);
    static constexpr int kBytes =
        (kConsumers * Tile::kQueryBytes + kStages * (Tile::kKeyBytes + Tile::kValueBytes)) /
        kConsumerWarps;
    static constexpr int kStagedLines =
        (kBytes - kMostSplits * (kSumBytes + kWeightBytes)) / kLineBytes;
    static_assert(kStagedLines >= 4);

    // Share `share` of `splits` of the lines, by the warps of all consumers. They wait for the
    // splits, whose CTAs have claimed them and so go on.
    __device__ __forceinline__ void run(int splits, int share, int warp) const {
        const int rows = min(kQueries, work.query_len - work.query);
        const int lines = (rows + kWarpRows - 1) / kWarpRows * kLines;
        const int begin = lines * share / splits, end = lines * (share + 1) / splits;
        const int each = (end - begin + kConsumerWarps - 1) / kConsumerWarps;
        int line = begin + warp * each;
        const int last = min(line + each, end);
        if (line >= last) return;
        const Arrivals<DeviceMemory> warps = p.arrivals(work.first_slot());
        while (warps.seen() < splits * kConsumerWarps) __nanosleep(20);
        // The lines of one warp's rows at a time.
#pragma unroll 1
        while (line < last) {
            const int of_warp = line / kLines, stop = min(last, (of_warp + 1) * kLines);
            combine(splits, of_warp, line, stop, rows);
            line = stop;
        }
    }

  private:
    __device__ __forceinline__ void combine(int splits, int of_warp, int line, int stop,
                                            int rows) const {
        // One lane for each eight of the sums' 16 bytes.
#pragma unroll 1
        for (int i = lane; i < splits * (kWarpRows / 2); i += 32) {
            const Partial<Tile> partial(p, work.first_slot() + i / (kWarpRows / 2), of_warp);
            ptx::cp_async_16(staged + i * 16, &partial.sum[i % (kWarpRows / 2)], true);
        }
        ptx::cp_async_commit_group();
        int part = line * splits;
        const int parts = stop * splits;
        bring(splits, of_warp, part, min(part + kStagedLines, parts));
        // The sums; lines are in flight while they are weighed.
        ptx::cp_async_wait_group<1>();
        __syncwarp();
        SoftmaxState<Base2> state[2];
        weigh(splits, state);
        ptx::cp_async_wait_group<0>();
        const int query = of_warp * kWarpRows + lane / 4;
        const float factor[2] = {row_factor(state[0].sum), row_factor(state[1].sum)};
        if (line % kLines == 0 && lane % 4 == 0 && p.lse) {
#pragma unroll
            for (int row = 0; row < 2; row++) {
                if (query + 8 * row < rows) {
                    p.lse[work.head * p.lse_head_stride + work.query_start + work.query + query +
                          8 * row] = row_log_sum_exp(state[row].maximum, state[row].sum);
                }
            }
        }
        auto* out = static_cast<typename Tile::Element*>(p.out) +
                    (int64_t(work.query_start) + work.query + query) * p.out_token_stride +
                    work.head * p.out_head_stride + lane % 4 * 2;
        int split = 0;
        float4 sum = {};
#pragma unroll 1
        for (int first = part; part < parts; first = part) {
            const int until = min(first + kStagedLines, parts);
            if (first > line * splits) {
                // What was there has been read by the lanes that it was brought for.
                bring(splits, of_warp, first, until);
                ptx::cp_async_wait_group<0>();
            }
#pragma unroll 2
            for (; part < until; part++) {
                const float4 values = load4(line_at(part - first));
                const float2 weight = load2(weight_at(split));
                sum.x = fmaf(values.x, weight.x, sum.x);
                sum.y = fmaf(values.y, weight.x, sum.y);
                sum.z = fmaf(values.z, weight.y, sum.z);
                sum.w = fmaf(values.w, weight.y, sum.w);
                if (++split < splits) continue;
                const bool spoiled = (sum.x + sum.y + sum.z + sum.w) * 0.f != 0.f;
                const int column = part / splits % kLines * 8;
                if (query < rows) store(out + column, sum.x * factor[0], sum.y * factor[0]);
                if (query + 8 < rows) {
                    store(out + column + 8 * p.out_token_stride, sum.z * factor[1],
                          sum.w * factor[1]);
                }
                if (__any_sync(~0u, spoiled) && p.causal) {
                    const Spoiled first = {work.query_start + work.query + of_warp * kWarpRows,
                                           work.head};
                    __syncwarp();
                    Repair<Tile>{p, lane}.repair({first, column, 8});
                }
                split = 0;
                sum = {};
            }
        }
        __syncwarp();
    }

    // Parts `begin` to `end`: part l * splits + s is line l of split s.
    __device__ __forceinline__ void bring(int splits, int of_warp, int begin, int end) const {
        int line = begin / splits, split = begin - line * splits;
#pragma unroll 1
        for (int i = begin; i < end; i++) {
            const Partial<Tile> partial(p, work.first_slot() + split, of_warp);
            ptx::cp_async_16(line_at(i - begin), &partial.out[line % kLines * 32 + lane], true);
            if (++split == splits) split = 0, line++;
        }
        ptx::cp_async_commit_group();
    }

    // The states of this lane's two rows over all splits, and each split's weights for them. The
    // four lanes of the same rows have the splits in turns.
    __device__ __forceinline__ void weigh(int splits, SoftmaxState<Base2> (&state)[2]) const {
        const uint32_t sums = staged + lane / 4 * sizeof(float4);
#pragma unroll 2
        for (int split = lane % 4; split < splits; split += 4) {
            const float4 other = load4(sums + split * kSumBytes);
            state[0].maximum = fmaxf(state[0].maximum, other.x);
            state[1].maximum = fmaxf(state[1].maximum, other.z);
        }
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2)
#pragma unroll
            for (auto& row : state)
                row.maximum = fmaxf(row.maximum, __shfl_xor_sync(~0u, row.maximum, distance));
#pragma unroll 2
        for (int split = lane % 4; split < splits; split += 4) {
            const float4 other = load4(sums + split * kSumBytes);
            const SoftmaxState<Base2> first{other.x, other.y}, second{other.z, other.w};
            const float weight[2] = {first.factor(state[0].maximum),
                                     second.factor(state[1].maximum)};
            state[0].add(first, weight[0]);
            state[1].add(second, weight[1]);
            ptx::st_shared(weight_at(split), __float_as_uint(weight[0]));
            ptx::st_shared(weight_at(split) + 4, __float_as_uint(weight[1]));
        }
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2)
#pragma unroll
            for (auto& row : state) row.sum += __shfl_xor_sync(~0u, row.sum, distance);
        __syncwarp();
    }

    __device__ uint32_t weight_at(int split) const {
        return staged + kMostSplits * kSumBytes + split * kWeightBytes + lane / 4 * sizeof(float2);
    }
    __device__ uint32_t line_at(int i) const {
        return staged + kMostSplits * (kSumBytes + kWeightBytes) + i * kLineBytes +
               lane * sizeof(float4);
    }

    __device__ static float4 load4(uint32_t at) {
        const uint4 bits = ptx::ld_shared_v4(at);
        return make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y),
                           __uint_as_float(bits.z), __uint_as_float(bits.w));
    }
    __device__ static float2 load2(uint32_t at) {
        const uint2 bits = ptx::ld_shared_v2(at);
        return make_float2(__uint_as_float(bits.x), __uint_as_float(bits.y));
    }
    __device__ static void store(typename Tile::Element* out, float a, float b) {
        *reinterpret_cast<uint32_t*>(out) = ptx::cvt_rn_x2<typename Tile::Element>(a, b);
    }
};

}  // namespace mla::sm90::prefill
