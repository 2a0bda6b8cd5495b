// Combines the splits of a tile of rows whose keys several CTAs divide. Each CTA stores its partial
// result in the workspace, and those that have nothing else to do combine a slice of the output
// each (common/split_protocol.cuh).
//
// The output is counted in units: the accumulators of one warp in one quadruple of registers, 16
// rows by 8 columns. The order of sums depends only on the number of splits, not on the CTAs that
// compute them.
#pragma once

#include "common/softmax.cuh"
#include "common/split_protocol.cuh"

namespace mla::sm80 {

// Default patience: cycles that a CTA waits for others, beside the time that their work takes.
constexpr int64_t kDefaultPatience = 100000;

// Layout: how a CTA's threads hold a tile.
//   kThreads, kRows             of the CTA
//   kRowsUnits                  units of the same 16 rows, which follow one another
//   vector_of(rows, unit)       index, among the CTA's quadruples, of lane 0's in such a unit
//   kMinAtOnce                  minimum number of units that a warp sums at the same time; the
//                               maximum is kAtOnce
//   kUnitsOfSlice               if splits are many, number of units that a CTA without other work
//                               exchanges between two barriers; other CTAs have room for
//                               kUnitsOfAll. 0: one after another, by all warps
//   kSplitsAtOnce               number of splits of such units that a warp has in flight
//   sync()                      a barrier of the CTA
template <int kRows>
struct SplitShared {
    // Maximum (base 2) and sum of each row.
    float maximum[kRows], sum[kRows];
    // A SplitRole.
    int role;
    int padding[3];
};

// Layout of a partial result: the quadruples of all threads, then the rows' maxima and sums.
template <class Layout>
constexpr int kPartialRowsAt = Layout::kRows / 16 * Layout::kRowsUnits * 32 * 4;
template <class Layout>
constexpr int kPartialFloats = kPartialRowsAt<Layout> + 2 * Layout::kRows;

// This CTA's split of a tile with `splits` splits. The first `combiners` of them belong to CTAs
// that have nothing else to do.
struct Split {
    SplitCounters* counters;
    int index, splits, combiners;
    // Cycles that a CTA waits for the others.
    int64_t patience;
};

// The first of this lane's two rows in a unit of the CTA's tile.
template <class Layout>
__device__ __forceinline__ int first_row_of(int unit) {
    return unit / Layout::kRowsUnits * 16 + (threadIdx.x & 31) / 4;
}

// Adds the state of a row from other keys.
__device__ __forceinline__ void merge(SoftmaxState<Base2>& state,
                                      const SoftmaxState<Base2>& other) {
    const float maximum = fmaxf(state.maximum, other.maximum);
    state.raise(maximum);
    state.add(other, other.factor(maximum));
}

// Sum of the quadruples that `kWarps` warps have left in shared memory, in the order of the warps.
template <int kWarps>
__device__ __forceinline__ float4 sum_of_warps(const float4* from) {
    float4 sum = from[0];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) {
        const float4 other = from[i * 32];
        sum.x += other.x;
        sum.y += other.y;
        sum.z += other.z;
        sum.w += other.w;
    }
    return sum;
}

template <class Layout, class PartialOf, class RowsOf, class Write>
class SplitCombine {
    using State = SoftmaxState<Base2>;
    using Shared = SplitShared<Layout::kRows>;
    static constexpr int kWarps = Layout::kThreads / 32;
    static constexpr int kUnits = Layout::kRows / 16 * Layout::kRowsUnits;
    // Units that a warp sums at the same time if a slice has one or more for each warp.
    static constexpr int kAtOnce = 8;

  public:
    // Up to this number, splits are added one after another, by one warp.
    static constexpr int kFewSplits = kUnits / kWarps;

  private:
    // Threads that share the splits' maxima and sums of a row.
    static constexpr int kThreadsOfRow = Layout::kThreads / Layout::kRows;
    static constexpr int kRowsAt = kPartialRowsAt<Layout>;

  public:
    // `partial_of(split)` returns the address of a split's result. `rows_of(unit)` returns the data
    // that `write` needs for row `first_row_of(unit)` and for the row eight further, whose maxima
    // and sums are in `shared`; it is the same for all units of 16 rows. `write(rows, unit, x)`
    // writes x. `units`: number of units whose rows exist, or of all.
    __device__ SplitCombine(const Split& split, Shared& shared, float4* exchanged,
                            const PartialOf& partial_of, const RowsOf& rows_of, const Write& write,
                            int few = kFewSplits, int units = kUnits)
        : split_(split),
          shared_(shared),
          exchanged_(exchanged),
          partial_of_(partial_of),
          rows_of_(rows_of),
          write_(write),
          few_(few),
          units_(units) {}

    // Called after all threads have written this CTA's partial result.
    __device__ void run() const {
        const SplitProtocol<DeviceMemory> protocol = {split_.counters, split_.splits,
                                                      split_.combiners};
        Layout::sync();
        if (threadIdx.x == 0) shared_.role = int(take_role<true>(protocol));
        Layout::sync();
        const auto role = static_cast<SplitRole>(shared_.role);
        if (role == SplitRole::slice)
            combine(slice_begin(split_.index), slice_begin(split_.index + 1),
                    Layout::kUnitsOfSlice);
        else if (role == SplitRole::everything)
            combine(0, units_, Layout::kUnitsOfAll);
        Layout::sync();
        if (threadIdx.x == 0 && protocol.leave() == split_.splits) protocol.reset();
    }

    // The same, but `slice` combines this CTA's slice in a way of its own, with the same bits, or
    // returns false. If the CTAs fall back, `put_back` writes the data that the CTA has kept to the
    // workspace.
    template <class Slice, class PutBack>
    __device__ void run(const Slice& slice, const PutBack& put_back) const {
        const SplitProtocol<DeviceMemory> protocol = {split_.counters, split_.splits,
                                                      split_.combiners};
        Layout::sync();
        if (threadIdx.x == 0) shared_.role = int(take_role<false>(protocol));
        Layout::sync();
        auto role = static_cast<SplitRole>(shared_.role);
        if (role == SplitRole::yield) {
            put_back();
            Layout::sync();
            if (threadIdx.x == 0) shared_.role = int(protocol.yield());
            Layout::sync();
            role = static_cast<SplitRole>(shared_.role);
        }
        const bool all = role == SplitRole::everything;
        if (all || (role == SplitRole::slice && !slice()))
            combine(all ? 0 : slice_begin(split_.index),
                    all ? units_ : slice_begin(split_.index + 1), Layout::kUnitsOfAll);
        Layout::sync();
        if (threadIdx.x == 0 && protocol.leave() == split_.splits) protocol.reset();
    }

  private:
    __device__ int slice_begin(int combiner) const { return combiner * units_ / split_.combiners; }

    // Counts this split in, and waits for the others if the CTA has nothing else to do. `kYield`:
    // the whole partial result is in the workspace already.
    template <bool kYield>
    __device__ SplitRole take_role(const SplitProtocol<DeviceMemory>& protocol) const {
        if (split_.index >= split_.combiners) return protocol.arrive();
        protocol.arrive_combiner();
        const int64_t start = clock64();
        while (true) {
            const int seen = protocol.seen();
            const SplitRole role = protocol.role_of(seen);
            if (role == SplitRole::slice) return role;
            if (role == SplitRole::yield) return kYield ? protocol.yield() : role;
            if (clock64() - start > split_.patience) protocol.fall_back(seen);
        }
    }

    // Combines units `begin` to `end` - 1 of all splits; `room` of them may be exchanged at once.
    __device__ void combine(int begin, int end, int room) const {
        combine_statistics();
        const int warp = threadIdx.x / 32;
        if (split_.splits > few_) {
            if constexpr (Layout::kUnitsOfSlice > 0)
#pragma unroll 1
                for (; begin < end; begin += room) combine_units(begin, min(end, begin + room));
            else
                for (int unit = begin; unit < end; ++unit) combine_unit(unit);
            return;
        }
        while (begin < end) {
            // Units of the same 16 rows.
            const int last = min(end, (begin / Layout::kRowsUnits + 1) * Layout::kRowsUnits);
            const int each = min((last - begin + kWarps - 1) / kWarps, kAtOnce);
            for (int unit = begin + warp * each; unit < last; unit += kWarps * each)
                combine_alone<kAtOnce>(unit, min(each, last - unit));
            begin = last;
        }
    }

    // One warp sums `count` units of the same 16 rows, at most kCount. The same number of loads is
    // in flight for any count.
    template <int kCount>
    __device__ void combine_alone(int unit, int count) const {
        if constexpr (kCount > Layout::kMinAtOnce)
            if (count <= kCount / 2) return combine_alone<kCount / 2>(unit, count);
        float4 sums[kCount] = {};
        add_splits<kCount, 2 * kAtOnce / kCount>(unit, count, 0, split_.splits, sums);
        const auto rows = rows_of_(unit);
#pragma unroll
        for (int k = 0; k < kCount; ++k)
            if (k < count) write_(rows, unit + k, sums[k]);
    }

    // Computes every row's maximum, and its sum relative to that.
    __device__ void combine_statistics() const {
        State* states = reinterpret_cast<State*>(exchanged_);
        const int row = threadIdx.x % Layout::kRows;
        State own;
#pragma unroll 4
        for (int i = threadIdx.x / Layout::kRows; i < split_.splits; i += kThreadsOfRow) {
            const float* rows = partial_of_(i) + kRowsAt + row;
            merge(own, {load(rows), load(rows + Layout::kRows)});
        }
        states[threadIdx.x] = own;
        Layout::sync();
        if (threadIdx.x < Layout::kRows) {
            for (int i = 1; i < kThreadsOfRow; ++i) merge(own, states[i * Layout::kRows + row]);
            shared_.maximum[row] = own.maximum;
            shared_.sum[row] = own.sum;
        }
        Layout::sync();
    }

    // Adds splits `first` to `last` - 1 of `count` units of the same 16 rows.
    template <int kCount, int kUnroll>
    __device__ void add_splits(int unit, int count, int first, int last,
                               float4 (&sums)[kCount]) const {
        const int row = first_row_of<Layout>(unit), rows = unit / Layout::kRowsUnits;
        const float maxima[2] = {shared_.maximum[row], shared_.maximum[row + 8]};
#pragma unroll kUnroll
        for (int i = first; i < last; ++i) {
            const float* from = partial_of_(i);
            const float4* vectors = reinterpret_cast<const float4*>(from) + (threadIdx.x & 31);
            float weights[2];
#pragma unroll
            for (int half = 0; half < 2; ++half)
                weights[half] =
                    State{load(from + kRowsAt + row + half * 8), 0.f}.factor(maxima[half]);
#pragma unroll
            for (int k = 0; k < kCount; ++k) {
                // Behind the last unit, the last one again: a branch would make loads wait for one
                // another.
                const int of_rows = (unit + min(k, count - 1)) % Layout::kRowsUnits;
                const float4 x = __ldcg(vectors + Layout::vector_of(rows, of_rows));
                sums[k].x = fmaf(x.x, weights[0], sums[k].x);
                sums[k].y = fmaf(x.y, weights[0], sums[k].y);
                sums[k].z = fmaf(x.z, weights[1], sums[k].z);
                sums[k].w = fmaf(x.w, weights[1], sums[k].w);
            }
        }
    }

    // Each warp sums a range of the splits, and the ranges are added in their order.
    __device__ void combine_unit(int unit) const {
        const int warp = threadIdx.x / 32;
        float4 own[1] = {};
        add_splits<1, 8>(unit, 1, warp * split_.splits / kWarps,
                         (warp + 1) * split_.splits / kWarps, own);
        exchanged_[threadIdx.x] = own[0];
        Layout::sync();
        if (warp == 0) {
            float4 sum = own[0];
            for (int i = 1; i < kWarps; ++i) {
                const float4 other = exchanged_[i * 32 + threadIdx.x];
                sum.x += other.x;
                sum.y += other.y;
                sum.z += other.z;
                sum.w += other.w;
            }
            write_(rows_of_(unit), unit, sum);
        }
        Layout::sync();
    }

    // Same as add_splits for kCount units from `unit` on, of the same 16 rows, except that the same
    // number of loads is in flight for any number of splits.
    template <int kCount>
    __device__ void add_many(int unit, int first, int last, float4 (&sums)[kCount]) const {
        constexpr int kSplits = Layout::kSplitsAtOnce;
        const int row = first_row_of<Layout>(unit), rows = unit / Layout::kRowsUnits;
        const int of_rows = unit % Layout::kRowsUnits;
        const float maxima[2] = {shared_.maximum[row], shared_.maximum[row + 8]};
#pragma unroll 1
        for (int begin = first; begin < last; begin += kSplits) {
            float4 x[kSplits][kCount];
            float of_splits[kSplits][2];
#pragma unroll
            for (int i = 0; i < kSplits; ++i) {
                // Behind the last split, the last one again: a branch would make loads wait for one
                // another.
                const float* from = partial_of_(min(begin + i, last - 1));
                const float4* vectors = reinterpret_cast<const float4*>(from) + (threadIdx.x & 31);
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    of_splits[i][half] = load(from + kRowsAt + row + half * 8);
#pragma unroll
                for (int k = 0; k < kCount; ++k)
                    x[i][k] = __ldcg(vectors + Layout::vector_of(rows, of_rows + k));
            }
#pragma unroll
            for (int i = 0; i < kSplits; ++i) {
                if (begin + i >= last) break;
                const float weights[2] = {State{of_splits[i][0], 0.f}.factor(maxima[0]),
                                          State{of_splits[i][1], 0.f}.factor(maxima[1])};
#pragma unroll
                for (int k = 0; k < kCount; ++k) {
                    sums[k].x = fmaf(x[i][k].x, weights[0], sums[k].x);
                    sums[k].y = fmaf(x[i][k].y, weights[0], sums[k].y);
                    sums[k].z = fmaf(x[i][k].z, weights[1], sums[k].z);
                    sums[k].w = fmaf(x[i][k].w, weights[1], sums[k].w);
                }
            }
        }
    }

    // Each warp sums a range of the splits for all these units. Then one warp for each unit adds up
    // the unit's ranges in their order.
    __device__ void combine_units(int begin, int end) const {
        const int warp = threadIdx.x / 32;
        const int first = warp * split_.splits / kWarps, last = (warp + 1) * split_.splits / kWarps;
#pragma unroll 1
        for (int unit = begin; unit < end;) {
            float4* to = exchanged_ + (unit - begin) * Layout::kThreads + threadIdx.x;
            // Two neighbours of the same 16 rows.
            if (unit % 2 == 0 && unit + 1 < end) {
                float4 own[2] = {};
                add_many<2>(unit, first, last, own);
                to[0] = own[0];
                to[Layout::kThreads] = own[1];
                unit += 2;
            } else {
                float4 own[1] = {};
                add_many<1>(unit, first, last, own);
                to[0] = own[0];
                ++unit;
            }
        }
        Layout::sync();
#pragma unroll 1
        for (int unit = begin + warp; unit < end; unit += kWarps) {
            const float4* from =
                exchanged_ + (unit - begin) * Layout::kThreads + (threadIdx.x & 31);
            write_(rows_of_(unit), unit, sum_of_warps<kWarps>(from));
        }
        Layout::sync();
    }

    // Not from L1, which may hold older data: other CTAs wrote it.
    __device__ static float load(const float* from) { return __ldcg(from); }

    const Split& split_;
    Shared& shared_;
    // Buffer in shared memory by which all threads exchange sums.
    float4* exchanged_;
    const PartialOf& partial_of_;
    const RowsOf& rows_of_;
    const Write& write_;
    int few_, units_;
};

template <class Layout, class PartialOf, class RowsOf, class Write>
__device__ void split_combine(const Split& split, SplitShared<Layout::kRows>& shared,
                              float4* exchanged, const PartialOf& partial_of, const RowsOf& rows_of,
                              const Write& write,
                              int units = Layout::kRows / 16 * Layout::kRowsUnits) {
    using Combine = SplitCombine<Layout, PartialOf, RowsOf, Write>;
    Combine(split, shared, exchanged, partial_of, rows_of, write, Combine::kFewSplits, units).run();
}

}  // namespace mla::sm80
