// Output of a tile of rows: written at once if one CTA did all of it, otherwise combined from the
// partial results of all that did some.
#pragma once

#include "common/quad.cuh"
#include "sm80/split_combine.cuh"
#include "softmax.cuh"

namespace mla::sm80::decode {

// The accumulators of a thread: of each tile of 16 rows, rows lane / 4 and 8 + lane / 4.
template <class C>
using Accumulators = float[C::kWarpTiles][C::kColumns / 8][4];

// Layout of the accumulators, for split_combine.cuh.
template <class C>
struct SplitLayout {
    static constexpr int kThreads = C::kThreads, kRows = C::kRows;
    static constexpr int kRowsUnits = C::kColumns / 8 * kColumnGroups;
    // With 64 rows a slice has many units. With fewer rows most warps would wait while some add.
    static constexpr bool kMany = C::kRows == 64;
    static constexpr int kFewSplits = C::kRoles ? 16 : kRows / 16 * kRowsUnits / C::kWarps;
    // With 16 rows, a warp's share of a slice is eight units only if there are two splits, so there
    // is code for fewer units.
    static constexpr int kMinAtOnce = C::kRows == 16 || C::kRoles ? 2 : 8;
    static constexpr int kTogether = kMany ? 2 : 1, kSplitsAtOnce = kMany ? 9 : 8;
    static constexpr int kUnitBytes = kThreads * int(sizeof(float4));
    static constexpr int kUnitsOfSlice = kMany ? C::kSliceBytes / kUnitBytes : 1;
    static constexpr int kUnitsOfAll = kMany ? C::kScoreBytes / kUnitBytes : 1;
    static_assert(kUnitsOfSlice >= kUnitsOfAll && kUnitsOfAll >= 1);
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

    // Called after a barrier that follows the softmax's `finish`. `share` is the length of a CTA's
    // range.
    __device__ void write(const WorkItem& item, const Accumulators<C>& o, int share) const {
        if (item.splits == 1) return write_rows(item, o);
        store(PartialOf(p_, item)(item.split), o);
        if (!item.ends) return;
        if constexpr (C::kRoles)
            combine_called(p_, shared_, item, share);
        else
            combine(item, share);
    }

  private:
    __device__ typename C::Statistics& statistics() const {
        return *reinterpret_cast<typename C::Statistics*>(shared_ + C::kStatisticsOffset);
    }

    // The CTA that computes split 0 of the item's tile of rows.
    __device__ static int cta_of(const KernelParams& p, const WorkItem& item) {
        // Hidden, so that the compiler does not compute it earlier, where registers are few.
        const int pair = ThreadPosition::hide(p.pair);
        return item.first_cta_group * pair + (blockIdx.x & (pair - 1));
    }

    // Addresses of the partial results of an item's splits. A CTA has room for two: a CTA group has
    // at most the end of one tile of rows and the beginning of another. If the tile's own length
    // decides its splits, all partial results of a tile lie together.
    class PartialOf {
      public:
        __device__ PartialOf(const KernelParams& p, const WorkItem& item)
            : begin_(p.partials + int64_t(cta_of(p, item)) * 2 * C::kPartialFloats),
              first_(C::kPartialFloats),
              step_(ThreadPosition::hide(p.pair) * (2 * C::kPartialFloats)) {
            if (p.own.tiles == 0) return;
            const int64_t slot = item.sharers > 1 ? cta_of(p, item) * 2 : blockIdx.x * 2 + 1;
            begin_ = p.partials + slot * p.own.slots * C::kPartialFloats;
            first_ = 0;
            step_ = C::kPartialFloats;
        }
        __device__ float* operator()(int split) const {
            return begin_ + (split == 0 ? int64_t(first_) : int64_t(split) * step_);
        }

      private:
        float* begin_;
        int first_, step_;
    };

    // No thread uses the scores' place between two items, nor the queries' behind them after the
    // last one.
    __device__ void combine(const WorkItem& item, int share) const {
        const PartialOf partial_of(p_, item);
        const OwnSplit split{
            {reinterpret_cast<SplitCounters*>(p_.counters) + cta_of(p_, item), item.share,
             item.splits, item.combiners,
             p_.patience != 0 ? p_.patience : kDefaultPatience + share * kTilePatience},
            item.sharers};
        split_combine<Layout>(
            split, statistics().rows, reinterpret_cast<float4*>(shared_ + C::kScoreOffset),
            partial_of, [&](int unit) { return rows_of(item, unit); },
            [&](const Rows& rows, int unit, const float4& x) { write_unit(rows, unit, x); });
    }

    // Called where no thread has an output any more: inlined, it would take registers of the loop
    // over KV tiles, if these are few.
    __device__ static __noinline__ void combine_called(const KernelParams& p, char* shared,
                                                       const WorkItem& item, int share) {
        Output(p, shared, 0, 0).combine(item, share);
    }

    // Stores the output fragments and the rows' statistics.
    __device__ void store(float* to, const Accumulators<C>& o) const {
        // Nothing of what follows is known before, where registers are few.
        const int thread = C::kRoles ? ThreadPosition::hide(threadIdx.x) : threadIdx.x;
        float4* vectors = reinterpret_cast<float4*>(to) + thread;
#pragma unroll
        for (int tile = 0; tile < C::kWarpTiles; ++tile)
#pragma unroll
            for (int j = 0; j < C::kColumns / 8; ++j) {
                const float* x = o[tile][j];
                vectors[(tile * (C::kColumns / 8) + j) * C::kThreads] =
                    make_float4(x[0], x[1], x[2], x[3]);
            }
        float* rows = to + kPartialRowsAt<Layout>;
        if (thread < C::kRows) {
            rows[thread] = statistics().rows.maximum[thread];
            rows[C::kRows + thread] = statistics().rows.sum[thread];
        }
    }

    // One row of the output.
    struct Row {
        bool exists;
        int head;
        int64_t token;
        // Factor of the sums of values.
        float scale, lse;
        T* out;
    };

    __device__ Row row_of(const WorkItem& item, int of_tile) const {
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

    // Rows of this lane in a unit: that of its first two values, and that of the other two.
    struct Rows {
        Row of_half[2];
    };

    __device__ Rows rows_of(const WorkItem& item, int unit) const {
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

    __device__ void write_rows(const WorkItem& item, const Accumulators<C>& o) const {
        const int quad = threadIdx.x & 3;
#pragma unroll
        for (int tile = 0; tile < C::kWarpTiles; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int of_tile =
                    row_group_ * C::kWarpRows + tile * 16 + half * 8 + (threadIdx.x & 31) / 4;
                const Row row = row_of(item, of_tile);
                if (kExchanges ? !__any_sync(~0u, row.exists) : !row.exists) continue;
                if (row.exists && column_group_ == 0 && quad == 0) write_lse(row);
                write_row(row, o[tile], half * 2, quad);
            }
    }

    // True if the four lanes of a row exchange words, so that each writes 16 bytes at a time. With
    // 32 rows there are no registers for it.
    static constexpr bool kExchanges = !C::kBytes && C::kRows != 32;

    // Called by all lanes that have this row; if they exchange words, by the whole warp.
    __device__ void write_row(const Row& row, const float (&o)[C::kColumns / 8][4], int begin,
                              int quad) const {
        constexpr int kEach = C::kBytes ? 4 : kExchanges ? 8 : 2;
        T* to = row.out + column_group_ * C::kColumns + quad * kEach;
        if constexpr (C::kBytes) {
            // Two fragments have the even and the odd columns of sixteen.
#pragma unroll
            for (int i = 0; i < C::kColumns / 8; i += 2) {
                const float (&even)[4] = o[i], (&odd)[4] = o[i + 1];
                const uint2 words = {
                    ptx::cvt_rn_x2<T>(even[begin] * row.scale, odd[begin] * row.scale),
                    ptx::cvt_rn_x2<T>(even[begin + 1] * row.scale, odd[begin + 1] * row.scale)};
                *reinterpret_cast<uint2*>(to + i * 8) = words;
            }
        } else if constexpr (!kExchanges) {
#pragma unroll
            for (int i = 0; i < C::kColumns / 8; ++i)
                *reinterpret_cast<uint32_t*>(to + i * 8) =
                    ptx::cvt_rn_x2<T>(o[i][begin] * row.scale, o[i][begin + 1] * row.scale);
        } else {
#pragma unroll
            for (int i = 0; i < C::kColumns / 8; i += 4) {
                uint32_t words[4];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    words[j] = ptx::cvt_rn_x2<T>(o[i + j][begin] * row.scale,
                                                 o[i + j][begin + 1] * row.scale);
                transpose_quad(words, quad);
                if (row.exists)
                    *reinterpret_cast<uint4*>(to + i * 8) = {words[0], words[1], words[2],
                                                             words[3]};
            }
        }
    }

    const KernelParams& p_;
    char* shared_;
    int row_group_, column_group_;
};

}  // namespace mla::sm80::decode
