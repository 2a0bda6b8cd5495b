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
//   kRowsUnits                  number of units of a block of 16 rows, which follow one another
//   vector_of(rows, unit)       number of the quadruple that lane 0 has in a unit of block `rows`
//   kFewSplits                  up to this number, splits are added one after another, by one warp
//   kMinAtOnce                  minimum number of units that a warp sums at the same time if splits
//                               are few; the maximum is kAtOnce
//   kTogether, kSplitsAtOnce    units that a warp sums at the same time if splits are many, and
//                               number of their splits that are in flight
//   kUnitsOfSlice, kUnitsOfAll  also if splits are many: units whose sums are exchanged between two
//                               barriers, when a CTA combines its slice, and when it combines all
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

// A split of a tile whose own length decides its splits. `sharers` CTAs have one or more of them,
// and `index` and `combiners` count these CTAs. One CTA may have all splits.
struct OwnSplit : Split {
    int sharers;
};

__device__ __forceinline__ int sharers_of(const Split& split) { return split.splits; }
__device__ __forceinline__ int sharers_of(const OwnSplit& split) { return split.sharers; }
__device__ __forceinline__ bool is_shared(const Split&) { return true; }
__device__ __forceinline__ bool is_shared(const OwnSplit& split) { return split.sharers > 1; }

// The first of this lane's two rows in a unit of the CTA's tile.
template <class Layout>
__device__ __forceinline__ int first_row_of(int unit) {
    return unit / Layout::kRowsUnits * 16 + (threadIdx.x & 31) / 4;
}

// `partial_of(split)` returns the address of a split's result. `rows_of(unit)` returns the data
// that `write` needs for row `first_row_of(unit)` and for the row eight further, whose maxima and
// sums are in `shared`; it is the same for all units of 16 rows. `write(rows, unit, x)` writes x.
template <class Layout, class SplitOf, class PartialOf, class RowsOf, class Write>
struct SplitCombine {
    using State = SoftmaxState<Base2>;
    using Protocol = SplitProtocol<DeviceMemory>;
    static constexpr int kWarps = Layout::kThreads / 32;
    // Units that a warp sums at the same time if a slice has one or more for each warp.
    static constexpr int kAtOnce = 8;
    // Threads that share the splits' maxima and sums of a row.
    static constexpr int kThreadsOfRow = Layout::kThreads / Layout::kRows;
    static constexpr int kRowsAt = kPartialRowsAt<Layout>;

    const SplitOf& split;
    SplitShared<Layout::kRows>& shared;
    // Buffer in shared memory by which all threads exchange sums.
    float4* exchanged;
    const PartialOf& partial_of;
    const RowsOf& rows_of;
    const Write& write;
    // Number of units whose rows exist, or of all.
    int units;

    __device__ void run() const {
        const Protocol protocol = {split.counters, sharers_of(split), split.combiners};
        Layout::sync();
        if (threadIdx.x == 0)
            shared.role = int(is_shared(split) ? take_role(protocol) : SplitRole::everything);
        Layout::sync();
        const auto role = static_cast<SplitRole>(shared.role);
        if (role == SplitRole::slice)
            combine(slice_begin(split.index), slice_begin(split.index + 1), Layout::kUnitsOfSlice);
        else if (role == SplitRole::everything)
            combine(0, units, Layout::kUnitsOfAll);
        Layout::sync();
        if (threadIdx.x == 0 && is_shared(split) && protocol.leave() == sharers_of(split))
            protocol.reset();
    }

    __device__ int slice_begin(int combiner) const { return combiner * units / split.combiners; }

    // Counts this split in, and waits for the others if the CTA has nothing else to do. The whole
    // partial result is in the workspace already.
    __device__ SplitRole take_role(const Protocol& protocol) const {
        if (split.index >= split.combiners) return protocol.arrive();
        protocol.arrive_combiner();
        const int64_t start = clock64();
        while (true) {
            const int seen = protocol.seen();
            const SplitRole role = protocol.role_of(seen);
            if (role == SplitRole::slice) return role;
            if (role == SplitRole::yield) return protocol.yield();
            if (clock64() - start > split.patience) protocol.fall_back(seen);
        }
    }

    // Combines units `begin` to `end` - 1 of all splits; `room` of them may be exchanged at once.
    __device__ void combine(int begin, int end, int room) const {
        combine_statistics();
        if (split.splits > Layout::kFewSplits) {
#pragma unroll 1
            for (; begin < end; begin += room) combine_many(begin, min(end, begin + room));
            return;
        }
        while (begin < end) {
            // Units of the same 16 rows.
            const int last = min(end, (begin / Layout::kRowsUnits + 1) * Layout::kRowsUnits);
            const int each = min((last - begin + kWarps - 1) / kWarps, kAtOnce);
            for (int unit = begin + threadIdx.x / 32 * each; unit < last; unit += kWarps * each)
                combine_few<kAtOnce>(unit, min(each, last - unit));
            begin = last;
        }
    }

    // Computes every row's maximum, and its sum relative to that.
    __device__ void combine_statistics() const {
        State* states = reinterpret_cast<State*>(exchanged);
        const int row = threadIdx.x % Layout::kRows;
        State own;
#pragma unroll 4
        for (int i = threadIdx.x / Layout::kRows; i < split.splits; i += kThreadsOfRow) {
            const float* rows = partial_of(i) + kRowsAt + row;
            own.merge({__ldcg(rows), __ldcg(rows + Layout::kRows)});
        }
        states[threadIdx.x] = own;
        Layout::sync();
        if (threadIdx.x < Layout::kRows) {
            for (int i = 1; i < kThreadsOfRow; ++i) own.merge(states[i * Layout::kRows + row]);
            shared.maximum[row] = own.maximum;
            shared.sum[row] = own.sum;
        }
        Layout::sync();
    }

    // One warp sums `count` units of the same 16 rows, at most kCount. The same number of loads is
    // in flight for any count.
    template <int kCount>
    __device__ void combine_few(int unit, int count) const {
        if constexpr (kCount > Layout::kMinAtOnce)
            if (count <= kCount / 2) return combine_few<kCount / 2>(unit, count);
        float4 sums[kCount] = {};
        add<kCount, 2 * kAtOnce / kCount>(unit, count, 0, split.splits, sums);
        const auto rows = rows_of(unit);
#pragma unroll
        for (int k = 0; k < kCount; ++k)
            if (k < count) write(rows, unit + k, sums[k]);
    }

    // Each warp sums a range of the splits for all these units. Then one warp for each unit adds up
    // the unit's ranges in their order.
    __device__ void combine_many(int begin, int end) const {
        constexpr int kTogether = Layout::kTogether;
        const int warp = threadIdx.x / 32;
        const int first = warp * split.splits / kWarps, last = (warp + 1) * split.splits / kWarps;
#pragma unroll 1
        for (int unit = begin; unit < end;) {
            // Units of the same 16 rows.
            const int count = min(kTogether - unit % kTogether, end - unit);
            float4 sums[kTogether] = {};
            add<kTogether, Layout::kSplitsAtOnce>(unit, count, first, last, sums);
#pragma unroll
            for (int k = 0; k < kTogether; ++k)
                if (k < count)
                    exchanged[(unit + k - begin) * Layout::kThreads + threadIdx.x] = sums[k];
            unit += count;
        }
        Layout::sync();
#pragma unroll 1
        for (int unit = begin + warp; unit < end; unit += kWarps) {
            const float4* from = exchanged + (unit - begin) * Layout::kThreads + threadIdx.x % 32;
            float4 sum = from[0];
#pragma unroll
            for (int i = 1; i < kWarps; ++i) add_rows(sum, from[i * 32], 1.f, 1.f);
            write(rows_of(unit), unit, sum);
        }
        Layout::sync();
    }

    // Adds splits `first` to `last` - 1, in this order, of `count` units of the same 16 rows.
    // `count` is at most kCount. The number of loads in flight is always the same: if there are
    // fewer units or splits, the last one is read again in place of a missing one. A branch would
    // make loads wait for one another. The loads bypass L1, which may hold older data, because
    // other CTAs wrote the results.
    template <int kCount, int kSplits>
    __device__ void add(int unit, int count, int first, int last, float4 (&sums)[kCount]) const {
        const int row = first_row_of<Layout>(unit), rows = unit / Layout::kRowsUnits;
        const float maxima[2] = {shared.maximum[row], shared.maximum[row + 8]};
#pragma unroll 1
        for (int begin = first; begin < last; begin += kSplits) {
            float4 x[kSplits][kCount];
            float of_rows[kSplits][2];
#pragma unroll
            for (int i = 0; i < kSplits; ++i) {
                const float* from = partial_of(min(begin + i, last - 1));
                const float4* vectors = reinterpret_cast<const float4*>(from) + threadIdx.x % 32;
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    of_rows[i][half] = __ldcg(from + kRowsAt + row + half * 8);
#pragma unroll
                for (int k = 0; k < kCount; ++k)
                    x[i][k] = __ldcg(vectors + Layout::vector_of(rows, (unit + min(k, count - 1)) %
                                                                           Layout::kRowsUnits));
            }
#pragma unroll
            for (int i = 0; i < kSplits; ++i) {
                if (begin + i >= last) break;
                const float low = State{of_rows[i][0], 0.f}.factor(maxima[0]),
                            high = State{of_rows[i][1], 0.f}.factor(maxima[1]);
#pragma unroll
                for (int k = 0; k < kCount; ++k) add_rows(sums[k], x[i][k], low, high);
            }
        }
    }
};

// Called after all threads have written this CTA's partial result.
template <class Layout, class SplitOf, class PartialOf, class RowsOf, class Write>
__device__ void split_combine(const SplitOf& split, SplitShared<Layout::kRows>& shared,
                              float4* exchanged, const PartialOf& partial_of, const RowsOf& rows_of,
                              const Write& write,
                              int units = Layout::kRows / 16 * Layout::kRowsUnits) {
    SplitCombine<Layout, SplitOf, PartialOf, RowsOf, Write>{split,   shared, exchanged, partial_of,
                                                            rows_of, write,  units}
        .run();
}

}  // namespace mla::sm80
