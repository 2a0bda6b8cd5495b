// Merges the partial results of an item over the CTAs of a cluster. Each CTA puts its own into its
// shared memory, then takes a share of the item and adds all results for that share in order.
#pragma once

#include "../../../common/softmax.cuh"
#include "../../../ptx/lanes.cuh"
#include "results.cuh"
#include "split_plan.cuh"

namespace mla::sm90::sparse {

template <typename T>
__device__ __forceinline__ T* output_row(const KernelParams& p, const WorkItem& item, int head) {
    return static_cast<T*>(p.out) + item.token * p.out_token_stride +
           (item.first_head + head) * p.out_head_stride;
}

template <typename T, class L>
struct Merge {
    const KernelParams& p;
    const typename L::Control& s;
    uint32_t base;
    // The thread's number among the output's.
    int thread;

    // All MMAs are done: what they read may be overwritten.
    __device__ static void sync_output() { OutputBarrier::sync(); }

    // A value of this CTA's result, or two or four neighbouring ones.
    __device__ void put(int head, int latent, float v) const {
        ptx::st_shared(value_at(head, latent), __float_as_uint(v));
    }
    __device__ void put(int head, int latent, float2 v) const {
        ptx::st_shared_v2(value_at(head, latent), __float_as_uint(v.x), __float_as_uint(v.y));
    }
    __device__ void put(int head, int latent, float4 v) const {
        ptx::st_shared_v4(value_at(head, latent),
                          make_uint4(__float_as_uint(v.x), __float_as_uint(v.y),
                                     __float_as_uint(v.z), __float_as_uint(v.w)));
    }

    // When all values have been put.
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
    // Behind the result lies for each head what the values of each CTA, and then their sum, are
    // multiplied by.
    static constexpr int kWeightsOffset = L::kRows * L::kPartialPitch * 4;
    static constexpr int kWeightsPitch = kMaxSplits + 1;
    // Behind those, each head's maximum, and then each head's sum.
    static constexpr int kMaximaOffset = kWeightsOffset + L::kRows * kWeightsPitch * 4;
    static_assert(kMaximaOffset + L::kRows * 8 <= L::kControlOffset, "all of it has room");

    __device__ uint32_t value_at(int head, int latent) const {
        return base + (head * L::kPartialPitch + latent) * 4;
    }
    __device__ uint32_t maximum(int head) const { return base + kMaximaOffset + head * 4; }
    __device__ uint32_t sum(int head) const { return maximum(L::kRows + head); }

    __device__ uint32_t weight(int head, int k) const {
        return base + kWeightsOffset + (head * kWeightsPitch + k) * 4;
    }

    // Computes the weights of the heads of some values: one warp per head, whose lanes have one
    // CTA's maximum and sum each.
    __device__ void weigh(const WorkItem& item, int begin, int end, int splits) const {
        const int lane = thread & 31;
        const bool is_there = lane < splits;
        const uint32_t maxima = ptx::mapa(maximum(0), is_there ? lane : 0);
        const uint32_t sums = ptx::mapa(sum(0), is_there ? lane : 0);
#pragma unroll 1
        for (int head = begin / kFours + thread / 32; head * kFours < end;
             head += kOutputThreads / 32) {
            const float own = is_there ? ptx::ld_shared_cluster_f32(maxima + head * 4) : -INFINITY;
            float sum = is_there ? ptx::ld_shared_cluster_f32(sums + head * 4) : 0.f;
            float top = own;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2)
                top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
            const float factor = ptx::ex2_approx(own - offset_of(top));
            sum *= factor;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2)
                sum += __shfl_xor_sync(~0u, sum, distance);
            if (is_there) ptx::st_shared(weight(head, lane), __float_as_uint(factor));
            if (lane > 0) continue;
            const float lse = natural_lse(top, sum);
            // The CTA that has a head's first value writes its log-sum-exp.
            if (head * kFours >= begin) write_lse(p, item, head, lse);
            const bool is_empty = !(sum > 0.f) && sum == sum;
            const float by = is_empty ? 0.f : sink_factor(p, item, head, lse) / sum;
            ptx::st_shared(weight(head, kMaxSplits), __float_as_uint(by));
        }
    }

    // Adds the partial results of some values, in the order of the CTAs, and writes them.
    __device__ void add(const WorkItem& item, int begin, int end, int splits) const {
        const auto weight_of = [&](int head, int k) {
            return __int_as_float(ptx::ld_shared_s32(weight(head, k)));
        };
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

}  // namespace mla::sm90::sparse
