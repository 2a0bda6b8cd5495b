// Merges the parts that the blocks of a cluster have of an item: each block puts its part into its
// shared memory, then takes a share of the item and adds all parts of it in order.
#pragma once

#include "../../../common/softmax.cuh"
#include "results.cuh"

namespace mla::sm90::sparse {

constexpr int kOutputThreads = 256;
constexpr int kOutputBarrier = 4;

template <typename T>
__device__ __forceinline__ T* output_row(const KernelParams& p, const Item& item, int head) {
    return static_cast<T*>(p.out) + item.token * p.out_token_stride +
           (item.first_head + head) * p.out_head_stride;
}

template <typename T, class L>
struct Merge {
    const KernelParams& p;
    const typename L::Small& s;
    uint32_t base;
    // Of the output's.
    int thread;

    // All products are done: what they read may be overwritten.
    __device__ static void meet() { ptx::bar_sync(kOutputBarrier, kOutputThreads); }

    // A value of this block's part.
    __device__ void put(int head, int latent, float value) const {
        ptx::st_shared(base + (head * L::kPartPitch + latent) * 4, __float_as_uint(value));
    }

    // When all values have been put.
    __device__ void run(const Item& item) const {
        ptx::barrier_cluster_arrive();
        ptx::barrier_cluster_wait();
        constexpr int fours = kLatent / 4;
        const int all = item.heads * fours;
        const int split = Items::split(), splits = Items::splits();
        const int begin = all * split / splits, end = all * (split + 1) / splits;
        const uint32_t maxima = ptx::shared_address(s.maximum), sums = ptx::shared_address(s.sum);
#pragma unroll 1
        for (int i = begin + thread; i < end; i += kOutputThreads) {
            const int head = i / fours, latent = i % fours * 4;
            float top = -INFINITY;
#pragma unroll 4
            for (int k = 0; k < splits; ++k)
                top = fmaxf(top, ptx::ld_shared_cluster_f32(ptx::mapa(maxima + head * 4, k)));
            const float offset = offset_of(top);
            float sum = 0.f;
            float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
            for (int k = 0; k < splits; ++k) {
                const float weight = ptx::ex2_approx(
                    ptx::ld_shared_cluster_f32(ptx::mapa(maxima + head * 4, k)) - offset);
                const float4 x = ptx::ld_shared_cluster_v4_f32(
                    ptx::mapa(base + (head * L::kPartPitch + latent) * 4, k));
                sum = fmaf(weight, ptx::ld_shared_cluster_f32(ptx::mapa(sums + head * 4, k)), sum);
                v.x = fmaf(weight, x.x, v.x);
                v.y = fmaf(weight, x.y, v.y);
                v.z = fmaf(weight, x.z, v.z);
                v.w = fmaf(weight, x.w, v.w);
            }
            const float lse = natural_lse(top, sum);
            if (latent == 0) write_lse(p, item, head, lse);
            const float by = sum > 0.f || sum != sum ? sink_factor(p, item, head, lse) / sum : 0.f;
            *reinterpret_cast<uint2*>(output_row<T>(p, item, head) + latent) = make_uint2(
                ptx::cvt_rn_x2<T>(v.x * by, v.y * by), ptx::cvt_rn_x2<T>(v.z * by, v.w * by));
        }
        // Nobody leaves while others read.
        ptx::barrier_cluster_arrive();
        ptx::barrier_cluster_wait();
    }
};

}  // namespace mla::sm90::sparse
