// Output of a query tile. If one CTA saw all of its keys, it is written directly. Otherwise it is
// combined from the partial results of all CTAs that saw some.
#pragma once

#include "softmax.cuh"

namespace mla::sm80::prefill {

// Layout of the accumulators, for split_combine.cuh.
template <class C>
struct SplitLayout {
    static constexpr int kThreads = C::kThreads, kRows = C::kRows;
    static constexpr int kRowsUnits = C::kVDim / 8;
    static constexpr int kFewSplits = kRows / 16 * kRowsUnits / (kThreads / 32);
    // These numbers keep the code short, and registers few.
    static constexpr int kMinAtOnce = 8, kTogether = 1, kSplitsAtOnce = 8;
    static constexpr int kUnitsOfSlice = 1, kUnitsOfAll = 1;
    __device__ static int vector_of(int rows, int unit) {
        const int warp = rows / C::kWarpTiles, tile = rows % C::kWarpTiles;
        return (tile * kRowsUnits + unit) * C::kThreads + warp * 32;
    }
    __device__ static void sync() { __syncthreads(); }
};

template <class C>
class Output {
    using T = typename C::Element;
    using Layout = SplitLayout<C>;

  public:
    // `first_row` is the CTA's first row within the request, and the request's rows begin at
    // `query_begin`. `rows` is the number of the request's rows from the CTA's first one on.
    __device__ Output(const KernelParams& p, int query_begin, int rows, int first_row, int head)
        : p_(p), first_token_(query_begin + first_row), rows_(rows), head_(head) {}

    // Writes through shared memory, in the place of the warp's own queries. Neighbouring lanes then
    // store neighbouring bytes. All of the CTA's copies have landed by then.
    __device__ void write(const float (&o)[C::kWarpTiles][C::kVDim / 8][4],
                          const Softmax<C>& softmax) const {
        using Tile = typename C::QkRows;
        static_assert(C::kVDim <= C::kQkDim);
        const int lane = ptx::laneid(), first = ptx::tid_x() / 32 * C::kWarpRows;
        const uint32_t staged = ptx::shared_address(ptx::dynamic_shared()) + first * Tile::kPitch;
#pragma unroll
        for (int i = 0; i < C::kWarpTiles; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const RowState state = softmax.row(i, half);
                const int row = i * 16 + half * 8 + lane / 4;
                const float scale = scale_of(state.sum);
#pragma unroll
                for (int j = 0; j < C::kVDim / 8; ++j)
                    ptx::st_shared(staged + Tile::at(row, j % 8) + j / 8 * 128 + lane % 4 * 4,
                                   ptx::cvt_rn_x2<T>(o[i][j][half * 2] * scale,
                                                     o[i][j][half * 2 + 1] * scale));
                if (lane % 4 == 0 && first + row < rows_)
                    put_lse(first + row, state.maximum, state.sum);
            }
        __syncwarp();
        constexpr int kChunks = C::kVDim / 8, kStep = 32 / kChunks;
        const int chunk = lane % kChunks;
        char* to = static_cast<char*>(p_.out) +
                   (first_token_ + first + lane / kChunks) * p_.out_token_stride +
                   head_ * p_.out_head_stride + chunk * 16;
#pragma unroll 4
        for (int row = lane / kChunks; row < C::kWarpRows; row += kStep) {
            if (first + row >= rows_) break;
            *reinterpret_cast<uint4*>(to) =
                ptx::ld_shared_v4(staged + Tile::at(row, chunk % 8) + chunk / 8 * 128);
            to += kStep * p_.out_token_stride;
        }
    }

    // Called by all threads, when no thread uses the keys' buffer any more. The first split's
    // partial result is in slot `first_slot`.
    __device__ void combine(const float (&o)[C::kWarpTiles][C::kVDim / 8][4],
                            const Softmax<C>& softmax, int first_slot, const Split& split) const {
        char* const shared = ptx::dynamic_shared();
        auto& statistics = *reinterpret_cast<SplitShared<C::kRows>*>(shared + C::kStatisticsOffset);
        const auto partial_of = [&](int index) {
            return p_.partials + int64_t(first_slot + index) * kPartialFloats<Layout>;
        };
        // A warp without rows has nothing to store.
        const bool any = ptx::tid_x() / 32 * C::kWarpRows < rows_;
        if (any) store(partial_of(split.index), o, softmax);
        split_combine<Layout>(
            split, statistics, reinterpret_cast<float4*>(shared + C::kExchangeOffset), partial_of,
            [&](int unit) {
                const int row = first_row_of<Layout>(unit);
                return Scales{row, scale_of(statistics.sum[row]),
                              scale_of(statistics.sum[row + 8])};
            },
            [&](const Scales& s, int unit, const float4& x) {
                const int of_rows = unit % Layout::kRowsUnits;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = s.row + half * 8;
                    const float scale = half == 0 ? s.low : s.high;
                    if (row >= rows_) continue;
                    put(row, of_rows, (half == 0 ? x.x : x.z) * scale,
                        (half == 0 ? x.y : x.w) * scale);
                    if (of_rows == 0 && ptx::laneid() % 4 == 0)
                        put_lse(row, statistics.maximum[row], statistics.sum[row]);
                }
            },
            (min(rows_, C::kRows) + 15) / 16 * Layout::kRowsUnits);
    }

  private:
    // Factors for a unit's first row, and for the row eight rows later.
    struct Scales {
        int row;
        float low, high;
    };

    __device__ void store(float* to, const float (&o)[C::kWarpTiles][C::kVDim / 8][4],
                          const Softmax<C>& softmax) const {
        float* rows = to + kPartialRowsAt<Layout>;
        const int lane = ptx::laneid(), own_row = ptx::tid_x() / 32 * 16 * C::kWarpTiles + lane / 4;
#pragma unroll
        for (int i = 0; i < C::kWarpTiles; ++i) {
#pragma unroll
            for (int j = 0; j < C::kVDim / 8; ++j) {
                const float* x = o[i][j];
                const int vector = (i * (C::kVDim / 8) + j) * C::kThreads + ptx::tid_x();
                reinterpret_cast<float4*>(to)[vector] = make_float4(x[0], x[1], x[2], x[3]);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const RowState state = softmax.row(i, half);
                const int row = own_row + i * 16 + half * 8;
                if (lane % 4 > 0) continue;
                rows[row] = state.maximum;
                rows[C::kRows + row] = state.sum;
            }
        }
    }

    __device__ static float scale_of(float sum) { return sum == 0.f ? 0.f : 1.f / sum; }

    // Stores two of the eight columns of block `j`.
    __device__ void put(int row, int j, float low, float high) const {
        char* to = static_cast<char*>(p_.out) + (first_token_ + row) * p_.out_token_stride +
                   head_ * p_.out_head_stride + ptx::laneid() % 4 * 4 + j * 16;
        *reinterpret_cast<uint32_t*>(to) = ptx::cvt_rn_x2<T>(low, high);
    }

    __device__ void put_lse(int row, float maximum, float sum) const {
        if (p_.lse)
            p_.lse[head_ * p_.lse_head_stride + first_token_ + row] = natural_lse(maximum, sum);
    }

    const KernelParams& p_;
    int first_token_, rows_, head_;
};

}  // namespace mla::sm80::prefill
