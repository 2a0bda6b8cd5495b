// The logits that may be chosen: a sample of the row says which are worth keeping.
#pragma once

#include "../../../ptx/sm90.cuh"
#include "threshold.cuh"

namespace mla::sm90::topk {

// CTAs that share a row. The first chooses among what all have found.
struct Cluster {
    uint32_t rank, ctas;

    __device__ __forceinline__ void sync() const {
        if (ctas == 1) return;
        ptx::barrier_cluster_arrive();
        ptx::barrier_cluster_wait();
    }
};

// Logits `at .. at + 4` of a row of `count`; NaN behind its end.
__device__ __forceinline__ float4 load4(const float* logits, int at, int count, bool vectors) {
    if (vectors && at + 4 <= count) return __ldg(reinterpret_cast<const float4*>(logits + at));
    const float none = __int_as_float(0x7fffffff);
    float4 x;
    x.x = at < count ? logits[at] : none;
    x.y = at + 1 < count ? logits[at + 1] : none;
    x.z = at + 2 < count ? logits[at + 2] : none;
    x.w = at + 3 < count ? logits[at + 3] : none;
    return x;
}

// A logit below which nothing is chosen, almost certainly: so many of the sample are above it as
// the row's part that is chosen, and four standard deviations more.
__device__ __forceinline__ float guess(Shared& s, const float* logits, int count, bool vectors,
                                       int topk) {
    const float expected = float(kSamples) * float(topk) / float(count);
    const uint32_t wanted = uint32_t(expected + 4.f * sqrtf(expected) + 8.f);
    if (wanted >= kSamples) return logit_of(0);
    const int at = int(int64_t(count / kSampled) * threadIdx.x / kThreads) * kSampled;
    const float4 low = load4(logits, at, count, vectors);
    const float4 high = load4(logits, at + 4, count, vectors);
    const uint32_t keys[kSampled] = {key_of(low.x),  key_of(low.y),  key_of(low.z),
                                     key_of(low.w),  key_of(high.x), key_of(high.y),
                                     key_of(high.z), key_of(high.w)};
    Range range;
#pragma unroll
    for (const uint32_t key : keys) range.add(key);
    range = range_of_cta(s, range);
    Threshold t = {range.least, range.largest - range.least, wanted, kSamples};
    narrow(s, t, wanted / 8, [&](const auto& visit) {
#pragma unroll
        for (const uint32_t key : keys) visit(key);
    });
    return logit_of(t.least);
}

// Keeps what is at least `least` of the logits `begin .. end`, in no particular order.
template <int kBatch>
__device__ __forceinline__ void collect(Shared& s, Candidate* candidates, uint32_t room,
                                        const float* logits, int begin, int end, bool vectors,
                                        float least) {
    const int lane = threadIdx.x % 32;
    for (int base = begin; base < end; base += kBatch * 4 * kThreads) {
        const int first = base + 4 * int(threadIdx.x);
        float4 x[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            x[i] = load4(logits, first + i * 4 * kThreads, end, vectors);
        uint32_t kept = 0;
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            kept += int(x[i].x >= least) + int(x[i].y >= least) + int(x[i].z >= least) +
                    int(x[i].w >= least);
        const uint32_t inclusive = inclusive_sum(kept);
        uint32_t at = 0;
        if (lane == 31 && inclusive) at = atomicAdd(&s.candidates, inclusive);
        at = __shfl_sync(~0u, at, 31) + inclusive - kept;
        if (at + kept > room) continue;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const float of[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (of[j] >= least)
                    candidates[at++] = {__float_as_uint(of[j]),
                                        uint32_t(first + i * 4 * kThreads + j)};
        }
    }
}

// Brings what the other CTAs of the cluster have found to the first one, and says how many there
// are in all; more than `room` if any had no room.
__device__ __forceinline__ uint32_t gather(const Cluster& cluster, Shared& s, Candidate* candidates,
                                           uint32_t room) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t own = 0;
    if (lane < int(cluster.ctas))
        own = ptx::ld_shared_cluster_u32(ptx::mapa(ptx::shared_address(&s.candidates), lane));
    const uint32_t all = __reduce_add_sync(~0u, own);
    if (all > room) return all;
    // A warp reads what one CTA has.
    for (int rank = 1 + warp; rank < int(cluster.ctas); rank += kWarps) {
        const uint32_t before = __reduce_add_sync(~0u, lane < rank ? own : 0);
        const uint32_t count = __shfl_sync(~0u, own, rank);
        const uint32_t from = ptx::mapa(ptx::shared_address(candidates), rank);
        for (uint32_t i = lane; i < count; i += 32)
            candidates[before + i] =
                ptx::ld_shared_cluster_v2_u32(from + i * uint32_t(sizeof(Candidate)));
    }
    return all;
}

}  // namespace mla::sm90::topk
