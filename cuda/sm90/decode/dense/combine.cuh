// Combines the partial results of a query tile into one, a slice of it per CTA. A CTA that waits
// combines its own slice; if all have fallen back, one CTA does all slices, one after the other.
// Every sum runs in the same order on any CTA, so results repeat bit for bit.
#pragma once

#include "fragments.cuh"

namespace mla::sm90::decode {

// The partial results of a query tile in the workspace. Their distance `step`, in bytes, is a
// constant, so offsets of splits at known distances are constants, too.
template <uint32_t step>
struct PartialResults {
    static constexpr uint32_t kStep = step;
    const char* partials;
    // In bytes: where split 0 lies, and where split k > 0 lies, less k steps. A workspace has less
    // than 2^32.
    uint32_t first, rest;
    int splits;

    __device__ const char* split(int k) const { return partials + (k * step + (k ? rest : first)); }
};

// Division of the combine's work.
template <int N, class Fragments>
struct CombineLayout {
    using Partial = PartialResult<N, Fragments::kLatent>;
    static constexpr int group_rows = Fragments::kGroupRows;
    // Unit, in vectors, that is shared out among the CTAs and that some lanes do together.
    static constexpr int kUnit = N <= 16 ? 8 : N / 2;
    static constexpr int kUnitBytes = kUnit * 16, kUnits = Partial::kVectors / kUnit;
    // Vectors of a group: of each output thread, and of all of them.
    static constexpr int kThreadVectors = Partial::kGroupVectors * group_rows / 8;
    static constexpr int kGroupVectors = kThreadVectors * kOutputThreads,
                         kGroupUnits = kGroupVectors / kUnit;
    // Vectors that a thread adds together to hide latency: two, of the same rows, if groups are
    // large, else one.
    static constexpr int kTogether = group_rows / 8;
    static constexpr int kWorkers = kOutputThreads / kUnit;
};

// Statistics of two neighbouring rows of a partial result, the first one even: their log-sum-exps,
// and the factors for their values.
struct SplitRows {
    float2 lse = {-INFINITY, -INFINITY};
    float scale = 1.f;

    SplitRows() = default;
    // Reads them from lse_offset() of the first row.
    __device__ explicit SplitRows(const char* rows) {
        const float4 v = *reinterpret_cast<const float4*>(rows);
        lse = make_float2(v.x, v.y);
        scale = v.z;
    }
};

// With at most this number of splits, slices are large, and combined in shared memory. With more,
// they are small, and combined in registers.
constexpr int kFewSplits = 16;

// Units [begin, end) of a tile.
struct Slice {
    int begin, end;

    __device__ static Slice of(int units, int i, int combiners) {
        return {int(unsigned(units * i) / unsigned(combiners)),
                int(unsigned(units * (i + 1)) / unsigned(combiners))};
    }
};

// Combines one slice of a tile of few splits, by all output threads. Shared memory holds the
// splits' weights; then the slice of this CTA's own split (slot 0), which may be there already;
// then those of the other splits in order. There are as many units at a time as fit.
//
// This code runs once in a launch, with eight warps. Its time is determined by the number of
// instructions and by the chains among them. The constructor therefore computes everything that can
// be known before all splits are there.
template <typename T, int N, typename Fragments, typename Source>
struct CombineFew {
    using M = CombineLayout<N, Fragments>;
    static constexpr int kUnitBytes = M::kUnitBytes, kWeightBytes = kFewSplits * N * 4;

    const KernelParams& p;
    const Source source;
    const OutputRows<T> out;
    const Slice slice;
    const int split, thread, in_unit, worker;
    uint32_t weights, kept, fetched;
    int first_group, rows, room;
    // This round's units, and how a worker goes through pairs of slot and unit.
    int first, units, slot, unit, slot_step, unit_step;

    __device__ CombineFew(const KernelParams& p, const Source& source, const OutputRows<T>& out,
                          Slice slice, int split, uint32_t shared, int bytes, int thread)
        : p(p),
          source(source),
          out(out),
          slice(slice),
          split(split),
          thread(thread),
          in_unit(thread % M::kUnit),
          worker(thread / M::kUnit) {
        const int size = slice.end - slice.begin;
        weights = shared;
        kept = shared + kWeightBytes;
        fetched = kept + size * kUnitBytes;
        room = size;
        bytes -= kWeightBytes;
        if (source.splits * size * kUnitBytes > bytes)
            room = unsigned(bytes - size * kUnitBytes) / unsigned((source.splits - 1) * kUnitBytes);
        first_group = unsigned(slice.begin) / M::kGroupUnits;
        rows = Fragments::kGroupRows * (unsigned(slice.end - 1) / M::kGroupUnits + 1 - first_group);
        plan(slice.begin);
    }

    __device__ void plan(int from) {
        first = from;
        units = min(room, slice.end - first);
        // Exact for such small numbers.
        const float inverse = __fdividef(1.f, float(units));
        slot_step = int((M::kWorkers + 0.5f) * inverse);
        unit_step = M::kWorkers - slot_step * units;
        slot = int((worker + 0.5f) * inverse);
        unit = worker - slot * units;
        ++slot;
    }

    __device__ const char* slot_source(int slot) const {
        return source.split(slot == 0 ? split : slot - (slot <= split));
    }

    // `there`: whether slot 0 is in shared memory already.
    __device__ void run(bool there) {
        if (!there)
            for (int u = worker; u < slice.end - slice.begin; u += M::kWorkers)
                ptx::cp_async_16(kept + u * kUnitBytes + in_unit * 16,
                                 slot_source(0) + (slice.begin + u) * kUnitBytes + in_unit * 16,
                                 true);
#pragma unroll 1
        while (true) {
            // The rows first: they need not wait for the values, which are in flight while the
            // weights are computed.
            Weights of_row;
            if (first == slice.begin) of_row.load(*this);
            fetch();
            if (first == slice.begin) weigh(of_row);
            ptx::cp_async_wait_all();
            OutputBarrier::sync();
            add();
            if (first + units == slice.end) break;
            OutputBarrier::sync();
            plan(first + units);
        }
    }

    __device__ void fetch() const {
        uint32_t to = fetched + worker * kUnitBytes + in_unit * 16;
        int s = slot, u = unit;
#pragma unroll 1
        while (s < source.splits) {
            ptx::cp_async_16(to, slot_source(s) + (first + u) * kUnitBytes + in_unit * 16, true);
            to += M::kWorkers * kUnitBytes;
            s += slot_step;
            u += unit_step;
            if (u >= units) {
                u -= units;
                ++s;
            }
        }
    }

    // Statistics of a row, from which a lane computes the weights of its splits. Four lanes share a
    // row. Either all lanes of a warp have rows, or none.
    struct Weights {
        static constexpr int kLanes = 4, kMaxOfLane = kFewSplits / kLanes;
        static_assert(N * kLanes <= kOutputThreads, "every row has its lanes");
        float lse[kMaxOfLane], scale[kMaxOfLane];

        __device__ void load(const CombineFew& merge) {
            const int row = merge.thread / kLanes, lane = merge.thread % kLanes;
#pragma unroll
            for (int i = 0; i < kMaxOfLane; ++i) {
                const int slot = lane + i * kLanes;
                lse[i] = -INFINITY;
                scale[i] = 1.f;
                if (row < merge.rows && slot < merge.source.splits) {
                    const char* split = merge.slot_source(slot);
                    const int of_split = Fragments::kGroupRows * merge.first_group + row;
                    lse[i] =
                        *reinterpret_cast<const float*>(split + M::Partial::lse_offset(of_split));
                    scale[i] =
                        *reinterpret_cast<const float*>(split + M::Partial::scale_offset(of_split));
                }
            }
        }
    };

    // Finds the weights of the splits; writes the log-sum-exp of the rows that begin in this slice.
    __device__ void weigh(const Weights& of_row) const {
        constexpr int lanes = Weights::kLanes, count = Weights::kMaxOfLane;
        const int row = thread / lanes, lane = thread % lanes;
        if (row >= rows) return;
        const auto& lse = of_row.lse;
        float weight[count], top = fmaxf(fmaxf(lse[0], lse[1]), fmaxf(lse[2], lse[3])), sum = 0.f;
#pragma unroll
        for (int distance = 1; distance < lanes; distance *= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
#pragma unroll
        for (int i = 0; i < count; ++i) {
            weight[i] = SoftmaxState<Base2>{lse[i], 1.f}.factor(top);
            sum += weight[i];
        }
#pragma unroll
        for (int distance = 1; distance < lanes; distance *= 2)
            sum += __shfl_xor_sync(~0u, sum, distance);
        const float inverse = sum == 0.f ? 0.f : __fdividef(1.f, sum);
#pragma unroll
        for (int i = 0; i < count; ++i)
            ptx::st_shared(weights + ((lane + i * lanes) * rows + row) * 4,
                           __float_as_uint(weight[i] * inverse * of_row.scale[i]));
        const int of_split = Fragments::kGroupRows * first_group + row,
                  of_tile = Fragments::row_of_tile(of_split);
        if (lane == 0 && of_split / Fragments::kGroupRows * M::kGroupUnits >= slice.begin &&
            of_tile < out.rows)
            write_lse(p, out.first_row + of_tile, out.q_begin, log2_sum_exp2(top, sum));
    }

    // Adds the slots and writes the output, each warp its vectors of a group one after the other.
    __device__ void add() const {
#pragma unroll 1
        for (int group = unsigned(first) / M::kGroupUnits; group * M::kGroupUnits < first + units;
             ++group) {
            const auto to = Fragments::target(out, group, thread);
#pragma unroll 1
            for (int vector = 0; vector < M::kThreadVectors; vector += M::kTogether) {
                int at[M::kTogether];
                bool own[M::kTogether], any = false;
#pragma unroll
                for (int i = 0; i < M::kTogether; ++i) {
                    at[i] = group * M::kGroupVectors + (vector + i) * kOutputThreads + thread -
                            first * M::kUnit;
                    own[i] = unsigned(at[i]) < unsigned(units * M::kUnit);
                    any = any || own[i];
                }
                if (!__any_sync(~0u, any)) continue;
                PackedVector sum[M::kTogether];
                if (any) {
                    uint32_t x[M::kTogether], next[M::kTogether];
#pragma unroll
                    for (int i = 0; i < M::kTogether; ++i) {
                        // A thread whose vector lies outside the slice reads another one and does
                        // not write it.
                        if (!own[i]) at[i] = 0;
                        x[i] = kept + (first - slice.begin) * kUnitBytes + at[i] * 16;
                        next[i] = fetched + at[i] * 16;
                    }
                    uint32_t weight = weights + (Fragments::kGroupRows * (group - first_group) +
                                                 2 * Fragments::rows_of(thread)) *
                                                    4;
                    constexpr int slots = 4 / M::kTogether;
#pragma unroll slots
                    for (int slot = 0; slot < source.splits; ++slot) {
                        const float2 of_rows = ptx::ld_shared_v2_f32(weight);
#pragma unroll
                        for (int i = 0; i < M::kTogether; ++i) {
                            sum[i].add(PackedVector(ptx::ld_shared_v4(x[i])), of_rows);
                            x[i] = next[i];
                            next[i] += units * kUnitBytes;
                        }
                        weight += rows * 4;
                    }
                }
#pragma unroll
                for (int i = 0; i < M::kTogether; ++i)
                    Fragments::write(out, to, thread, vector + i, own[i], sum[i]);
            }
        }
    }
};

// Sum of several splits for one vector: the softmax states of its two rows, and their values.
struct CombineState {
    PackedVector value;
    SoftmaxState<Base2> rows[2];

    __device__ void raise_maximum(float2 m) {
        rows[0].maximum = fmaxf(rows[0].maximum, m.x);
        rows[1].maximum = fmaxf(rows[1].maximum, m.y);
    }
    __device__ float2 maximum() const { return make_float2(rows[0].maximum, rows[1].maximum); }

    // Adds a state whose maximum is not above this one's.
    __device__ void add(const CombineState& other) {
        const float2 factor = make_float2(other.rows[0].factor(rows[0].maximum),
                                          other.rows[1].factor(rows[1].maximum));
        value.add(other.value, factor);
        rows[0].add(other.rows[0], factor.x);
        rows[1].add(other.rows[1], factor.y);
    }

    // Adds the state that another lane has under the same maximum.
    __device__ void add_same(int lanes_away) {
#pragma unroll
        for (float& x : value.value) x += __shfl_xor_sync(~0u, x, lanes_away);
#pragma unroll
        for (auto& row : rows) row.sum += __shfl_xor_sync(~0u, row.sum, lanes_away);
    }

    __device__ PackedVector normalised() const {
        return value.times(make_float2(rows[0].sum == 0.f ? 0.f : __fdividef(1.f, rows[0].sum),
                                       rows[1].sum == 0.f ? 0.f : __fdividef(1.f, rows[1].sum)));
    }
};

// Combines splits first, first + step, … of some vectors into `states`. All of these vectors belong
// to the two rows from `column` on. If `all`, there are `count` of them: index, index + apart, and
// so on. Otherwise vector `index` is the only one. Splits are read in batches, and all reads of a
// batch are in flight together.
template <class Partial, int step, int apart, int count, typename Source>
__device__ __forceinline__ void combine_some(CombineState (&states)[count], const Source& source,
                                             int index, bool all, int column, int first) {
    constexpr int batch = Partial::kRows <= 16 ? 4 : 8;
    CombineState& state = states[0];
    const char* own = source.partials + (first * Source::kStep + source.rest);
    const char *vectors = own + index * 16, *stats = own + Partial::lse_offset(column);
#pragma unroll 1
    for (int k0 = first; k0 < source.splits; k0 += batch * step) {
        uint4 x[batch][count];
        SplitRows rows[batch];
        float2 top = state.maximum();
#pragma unroll
        for (int i = 0; i < batch; ++i) {
#pragma unroll
            for (int j = 0; j < count; ++j) x[i][j] = make_uint4(0, 0, 0, 0);
            if (k0 + i * step < source.splits) {
                // The result of split 0 lies elsewhere.
                const int64_t from = int64_t(i) * step * Source::kStep +
                                     (i == 0 && k0 == 0 ? int64_t(source.first) - source.rest : 0);
                rows[i] = SplitRows(stats + from);
#pragma unroll
                for (int j = 0; j < count; ++j)
                    if (j == 0 || all)
                        x[i][j] = *reinterpret_cast<const uint4*>(vectors + from + j * apart * 16);
            }
        }
        vectors += int64_t(batch) * step * Source::kStep;
        stats += int64_t(batch) * step * Source::kStep;
#pragma unroll
        for (int i = 0; i < batch; ++i)
            top = make_float2(fmaxf(top.x, rows[i].lse.x), fmaxf(top.y, rows[i].lse.y));
        const float2 older = make_float2(state.rows[0].raise(top.x), state.rows[1].raise(top.y));
#pragma unroll
        for (int j = 0; j < count; ++j) states[j].value = states[j].value.times(older);
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            // A normalised result is a state whose sum is 1 under its log-sum-exp.
            const SoftmaxState<Base2> a{rows[i].lse.x, 1.f}, b{rows[i].lse.y, 1.f};
            const float2 factor = make_float2(a.factor(top.x), b.factor(top.y));
            state.rows[0].add(a, factor.x);
            state.rows[1].add(b, factor.y);
#pragma unroll
            for (int j = 0; j < count; ++j)
                states[j].value.add(PackedVector(x[i][j]), make_float2(factor.x * rows[i].scale,
                                                                       factor.y * rows[i].scale));
        }
    }
#pragma unroll
    for (int j = 1; j < count; ++j) {
        states[j].rows[0] = state.rows[0];
        states[j].rows[1] = state.rows[1];
    }
}

// Combines one slice of a tile of many splits, by all output threads. First each worker sums some
// of the splits; then these sums are added in order. `scratch` has room for all workers' sums of
// eight units.
template <typename T, int N, typename Fragments, typename Source>
__device__ __forceinline__ void combine_many(const KernelParams& p, const Source& source,
                                             const OutputRows<T>& out, Slice slice,
                                             CombineState* scratch, int thread) {
    using M = CombineLayout<N, Fragments>;
    constexpr int ways = M::kWorkers, groups = 32 / M::kUnit;
    static_assert(ways == 8 * groups, "each group of lanes adds eight");
    const int lane = thread & 31, warp = thread >> 5, group_of_lanes = lane / M::kUnit,
              in_unit = thread % M::kUnit, way = thread / M::kUnit;
#pragma unroll 1
    for (int first = slice.begin; first < slice.end; first += 8) {
        const int last = min(first + 8, slice.end);
#pragma unroll 1
        for (int unit = first; unit < last;) {
            const int index = unit * M::kUnit + in_unit, together = M::kTogether;
            const bool all = together == 1 || (unit % together == 0 && unit + together <= last);
            CombineState some[together];
            combine_some<typename M::Partial, ways, M::kUnit>(
                some, source, index, all,
                Fragments::kGroupRows * (index / M::kGroupVectors) + 2 * Fragments::rows_of(index),
                way);
#pragma unroll
            for (int j = 0; j < together; ++j)
                if (j == 0 || all)
                    scratch[((unit + j - first) * ways + way) * M::kUnit + in_unit] = some[j];
            unit += all ? together : 1;
        }
        OutputBarrier::sync();
        // A warp adds up a unit, each group of lanes eight of the ways.
        const int unit = first + warp;
        if (unit < last) {
            CombineState total;
            const CombineState* some =
                scratch + (warp * ways + group_of_lanes * 8) * M::kUnit + in_unit;
#pragma unroll
            for (int i = 0; i < 8; ++i) total.raise_maximum(some[i * M::kUnit].maximum());
#pragma unroll
            for (int away = M::kUnit; away < 32; away *= 2)
                total.raise_maximum(make_float2(__shfl_xor_sync(~0u, total.rows[0].maximum, away),
                                                __shfl_xor_sync(~0u, total.rows[1].maximum, away)));
#pragma unroll
            for (int i = 0; i < 8; ++i) total.add(some[i * M::kUnit]);
#pragma unroll
            for (int away = M::kUnit; away < 32; away *= 2) total.add_same(away);
            // All have the sum; one group of lanes writes it.
            const int index = unit / groups * 32 + lane, group = index / M::kGroupVectors,
                      of_group = index % M::kGroupVectors;
            const bool own = group_of_lanes == unit % groups;
            Fragments::write(out, Fragments::target(out, group, index & 255), index & 255,
                             of_group >> 8, own, total.normalised());
            if (own && Fragments::begins_rows(of_group)) {
#pragma unroll 1
                for (int i = 0; i < 2; ++i) {
                    const int row = Fragments::row_of_tile(Fragments::kGroupRows * group +
                                                           2 * Fragments::rows_of(index) + i);
                    if (row < out.rows)
                        write_lse(p, out.first_row + row, out.q_begin,
                                  log2_sum_exp2(i ? total.rows[1].maximum : total.rows[0].maximum,
                                                i ? total.rows[1].sum : total.rows[0].sum));
                }
            }
        }
        OutputBarrier::sync();
    }
}

}  // namespace mla::sm90::decode
