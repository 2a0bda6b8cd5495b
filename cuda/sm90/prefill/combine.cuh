// Partial results of splits, and their combine.
//
// For each row, split s of a query tile stores sums over its keys, with weights 2^(score - m_s):
//
//     l_s = sum of weights,  o_s = sum of weights times values
//
// With m the maximum of m_s, the row's output is sum_s 2^(m_s - m) o_s / sum_s 2^(m_s - m) l_s. The
// order of the sums is fixed: the bits do not depend on which CTA computed what, or when.
#pragma once

#include "../../common/softmax.cuh"
#include "../../ptx/sm90.cuh"
#include "config.cuh"
#include "params.cuh"
#include "repair.cuh"
#include "softmax.cuh"

namespace mla::sm90::prefill {

// The rows of one warp in a slot of the workspace.
template <typename Config>
struct Partial {
    float4* out;  // [V / 8, lane]: as the lane has them in registers
    float4* sum;  // [row % 8]: (m, l) of the row, then of the row 8 further down

    __device__ Partial(const KernelParams& p, int slot, int warp) {
        const int64_t rows = int64_t(slot) * kConsumerWarps + warp;
        out = p.partial_out + rows * (Config::kValue / 8 * 32);
        sum = p.partial_sum + rows * (kWarpRows / 2);
    }
};

// Combines a warp's share of a query tile. The share is counted in lines; a line is eight columns
// of the rows of a consumer warp. If a CTA has fewer lines than warps, several warps share a line,
// each with some of the splits, and the first of them adds up their totals through shared memory. A
// warp copies its operands into shared memory, with as many copies in flight as its buffer has room
// for.
template <typename Config>
struct Combine {
    const KernelParams& p;
    const WorkTile& work;
    int lane;
    // The warp's buffer in shared memory: (m, l) of each split's rows, the weights of the splits,
    // and lines. Once these have been read, it holds the total of the warp's splits.
    uint32_t staged;

    static constexpr int kLines = Config::kValue / 8;
    static constexpr int kSumBytes = kWarpRows / 2 * sizeof(float4);
    static constexpr int kWeightBytes = kWarpRows / 2 * sizeof(float2);
    static constexpr int kLineBytes = 32 * sizeof(float4);
    static constexpr int kBytes =
        (kConsumers * Config::kQueryBytes + kStages * (Config::kKeyBytes + Config::kValueBytes)) /
        kConsumerWarps;
    // Maximum number of splits of a warp: see shift_of.
    static constexpr int kWarpSplits = kMaxSplits / 2;
    // Number of splits from which several warps may share a line.
    static constexpr int kSharedFrom = 20;
    static constexpr int kStagedLines =
        (kBytes - kWarpSplits * (kSumBytes + kWeightBytes)) / kLineBytes;
    static_assert(kStagedLines >= 4);
    static_assert(kLineBytes + kSumBytes <= kWarpSplits * kSumBytes);

    // Divides the tile's lines into `splits` shares and combines share number `share`, with the
    // warps of all consumers. First it waits for all splits of the tile, whose CTAs are running
    // already, and calls `waited` after that.
    template <typename Waited>
    __device__ __forceinline__ void run(int splits, int share, int warp, Waited waited) const {
        const int rows = min(kQueries, work.query_len - work.query);
        const int lines = (rows + kWarpRows - 1) / kWarpRows * kLines;
        const int begin = lines * share / splits, end = lines * (share + 1) / splits;
        if (begin == end) return waited();
        // 2^shift warps share a line.
        const int shift = shift_of(end - begin, splits), way = warp & ((1 << shift) - 1);
        const int each = shift > 0 ? 1 : (end - begin + kConsumerWarps - 1) / kConsumerWarps;
        int line = begin + (warp >> shift) * each;
        const int last = min(line + each, end);
        const Splits own = {splits * way >> shift, splits * (way + 1) >> shift};
        const bool has_lines = line < last;
        if (has_lines) {
            const Arrivals<DeviceMemory> warps = p.arrivals(work.first_slot());
            while (warps.seen() < splits * kConsumerWarps) __nanosleep(20);
        }
        waited();
        Total total;
        // One iteration for the lines of each consumer warp's rows.
#pragma unroll 1
        while (line < last) {
            const int of_warp = line / kLines, stop = min(last, (of_warp + 1) * kLines);
            combine(own, of_warp, line, stop, rows, shift == 0, total);
            line = stop;
        }
        if (shift == 0) return;
        if (has_lines) total.put(staged, lane);
        CombineBarrier::sync();
        if (!has_lines || way != 0) return;
#pragma unroll 1
        for (int other = 1; other < 1 << shift; other++) total.add(staged + other * kBytes, lane);
        line = begin + (warp >> shift);
        write_lse(total, line, rows);
        write(total, target(total, line / kLines), line, rows);
    }

  private:
    // The splits `begin` to `end` of a query tile.
    struct Splits {
        int begin, end;
    };

    // The total of some splits: a lane's two rows of a line.
    struct Total {
        SoftmaxState<Base2> rows[2];
        float4 value = {};

        // Writes the total to shared memory, for a lane of another warp.
        __device__ void put(uint32_t to, int lane) const {
            ptx::st_shared_v4_f32(to + lane * sizeof(float4), value);
            if (lane % 4 == 0) {
                ptx::st_shared_v4_f32(
                    to + kLineBytes + lane / 4 * sizeof(float4),
                    make_float4(rows[0].maximum, rows[0].sum, rows[1].maximum, rows[1].sum));
            }
        }
        // Adds the total that a lane of another warp wrote.
        __device__ void add(uint32_t from, int lane) {
            const float4 more = ptx::ld_shared_v4_f32(from + lane * sizeof(float4)),
                         sums =
                             ptx::ld_shared_v4_f32(from + kLineBytes + lane / 4 * sizeof(float4));
            const float2 first = rows[0].merge({sums.x, sums.y}),
                         second = rows[1].merge({sums.z, sums.w});
            value = {value.x * first.x, value.y * first.x, value.z * second.x, value.w * second.x};
            add_rows(value, more, first.y, second.y);
        }
    };

    // Output address of a lane's two rows, and the factors that normalise them.
    struct Target {
        typename Config::Element* out;
        int query;
        float factor[2];
    };

    // log2 of the number of warps that share a line if a CTA combines `lines` lines. A warp takes
    // at least four splits of a line. With fewer than kSharedFrom splits no line is shared: the
    // exchange through shared memory takes longer than it saves, since its instructions are fetched
    // for it alone. With more than half of kMaxSplits at least two warps share a line, because a
    // CTA then has so few of the tile's lines, 256 at most.
    __device__ static int shift_of(int lines, int splits) {
        int shift = 0;
        if (splits < kSharedFrom) return shift;
#pragma unroll 1
        while (lines << (shift + 1) <= kConsumerWarps && splits >= 8 << shift && shift < 3) shift++;
        return shift;
    }
    static_assert(1 << 3 == kConsumerWarps && kSharedFrom <= kMaxSplits / 2 &&
                  kQueries / kWarpRows * kLines / (kMaxSplits / 2 + 1) < kConsumerWarps / 2);

    // Combines lines `line` to `stop` of one consumer warp's rows. Writes each of them if `whole`;
    // otherwise there is one line, and its sum stays in `total`.
    __device__ __forceinline__ void combine(Splits own, int of_warp, int line, int stop, int rows,
                                            bool whole, Total& total) const {
        const int splits = own.end - own.begin, first_slot = work.first_slot() + own.begin;
        // A lane copies 16 bytes: (m, l) of two rows of a split.
#pragma unroll 1
        for (int i = lane; i < splits * (kWarpRows / 2); i += 32) {
            const Partial<Config> partial(p, first_slot + i / (kWarpRows / 2), of_warp);
            ptx::cp_async_16(staged + i * 16, &partial.sum[i % (kWarpRows / 2)], true);
        }
        ptx::cp_async_commit_group();
        int entry = line * splits;
        const int entries = stop * splits;
        copy(splits, first_slot, of_warp, entry, min(entry + kStagedLines, entries));
        // Waits for the (m, l); lines stay in flight while weigh() computes.
        ptx::cp_async_wait_group<1>();
        __syncwarp();
        total = {};
        weigh(splits, total.rows);
        ptx::cp_async_wait_group<0>();
        const Target to = target(total, of_warp);
        if (whole) write_lse(total, line, rows);
        int split = 0;
#pragma unroll 1
        for (int first = entry; entry < entries; first = entry) {
            const int until = min(first + kStagedLines, entries);
            if (first > line * splits) {
                // No barrier is needed before the buffer is overwritten: each lane reads only what
                // it copied.
                copy(splits, first_slot, of_warp, first, until);
                ptx::cp_async_wait_group<0>();
            }
#pragma unroll 1
            for (; entry < until; entry++) {
                const float4 values = ptx::ld_shared_v4_f32(line_at(entry - first));
                const float2 weight = ptx::ld_shared_v2_f32(weight_at(split));
                add_rows(total.value, values, weight.x, weight.y);
                if (++split < splits || !whole) continue;
                write(total, to, entry / splits, rows);
                split = 0;
                total.value = {};
            }
        }
        __syncwarp();
    }

    __device__ Target target(const Total& total, int of_warp) const {
        const int query = of_warp * kWarpRows + lane / 4;
        auto* out = static_cast<typename Config::Element*>(p.out) +
                    (int64_t(work.query_start) + work.query + query) * p.out_token_stride +
                    work.head * p.out_head_stride + lane % 4 * 2;
        return {out, query, {row_factor(total.rows[0].sum), row_factor(total.rows[1].sum)}};
    }

    // Writes the log-sum-exps of a consumer warp's rows if `line` is the first line of these rows.
    __device__ __forceinline__ void write_lse(const Total& total, int line, int rows) const {
        if (line % kLines != 0 || lane % 4 != 0 || !p.lse) return;
        const int query = line / kLines * kWarpRows + lane / 4;
#pragma unroll
        for (int row = 0; row < 2; row++) {
            if (query + 8 * row < rows) {
                p.lse[work.head * p.lse_head_stride + work.query_start + work.query + query +
                      8 * row] = row_log_sum_exp(total.rows[row].maximum, total.rows[row].sum);
            }
        }
    }

    // Writes a line of the output.
    __device__ __forceinline__ void write(const Total& total, const Target& to, int line,
                                          int rows) const {
        const float4 sum = total.value;
        const bool contaminated = (sum.x + sum.y + sum.z + sum.w) * 0.f != 0.f;
        const int column = line % kLines * 8;
        if (to.query < rows) store(to.out + column, sum.x * to.factor[0], sum.y * to.factor[0]);
        if (to.query + 8 < rows) {
            store(to.out + column + 8 * p.out_token_stride, sum.z * to.factor[1],
                  sum.w * to.factor[1]);
        }
        if (__any_sync(~0u, contaminated) && p.causal) {
            const ContaminatedRows first = {
                work.query_start + work.query + line / kLines * kWarpRows, work.head};
            __syncwarp();
            Repair<Config>{p, lane}.repair({first, column, 8});
        }
    }

    // Copies entries `begin` to `end`: entry l * splits + s is line l of split s, from slot
    // `first_slot` + s.
    __device__ __forceinline__ void copy(int splits, int first_slot, int of_warp, int begin,
                                         int end) const {
        int line = begin / splits, split = begin - line * splits;
#pragma unroll 1
        for (int i = begin; i < end; i++) {
            const Partial<Config> partial(p, first_slot + split, of_warp);
            ptx::cp_async_16(line_at(i - begin), &partial.out[line % kLines * 32 + lane], true);
            if (++split == splits) split = 0, line++;
        }
        ptx::cp_async_commit_group();
    }

    // Computes the softmax states of this lane's two rows over all splits, and each split's weights
    // for them. The four lanes that have the same rows take every fourth split.
    __device__ __forceinline__ void weigh(int splits, SoftmaxState<Base2> (&state)[2]) const {
        const uint32_t sums = staged + lane / 4 * sizeof(float4);
#pragma unroll 2
        for (int split = lane % 4; split < splits; split += 4) {
            const float4 other = ptx::ld_shared_v4_f32(sums + split * kSumBytes);
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
            const float4 other = ptx::ld_shared_v4_f32(sums + split * kSumBytes);
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
        return staged + kWarpSplits * kSumBytes + split * kWeightBytes + lane / 4 * sizeof(float2);
    }
    __device__ uint32_t line_at(int i) const {
        return staged + kWarpSplits * (kSumBytes + kWeightBytes) + i * kLineBytes +
               lane * sizeof(float4);
    }

    __device__ static void store(typename Config::Element* out, float a, float b) {
        *reinterpret_cast<uint32_t*>(out) = ptx::cvt_rn_x2<typename Config::Element>(a, b);
    }
};

}  // namespace mla::sm90::prefill
