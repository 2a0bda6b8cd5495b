// Merges the partial results of an item over the CTAs of a cluster, if its tile has up to 32 heads.
// Each CTA has a share of the item's values. The others send it their results for that share, from
// registers to its shared memory, and it adds them in the CTAs' order. Barriers count the arriving
// bytes. So no thread needs a fence for its writes, nor waits at the end until others have read
// them.
#pragma once

#include "merge.cuh"

namespace mla::sm90::sparse {

// Called by all threads of the output. `Fragment` maps their accumulators to heads and latent
// values: a row of these is four values of each lane of a warp, of two heads and two latent values.
template <typename T, class L, class Fragment>
struct Exchange {
    const KernelParams& p;
    typename L::Control& s;
    uint32_t base;
    // The thread's number among the output's.
    int thread;
    // 2^16 / splits, rounded up.
    int factor = 0;

    // Waits until the CTAs of the cluster are done with what is overwritten.
    __device__ void begin(const WorkItem& item) {
        const unsigned splits = TileScheduler::splits();
        factor = (0xffff + splits) / splits;
        const uint32_t bytes = kRowBytes * own_rows(item);
        if (thread == 0) {
            ptx::mbarrier_arrive_expect_tx(stats_bar(), splits * L::kRows * kStatBytes);
            ptx::mbarrier_arrive_expect_tx(bar(), splits * bytes);
        }
        ptx::barrier_cluster_arrive_relaxed();
        ptx::barrier_cluster_wait();
        // Maxima, sums and factors, to everyone.
#pragma unroll 1
        for (int i = thread; i < L::kRows * int(splits); i += kOutputThreads) {
            const int head = i % L::kRows, to = i / L::kRows;
            ptx::st_async_v4_f32(ptx::mapa(stat(TileScheduler::split(), head), to),
                                 make_float4(s.maximum[head], s.sum[head], s.inverse[head], 0.f),
                                 ptx::mapa(stats_bar(), to));
        }
    }

    // Sends a row of this warp's. Row r is of CTA r % splits: so warps send to different ones.
    __device__ void send(int row, const float* x) const {
        const int at = row * factor >> 16, to = row - at * TileScheduler::splits();
        ptx::st_async_v4_f32(ptx::mapa(values_at(at, TileScheduler::split()), to),
                             make_float4(x[0], x[1], x[2], x[3]), ptx::mapa(bar(), to));
    }

    // When all have been sent.
    __device__ void run(const WorkItem& item) const {
        ptx::mbarrier_wait(stats_bar(), 0);
        weigh(item);
        ptx::mbarrier_wait(bar(), 0);
        OutputBarrier::sync();
#pragma unroll 1
        for (int at = thread / 32; at < own_rows(item); at += kOutputThreads / 32)
            add(item, at * TileScheduler::splits() + TileScheduler::split(), at);
    }

  private:
    // Rows of all warps together, the bytes of a row, and the bytes of a head's statistics.
    static constexpr int kFragmentRows = 4 * L::kRows, kRowBytes = 512, kStatBytes = 16;
    // The layout: for each row of this CTA, the values of all CTAs; then, for each CTA, maximum,
    // sum and factor of each head; then, for each head, the factors of the CTAs' values, and the
    // factor of their sum.
    static constexpr int kStatsOffset = (kFragmentRows + kMaxSplits) * kRowBytes;
    static constexpr int kWeightsOffset = kStatsOffset + kMaxSplits * L::kRows * kStatBytes;
    static constexpr int kWeightsPitch = kMaxSplits + 1;
    static_assert(kWeightsOffset + L::kRows * kWeightsPitch * 4 <= L::kControlOffset,
                  "all of it has room");

    __device__ int lane() const { return thread & 31; }
    __device__ uint32_t bar() const { return ptx::shared_address(&s.merged); }
    __device__ uint32_t stats_bar() const { return ptx::shared_address(&s.merged_stats); }
    // Rows of this CTA that some head has.
    __device__ int own_rows(const WorkItem& item) const {
        const int rows = (item.heads + 7) / 8 * 32;
        return (rows - TileScheduler::split() + TileScheduler::splits() - 1) * factor >> 16;
    }
    // Address of CTA k's values of the `at`-th row.
    __device__ uint32_t values_at(int at, int k) const {
        return base + (at * TileScheduler::splits() + k) * kRowBytes + lane() * 16;
    }
    __device__ uint32_t stat(int k, int head) const {
        return base + kStatsOffset + (k * L::kRows + head) * kStatBytes;
    }
    __device__ uint32_t weight(int head, int k) const {
        return base + kWeightsOffset + (head * kWeightsPitch + k) * 4;
    }

    // Makes the weights of all heads: half a warp for each head, of which a lane has one CTA's
    // maximum and sum.
    __device__ void weigh(const WorkItem& item) const {
        const int k = thread & 15;
        const bool is_there = k < TileScheduler::splits();
#pragma unroll 1
        for (int head = thread / 16; head < L::kRows; head += kOutputThreads / 16) {
            const uint4 own = ptx::ld_shared_v4(stat(is_there ? k : 0, head));
            const float maximum = is_there ? __uint_as_float(own.x) : -INFINITY;
            float sum = is_there ? __uint_as_float(own.y) : 0.f;
            float top = maximum;
#pragma unroll
            for (int distance = 1; distance < kMaxSplits; distance *= 2)
                top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
            const float factor = ptx::ex2_approx(maximum - offset_of(top));
            sum *= factor;
#pragma unroll
            for (int distance = 1; distance < kMaxSplits; distance *= 2)
                sum += __shfl_xor_sync(~0u, sum, distance);
            if (is_there)
                ptx::st_shared(weight(head, k), __float_as_uint(factor * __uint_as_float(own.z)));
            if (k > 0) continue;
            const float lse = natural_lse(top, sum);
            if (head % TileScheduler::splits() == TileScheduler::split())
                write_lse(p, item, head, lse);
            const bool is_empty = !(sum > 0.f) && sum == sum;
            const float by = is_empty ? 0.f : sink_factor(p, item, head, lse) / sum;
            ptx::st_shared(weight(head, kMaxSplits), __float_as_uint(by));
        }
    }

    // Adds what all CTAs have of a row, in their order, and writes it.
    __device__ void add(const WorkItem& item, int row, int at) const {
        const int heads[2] = {Fragment::head(row, lane(), 0), Fragment::head(row, lane(), 1)};
        const auto weight_of = [&](int e, int k) {
            return __int_as_float(ptx::ld_shared_s32(weight(heads[e], k)));
        };
        float v[2][2] = {};
#pragma unroll 4
        for (int k = 0; k < TileScheduler::splits(); ++k) {
            const uint4 words = ptx::ld_shared_v4(values_at(at, k));
            const float x[4] = {__uint_as_float(words.x), __uint_as_float(words.y),
                                __uint_as_float(words.z), __uint_as_float(words.w)};
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float by = weight_of(e, k);
#pragma unroll
                for (int i = 0; i < 2; ++i) v[e][i] = fmaf(by, x[Fragment::at(e, i)], v[e][i]);
            }
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (heads[e] >= item.heads) continue;
            const float by = weight_of(e, kMaxSplits);
            const uint32_t two = ptx::cvt_rn_x2<T>(v[e][0] * by, v[e][1] * by);
            T* to = output_row<T>(p, item, heads[e]) + Fragment::latent(row, lane());
            if constexpr (Fragment::kLatentStep == 1) {
                *reinterpret_cast<uint32_t*>(to) = two;
            } else {
                *reinterpret_cast<uint16_t*>(to) = uint16_t(two);
                *reinterpret_cast<uint16_t*>(to + Fragment::kLatentStep) = uint16_t(two >> 16);
            }
        }
    }
};

}  // namespace mla::sm90::sparse
