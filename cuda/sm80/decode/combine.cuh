// Output of a tile of rows: written at once if one CTA did all of it, otherwise combined from the
// partial results of all that did some.
#pragma once

#include "sm80/split_combine.cuh"
#include "softmax.cuh"
#include "staged_combine.cuh"

namespace mla::sm80::decode {

// The accumulators of a thread: of each tile of 16 rows, rows lane / 4 and 8 + lane / 4.
template <class C>
using Accumulators = float[C::kWarpTiles][C::kColumns / 8][4];

// Layout of the accumulators, for split_combine.cuh.
template <class C>
struct SplitLayout {
    static constexpr int kThreads = C::kThreads, kRows = C::kRows;
    static constexpr int kRowsUnits = C::kColumns / 8 * kColumnGroups;
    // With 16 rows, a warp's share of a slice is eight units only if there are two splits, so there
    // is code for fewer units. With 64 rows the share is twice as large, and such code would make
    // some launches shorter and others longer.
    static constexpr int kMinAtOnce = C::kRows == 16 ? 2 : 8;
    // With fewer rows a slice has few units, and most warps would wait while some add.
    static constexpr bool kMany = C::kRows == 64;
    // The KV tiles' place has room for many of the splits' results (staged_combine.cuh).
    static constexpr bool kStaged = C::kRoles;
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

    // Called after a barrier that follows the softmax's `finish`. `share` is the length of a CTA's
    // range.
    __device__ void write(const WorkItem& item, const Accumulators<C>& o, int share) const {
        if (item.splits == 1) return write_rows(item, o);
        if constexpr (Layout::kStaged) {
            // Nothing of what follows is known before, where registers are few.
            const int thread = ThreadPosition::hide(threadIdx.x);
            store(PartialOf(p_, item)(item.split), o, kept_of(item), thread);
            combine_staged(p_, shared_, item, share, thread);
        } else {
            store(PartialOf(p_, item)(item.split), o, 0, threadIdx.x);
            combine(item, share);
        }
    }

  private:
    __device__ typename C::Statistics& statistics() const {
        return *reinterpret_cast<typename C::Statistics*>(shared_ + C::kStatisticsOffset);
    }

    // The CTA that computes split 0 of the item's tile of rows.
    __device__ static int cta_of(const KernelParams& p, const WorkItem& item) {
        // Not known before, where registers are few.
        const int pair = ThreadPosition::hide(p.pair);
        return item.first_cta_group * pair + (blockIdx.x & (pair - 1));
    }

    // Addresses of the partial results of an item's splits. A CTA has room for two: a CTA group has
    // at most the end of one tile of rows and the beginning of another.
    class PartialOf {
      public:
        __device__ PartialOf(const KernelParams& p, const WorkItem& item)
            : begin_(p.partials + int64_t(cta_of(p, item)) * 2 * C::kPartialFloats),
              step_(ThreadPosition::hide(p.pair) * (2 * C::kPartialFloats)) {}
        __device__ float* operator()(int split) const {
            return begin_ + (split == 0 ? int64_t(C::kPartialFloats) : int64_t(split) * step_);
        }

      private:
        float* begin_;
        int step_;
    };

    // No thread uses the scores' place between two items, nor the queries' behind them after the
    // last one.
    __device__ void combine(const WorkItem& item, int share) const {
        const PartialOf partial_of(p_, item);
        split_combine<Layout>(
            split_of(p_, item, share), statistics().rows,
            reinterpret_cast<float4*>(shared_ + C::kScoreOffset), partial_of,
            [&](int unit) { return rows_of(item, unit); },
            [&](const Rows& rows, int unit, const float4& x) { write_unit(rows, unit, x); });
    }

    __device__ static Split split_of(const KernelParams& p, const WorkItem& item, int share) {
        auto* counters = reinterpret_cast<SplitCounters*>(p.counters) + cta_of(p, item);
        return {counters, item.split, item.splits, item.combiners,
                p.patience != 0 ? p.patience : kDefaultPatience + share * kTilePatience};
    }

    // Fragments of its slice that the CTA keeps in the stage: `begin` to `end` - 1.
    struct Kept {
        int begin, end;
    };
    __device__ static Kept kept_fragments(const KernelParams& p, const WorkItem& item) {
        using Stage = Staging<C>;
        const int begin = Stage::begin(item.split, item.combiners),
                  end = Stage::begin(item.split + 1, item.combiners);
        const bool keeps = item.split < item.combiners && Stage::keeps(p, end - begin, item.splits);
        return {begin, keeps ? end : begin};
    }
    // One bit each.
    __device__ uint32_t kept_of(const WorkItem& item) const {
        const Kept kept = kept_fragments(p_, item);
        if (kept.begin == kept.end) return 0;
        // Others may still read the last KV tile.
        Layout::sync();
        static_assert(C::kFragments == 32);
        return (~0u >> (32 - (kept.end - kept.begin))) << kept.begin;
    }

    // Called where no thread has an output any more: inlined, it would take registers of the loop
    // over KV tiles.
    __device__ static __noinline__ void combine_staged(const KernelParams& p, char* shared,
                                                       const WorkItem& item, int share,
                                                       int thread) {
        const Output output(p, shared, thread / 32 / kColumnGroups, thread / 32 % kColumnGroups);
        const PartialOf partial_of(p, item);
        const auto rows_of = [&](int unit) { return output.rows_of(item, unit); };
        const auto write = [&](const Rows& rows, int unit, const float4& x) {
            output.write_unit(rows, unit, x);
        };
        const auto write_four = [&](const Rows& rows, int first, const float4(&x)[4]) {
            output.write_four(rows, first, x);
        };
        const Split split = split_of(p, item, share);
        using Combine = SplitCombine<Layout, PartialOf, decltype(rows_of), decltype(write)>;
        using Staged = StagedCombine<C, Layout, PartialOf, decltype(rows_of), decltype(write),
                                     decltype(write_four)>;
        const Staging<C> stage(p, shared, thread);
        const int few = Staging<C>::few(p);
        const Kept kept = kept_fragments(p, item);
        auto& rows = output.statistics().rows;
        char* exchanged = shared + C::kScoreOffset;
        const Staged staged(split, rows, exchanged, stage, kept.begin < kept.end, partial_of,
                            rows_of, write, write_four, thread);
        const Combine combine(split, rows, reinterpret_cast<float4*>(exchanged), partial_of,
                              rows_of, write, few);
        combine.run(
            [&] {
                if (item.splits <= few)
                    staged.few();
                else if (staged.fits(item.splits))
                    staged.many();
                else
                    return false;
                return true;
            },
            [&] {
                float4* to = reinterpret_cast<float4*>(partial_of(item.split)) + thread;
                for (int i = kept.begin; i < kept.end; ++i)
                    to[i * C::kThreads] = stage[i - kept.begin];
            });
    }

    // Stores the output fragments and the rows' statistics. `kept` has one bit per fragment: those
    // whose bit is set go to the stage, the first of them to its first place.
    __device__ void store(float* to, const Accumulators<C>& o, uint32_t kept, int thread) const {
        float4* vectors = reinterpret_cast<float4*>(to) + thread;
        float4* staged = nullptr;
        if constexpr (Layout::kStaged)
            staged =
                Staging<C>(p_, shared_, thread).position - (kept == 0 ? 0 : __ffs(kept) - 1) * 32;
#pragma unroll
        for (int tile = 0; tile < C::kWarpTiles; ++tile)
#pragma unroll
            for (int j = 0; j < C::kColumns / 8; ++j) {
                const int i = tile * (C::kColumns / 8) + j;
                const float* x = o[tile][j];
                const float4 quadruple = make_float4(x[0], x[1], x[2], x[3]);
                if (Layout::kStaged && (kept >> i & 1))
                    staged[i * 32] = quadruple;
                else
                    vectors[i * C::kThreads] = quadruple;
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

    // Writes fragments `first` to `first` + 3 of this warp's columns, which have the same 16 rows.
    __device__ void write_four(const Rows& rows, int first, const float4 (&x)[4]) const {
        const int quad = threadIdx.x & 3, column_group = column_group_;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Row& row = rows.of_half[half];
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[i] = half == 0 ? ptx::cvt_rn_x2<T>(x[i].x * row.scale, x[i].y * row.scale)
                                     : ptx::cvt_rn_x2<T>(x[i].z * row.scale, x[i].w * row.scale);
            const uint4 eight = transpose(words, quad);
            if (!row.exists) continue;
            *reinterpret_cast<uint4*>(row.out + column_group * C::kColumns + (first + quad) * 8) =
                eight;
            if (column_group == 0 && first == 0 && quad == 0) write_lse(row);
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
                const uint4 eight = transpose(words, quad);
                if (row.exists) *reinterpret_cast<uint4*>(to + i * 8) = eight;
            }
        }
    }

    // Lane j of four has words[i] of row i, column j, and gets row j.
    __device__ static uint4 transpose(uint32_t (&words)[4], int quad) {
#pragma unroll
        for (int d = 1; d < 4; d *= 2) {
            const bool high = (quad & d) != 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (i & d) continue;
                uint32_t &low_word = words[i], &high_word = words[i + d];
                const uint32_t other = __shfl_xor_sync(~0u, high ? low_word : high_word, d);
                if (high)
                    low_word = other;
                else
                    high_word = other;
            }
        }
        return {words[0], words[1], words[2], words[3]};
    }

    const KernelParams& p_;
    char* shared_;
    int row_group_, column_group_;
};

}  // namespace mla::sm80::decode
