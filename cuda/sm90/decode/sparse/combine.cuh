// Combines the partial results of an item over the CTAs of a cluster. Each CTA takes a share of
// the item's values and adds all CTAs' results for that share in the CTAs' order. The results come
// to it in one of two ways: it reads them from the others' shared memory (Merge), or the others
// send them from registers to its own (Exchange).
#pragma once

#include "../../../common/softmax.cuh"
#include "../../../ptx/lanes.cuh"
#include "list_walk.cuh"
#include "split_plan.cuh"

namespace mla::sm90::sparse {

// The share of a head's output that a sink, a further key without a value, leaves.
__device__ __forceinline__ float sink_factor(const KernelParams& p, const WorkItem& item, int row,
                                             float lse) {
    if (!p.sinks || row >= item.heads) return 1.f;
    return 1.f / (1.f + __expf(p.sinks[item.first_head + row] - lse));
}

__device__ __forceinline__ void write_lse(const KernelParams& p, const WorkItem& item, int row,
                                          float lse) {
    if (p.lse && row < item.heads)
        p.lse[(item.first_head + row) * p.lse_head_stride + item.token] = lse;
}

// Writes the log-sum-exp of a head, which is done, and returns the factor of its output.
__device__ __forceinline__ float finish_row(const KernelParams& p, const WorkItem& item, int row,
                                            float maximum, float sum, float scale) {
    const float lse = natural_lse(maximum, sum);
    write_lse(p, item, row, lse);
    return sum > 0.f || sum != sum ? scale / sum * sink_factor(p, item, row, lse) : 0.f;
}

template <typename T>
__device__ __forceinline__ T* output_row(const KernelParams& p, const WorkItem& item, int head) {
    return static_cast<T*>(p.out) + item.token * p.out_token_stride +
           (item.first_head + head) * p.out_head_stride;
}

// The weights of an item's heads in shared memory: for each head, the factors of the CTAs' values,
// and behind kMaxSplits of them the factor of their sum.
struct HeadWeights {
    static constexpr int kPitch = kMaxSplits + 1;
    uint32_t base;

    __device__ uint32_t at(int head, int k) const { return base + (head * kPitch + k) * 4; }
    __device__ float operator()(int head, int k) const {
        return __int_as_float(ptx::ld_shared_s32(at(head, k)));
    }

    // Makes the weights of a head from its maximum and sum in each CTA. Lane k of kLanes has those
    // of CTA k; if there is no CTA k (`is_there`), it has minus infinity and 0. Each weight
    // includes `scale`, a factor that CTA k's values lack. Writes the head's log-sum-exp if this
    // CTA `owns()` it.
    template <int kLanes, class Owns>
    __device__ __forceinline__ void make(const KernelParams& p, const WorkItem& item, int head,
                                         int k, bool is_there, float maximum, float sum,
                                         float scale, const Owns& owns) const {
        float top = maximum;
#pragma unroll
        for (int distance = 1; distance < kLanes; distance *= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
        const float factor = ptx::ex2_approx(maximum - offset_of(top));
        sum *= factor;
#pragma unroll
        for (int distance = 1; distance < kLanes; distance *= 2)
            sum += __shfl_xor_sync(~0u, sum, distance);
        if (is_there) ptx::st_shared(at(head, k), __float_as_uint(factor * scale));
        if (k > 0) return;
        const float lse = natural_lse(top, sum);
        if (owns()) write_lse(p, item, head, lse);
        const bool is_empty = !(sum > 0.f) && sum == sum;
        const float by = is_empty ? 0.f : sink_factor(p, item, head, lse) / sum;
        ptx::st_shared(at(head, kMaxSplits), __float_as_uint(by));
    }
};

// Puts each CTA's result into its own shared memory, from which the others read it.
template <typename T, class L>
struct Merge {
    const KernelParams& p;
    const typename L::Control& s;
    uint32_t base;
    // The thread's number among the output's.
    int thread;

    // All MMAs are done: what they read may be overwritten.
    __device__ static void sync_output() { OutputBarrier::sync(); }

    // Stores a value of this CTA's result, or two or four neighbouring ones.
    __device__ void put(int head, int latent, float v) const {
        ptx::st_shared(value_at(head, latent), __float_as_uint(v));
    }
    __device__ void put(int head, int latent, float2 v) const {
        ptx::st_shared_v2(value_at(head, latent), __float_as_uint(v.x), __float_as_uint(v.y));
    }
    __device__ void put(int head, int latent, float4 v) const {
        ptx::st_shared_v4_f32(value_at(head, latent), v);
    }

    // Called when all values have been put. Combines them, and stores this CTA's slice.
    __device__ void run(const WorkItem& item) const {
        // Statistics that other CTAs read are written by threads that arrive at the cluster's
        // barrier.
        if (thread < L::kRows) {
            ptx::st_shared(maximum(thread), __float_as_uint(s.maximum[thread]));
            ptx::st_shared(sum(thread), __float_as_uint(s.sum[thread]));
        }
        ptx::barrier_cluster_arrive();
        ptx::barrier_cluster_wait();
        const int all = item.heads * kFours;
        const int split = TileScheduler::split(), splits = TileScheduler::splits();
        const int begin = all * split / splits, end = all * (split + 1) / splits;
        weigh(item, begin, end, splits);
        sync_output();
        add(item, begin, end, splits);
        // No CTA leaves while others read.
        ptx::barrier_cluster_arrive();
        ptx::barrier_cluster_wait();
    }

  private:
    // Values are read four at a time.
    static constexpr int kFours = kLatent / 4;
    // Behind the result lie the weights.
    static constexpr int kWeightsOffset = L::kRows * L::kPartialPitch * 4;
    // Behind those, each head's maximum, and then each head's sum.
    static constexpr int kMaximaOffset = kWeightsOffset + L::kRows * HeadWeights::kPitch * 4;
    static_assert(kMaximaOffset + L::kRows * 8 <= L::kControlOffset, "all of it has room");

    __device__ uint32_t value_at(int head, int latent) const {
        return base + (head * L::kPartialPitch + latent) * 4;
    }
    __device__ uint32_t maximum(int head) const { return base + kMaximaOffset + head * 4; }
    __device__ uint32_t sum(int head) const { return maximum(L::kRows + head); }

    __device__ HeadWeights weights() const { return {base + kWeightsOffset}; }

    // Makes the weights of the heads of some values: one warp per head, whose lanes have one CTA's
    // maximum and sum each. The CTA that has a head's first value writes its log-sum-exp.
    __device__ void weigh(const WorkItem& item, int begin, int end, int splits) const {
        const int lane = thread & 31;
        const bool is_there = lane < splits;
        const uint32_t maxima = ptx::mapa(maximum(0), is_there ? lane : 0);
        const uint32_t sums = ptx::mapa(sum(0), is_there ? lane : 0);
#pragma unroll 1
        for (int head = begin / kFours + thread / 32; head * kFours < end;
             head += kOutputThreads / 32)
            weights().template make<32>(
                p, item, head, lane, is_there,
                is_there ? ptx::ld_shared_cluster_f32(maxima + head * 4) : -INFINITY,
                is_there ? ptx::ld_shared_cluster_f32(sums + head * 4) : 0.f, 1.f,
                [&] { return head * kFours >= begin; });
    }

    // Adds the partial results of some values, in the order of the CTAs, and writes them.
    __device__ void add(const WorkItem& item, int begin, int end, int splits) const {
        const HeadWeights weight_of = weights();
#pragma unroll 1
        for (int i = begin + thread; i < end; i += kOutputThreads) {
            const int head = i / kFours, latent = i % kFours * 4;
            float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
            for (int k = 0; k < splits; ++k) {
                const float4 x = ptx::ld_shared_cluster_v4_f32(
                    ptx::mapa(base + (head * L::kPartialPitch + latent) * 4, k));
                const float by = weight_of(head, k);
                v.x = fmaf(by, x.x, v.x);
                v.y = fmaf(by, x.y, v.y);
                v.z = fmaf(by, x.z, v.z);
                v.w = fmaf(by, x.w, v.w);
            }
            const float by = weight_of(head, kMaxSplits);
            *reinterpret_cast<uint2*>(output_row<T>(p, item, head) + latent) = make_uint2(
                ptx::cvt_rn_x2<T>(v.x * by, v.y * by), ptx::cvt_rn_x2<T>(v.z * by, v.w * by));
        }
    }
};

// Sends results from registers, if a tile has up to 32 heads. Barriers count the arriving bytes: no
// thread needs a fence for its writes, nor waits at the end until others have read them. Called by
// all threads of the output. `Fragment` maps their accumulators to heads and latent values: a row
// of these is four values of each lane of a warp, of two heads and two latent values.
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

    // Called when all rows have been sent. Waits for those of the other CTAs and combines them.
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
    static_assert(kWeightsOffset + L::kRows * HeadWeights::kPitch * 4 <= L::kControlOffset,
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
    __device__ HeadWeights weights() const { return {base + kWeightsOffset}; }

    // Makes the weights of all heads: half a warp for each head, a lane for the maximum and sum of
    // each CTA.
    __device__ void weigh(const WorkItem& item) const {
        const int k = thread & 15;
        const bool is_there = k < TileScheduler::splits();
#pragma unroll 1
        for (int head = thread / 16; head < L::kRows; head += kOutputThreads / 16) {
            const float4 own = ptx::ld_shared_v4_f32(stat(is_there ? k : 0, head));
            weights().template make<kMaxSplits>(
                p, item, head, k, is_there, is_there ? own.x : -INFINITY, is_there ? own.y : 0.f,
                own.z, [&] { return head % TileScheduler::splits() == TileScheduler::split(); });
        }
    }

    // Adds what all CTAs have of a row, in their order, and writes it.
    __device__ void add(const WorkItem& item, int row, int at) const {
        const int heads[2] = {Fragment::head(row, lane(), 0), Fragment::head(row, lane(), 1)};
        float v[2][2] = {};
#pragma unroll 4
        for (int k = 0; k < TileScheduler::splits(); ++k) {
            const float4 values = ptx::ld_shared_v4_f32(values_at(at, k));
            const float x[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float by = weights()(heads[e], k);
#pragma unroll
                for (int i = 0; i < 2; ++i) v[e][i] = fmaf(by, x[Fragment::at(e, i)], v[e][i]);
            }
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (heads[e] >= item.heads) continue;
            const float by = weights()(heads[e], kMaxSplits);
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
