// Output of a tile of rows: written at once if one CTA did all of it, otherwise combined from the
// partial results of all that did some.
#pragma once

#include "sm80/split_combine.cuh"
#include "softmax.cuh"

namespace mla::sm80::decode {

// The accumulators of a thread: of each tile of 16 rows, rows lane / 4 and 8 + lane / 4.
template <class C>
using Accumulators = float[C::kWarpTiles][C::kColumns / 8][4];

// How split_combine.cuh finds its way in them.
template <class C>
struct SplitLayout {
    static constexpr int kThreads = C::kThreads, kRows = C::kRows;
    static constexpr int kRowsUnits = C::kColumns / 8 * kColumnGroups;
    // Of 16 rows, a warp's share of a slice is eight units only if there are two splits. Of 64 it is
    // twice as much: code for fewer units makes some launches shorter and others longer.
    static constexpr int kLeastAtOnce = C::kRows == 16 ? 2 : 8;
    // With fewer rows a slice has few units, and most warps would wait while some add.
    static constexpr bool kMany = C::kRows == 64;
    static constexpr int kUnitBytes = kThreads * int(sizeof(float4));
    static constexpr int kUnitsOfSlice = kMany ? C::kSliceBytes / kUnitBytes : 0;
    static constexpr int kUnitsOfAll = kMany ? C::kScoreBytes / kUnitBytes : 0;
    static constexpr int kSplitsAtOnce = 9;
    static_assert(!kMany || (kUnitsOfSlice >= kUnitsOfAll && kUnitsOfAll >= 1));
    __device__ static int vector_of(int rows, int unit) {
        const int tile = rows % C::kWarpTiles, row_group = rows / C::kWarpTiles;
        const int fragment = tile * (C::kColumns / 8) + unit / kColumnGroups;
        return (fragment * C::kWarps + row_group * kColumnGroups + unit % kColumnGroups) * 32;
    }
    __device__ static void sync() { C::sync_output(); }
};

template <class C>
class Output {
    using T = typename C::Element;
    using Layout = SplitLayout<C>;
    static_assert(kPartialFloats<Layout> == C::kPartialFloats);
    static_assert(C::kThreads * sizeof(float4) <= C::kScoreBytes);

  public:
    __device__ Output(const KernelParams& p, char* shared, int row_group, int column_group)
        : p_(p), shared_(shared), row_group_(row_group), column_group_(column_group) {}

    // After a barrier that follows the softmax's `finish`. Of a CTA's range of the schedule, `share`
    // is the length.
    __device__ void write(const Item& item, const Accumulators<C>& o, int share) const {
        if (item.splits == 1) return write_rows(item, o);
        store(partial(item, item.split), o);
        const int64_t patience =
            p_.patience != 0 ? p_.patience : kDefaultPatience + share * kTilePatience;
        auto* counters = reinterpret_cast<SplitCounters*>(p_.counters) + cta_of(item, 0);
        // Nobody uses the scores' place between two items, nor the queries' behind them after the
        // last one.
        split_combine<Layout>(
            {counters, item.split, item.splits, item.combiners, patience}, statistics().rows,
            reinterpret_cast<float4*>(shared_ + C::kScoreOffset),
            [&](int split) { return partial(item, split); },
            [&](int unit) { return rows_of(item, unit); },
            [&](const Rows& rows, int unit, const float4& x) { write_unit(rows, unit, x); });
    }

  private:
    __device__ typename C::Statistics& statistics() const {
        return *reinterpret_cast<typename C::Statistics*>(shared_ + C::kStatisticsOffset);
    }

    // What of the workspace belongs to a split: a CTA group has at most the end of one tile of rows
    // and the beginning of another.
    __device__ float* partial(const Item& item, int split) const {
        const int64_t entry = int64_t(cta_of(item, split)) * 2 + (split == 0);
        return p_.partials + entry * C::kPartialFloats;
    }

    __device__ int cta_of(const Item& item, int split) const {
        return (item.first_cta_group + split) * p_.pair + blockIdx.x % p_.pair;
    }

    __device__ void store(float* to, const Accumulators<C>& o) const {
        float4* vectors = reinterpret_cast<float4*>(to) + threadIdx.x;
#pragma unroll
        for (int tile = 0; tile < C::kWarpTiles; ++tile)
#pragma unroll
            for (int i = 0; i < C::kColumns / 8; ++i) {
                const float* x = o[tile][i];
                vectors[(tile * (C::kColumns / 8) + i) * C::kThreads] =
                    make_float4(x[0], x[1], x[2], x[3]);
            }
        float* rows = to + kPartialRowsAt<Layout>;
        if (threadIdx.x < C::kRows) {
            rows[threadIdx.x] = statistics().rows.maximum[threadIdx.x];
            rows[C::kRows + threadIdx.x] = statistics().rows.sum[threadIdx.x];
        }
    }

    // Of the output.
    struct Row {
        bool exists;
        int head;
        int64_t token;
        // What sums of values are multiplied by.
        float scale, lse;
        T* out;
    };

    __device__ Row row_of(const Item& item, int of_tile) const {
        const int row = item.first_row + of_tile;
        if (row >= item.q_len * p_.heads) return {};
        const int token = row / p_.heads, head = row - token * p_.heads;
        const float maximum = statistics().rows.maximum[of_tile],
                    sum = statistics().rows.sum[of_tile];
        float total = sum;
        if (p_.sinks && sum != 0.f)
            total += ptx::ex2_approx(p_.sinks[head] * 1.44269504088896340736f - maximum);
        Row r;
        r.exists = true;
        r.head = head;
        r.token = item.q_begin + token;
        r.scale = sum == 0.f ? 0.f : p_.out_scale / total * C::kOutputRest;
        r.lse = natural_lse(maximum, sum);
        r.out = static_cast<T*>(p_.out) + r.token * p_.out_token_stride + head * p_.out_head_stride;
        return r;
    }

    // Of a unit: the row of this lane's first two values, and of the others.
    struct Rows {
        Row of_half[2];
    };

    __device__ Rows rows_of(const Item& item, int unit) const {
        const int of_tile = first_row_of<Layout>(unit);
        return {row_of(item, of_tile), row_of(item, of_tile + 8)};
    }

    // Sums of all splits.
    __device__ void write_unit(const Rows& rows, int unit, const float4& x) const {
        const int of_rows = unit % Layout::kRowsUnits;
        const int i = of_rows / kColumnGroups, column_group = of_rows % kColumnGroups;
        const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Row& row = rows.of_half[half];
            if (!row.exists) continue;
            T* to = row.out + column_group * C::kColumns;
            const float low = values[half * 2] * row.scale, high = values[half * 2 + 1] * row.scale;
            const int quad = threadIdx.x & 3;
            if constexpr (C::kBytes) {
                // The even or the odd columns of sixteen.
                to += i / 2 * 16 + quad * 4 + i % 2;
                to[0] = T(low);
                to[2] = T(high);
            } else {
                *reinterpret_cast<uint32_t*>(to + i * 8 + quad * 2) = ptx::cvt_rn_x2<T>(low, high);
            }
            if (of_rows == 0 && quad == 0) write_lse(row);
        }
    }

    __device__ void write_lse(const Row& row) const {
        if (p_.lse) p_.lse[row.head * p_.lse_head_stride + row.token] = row.lse;
    }

    __device__ void write_rows(const Item& item, const Accumulators<C>& o) const {
        const int quad = threadIdx.x & 3;
#pragma unroll
        for (int tile = 0; tile < C::kWarpTiles; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int of_tile =
                    row_group_ * C::kWarpRows + tile * 16 + half * 8 + (threadIdx.x & 31) / 4;
                const Row row = row_of(item, of_tile);
                if (!row.exists) continue;
                write_row(row.out + column_group_ * C::kColumns, o[tile], half * 2, row.scale,
                          quad);
                if (column_group_ == 0 && quad == 0) write_lse(row);
            }
    }

    // Of a cache of bytes, two fragments have the even and the odd columns of sixteen.
    __device__ static void write_row(T* to, const float (&o)[C::kColumns / 8][4], int begin,
                                     float scale, int quad) {
#pragma unroll
        for (int i = 0; i < C::kColumns / 8; i += 2) {
            const float a[2] = {o[i][begin] * scale, o[i][begin + 1] * scale};
            const float b[2] = {o[i + 1][begin] * scale, o[i + 1][begin + 1] * scale};
            if constexpr (C::kBytes) {
                const uint2 words = {ptx::cvt_rn_x2<T>(a[0], b[0]), ptx::cvt_rn_x2<T>(a[1], b[1])};
                *reinterpret_cast<uint2*>(to + i * 8 + quad * 4) = words;
            } else {
                *reinterpret_cast<uint32_t*>(to + i * 8 + quad * 2) = ptx::cvt_rn_x2<T>(a[0], a[1]);
                *reinterpret_cast<uint32_t*>(to + i * 8 + 8 + quad * 2) =
                    ptx::cvt_rn_x2<T>(b[0], b[1]);
            }
        }
    }

    const KernelParams& p_;
    char* shared_;
    int row_group_, column_group_;
};

}  // namespace mla::sm80::decode
