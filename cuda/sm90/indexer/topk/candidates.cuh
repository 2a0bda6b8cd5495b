// Candidates are the logits that may be chosen. A sample of the row gives a bound, and only logits
// that are not below it are kept.
#pragma once

#include "../../../ptx/sm90.cuh"
#include "threshold.cuh"

namespace mla::sm90::topk {

// CTAs that share a row. The first one chooses among the candidates of all.
struct Cluster {
    uint32_t rank, ctas;

    __device__ __forceinline__ void sync() const {
        if (ctas == 1) return;
        ptx::barrier_cluster_arrive();
        ptx::barrier_cluster_wait();
    }
};

// Loads logits `at` to `at + 4` of a row of `count` logits. Values behind the row's end are NaN.
__device__ __forceinline__ float4 load4(const float* logits, int at, int count, bool vectors) {
    if (vectors && at + 4 <= count) return ptx::ld_global_nc(logits + at);
    const float none = __int_as_float(0x7fffffff);
    float4 x;
    x.x = at < count ? logits[at] : none;
    x.y = at + 1 < count ? logits[at + 1] : none;
    x.z = at + 2 < count ? logits[at + 2] : none;
    x.w = at + 3 < count ? logits[at + 3] : none;
    return x;
}

// Estimates from a sample of a row.
struct SampleEstimate {
    // Almost certainly, no logit below this one is chosen.
    float lowest;
    // Distance from the key of `lowest` to the sample's largest key, below which nearly all keys
    // lie. 0 if nothing is known.
    uint32_t range;

    __device__ __forceinline__ uint32_t key() const { return key_of(lowest); }
};

// Bins that have the same width in values. Larger values are never in a lower bin, and NaN is in
// the lowest bin.
template <int kBins>
struct Steps {
    float lowest, width, scale;

    __device__ __forceinline__ Steps(float lowest, float largest)
        : lowest(lowest), width((largest - lowest) * (1.f / kBins)) {
        scale = __fdividef(1.f, width);
    }
    // False if all values are equal, or if some are infinite.
    __device__ __forceinline__ bool usable() const { return scale > 0 && scale < 1e30f; }
    // Distance of `x` from the lower end of the first bin, in bins.
    __device__ __forceinline__ float at(float x) const { return (x - lowest) * scale; }
    __device__ __forceinline__ uint32_t bin_of(float x) const {
        return uint32_t(fminf(fmaxf(at(x), 0.f), float(kBins - 1)));
    }
};

// Clears s.bins for another histogram.
template <typename S>
__device__ __forceinline__ void clear_bins(S& s) {
    __syncthreads();
    *reinterpret_cast<uint4*>(&s.bins[4 * threadIdx.x]) = {0, 0, 0, 0};
    __syncthreads();
}

// Estimates the bound of candidates from a sample, of which each thread has some vectors. The bound
// has about a certain number of the sample's logits above it: the number that is expected to be
// chosen, plus four standard deviations, plus eight. The first histogram has bins of equal width in
// values, since these are seldom too coarse. If they are, histograms of keys (key_of()) follow,
// usually more than one. The bins are zero at entry, but not at return.
template <typename S>
__device__ __forceinline__ SampleEstimate estimate_from(S& s, const float4 (&x)[S::kSampledEach],
                                                        int count, int topk) {
    const float expected = float(kSamples) * float(topk) / float(count);
    const uint32_t wanted = uint32_t(expected + 4.f * sqrtf(expected) + 8.f);
    if (wanted >= kSamples) return {logit_of(0), 0};
    const uint32_t enough = max(wanted / 3, 12u);
    Range range;
#pragma unroll
    for (const float4& v : x) {
        range.add(key_of(fminf(fminf(v.x, v.y), fminf(v.z, v.w))));
        range.add(key_of(fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w))));
    }
    range = range_of_cta(s, range);
    const Steps<S::kBins> steps(logit_of(range.lowest), logit_of(range.largest));
    float lowest = 0;
    bool known = false;
    if (steps.usable()) {
#pragma unroll
        for (const float4& v : x) {
            atomicAdd(&s.bins[steps.bin_of(v.x)], 1u);
            atomicAdd(&s.bins[steps.bin_of(v.y)], 1u);
            atomicAdd(&s.bins[steps.bin_of(v.z)], 1u);
            atomicAdd(&s.bins[steps.bin_of(v.w)], 1u);
        }
        __syncthreads();
        find_bin(s, s.bins, S::kBins, wanted);
        lowest = steps.lowest + float(s.bin) * steps.width;
        known = s.inside <= enough;
    }
    if (!known) {
        clear_bins(s);
        Threshold t = {0, range.largest, wanted, kSamples};
        narrow(s, t, t.width, enough, [&](const auto& visit) {
#pragma unroll
            for (const float4& v : x) {
                visit(key_of(v.x));
                visit(key_of(v.y));
                visit(key_of(v.z));
                visit(key_of(v.w));
            }
        });
        lowest = logit_of(t.lowest);
    }
    return {lowest, max(range.largest, key_of(lowest)) - key_of(lowest)};
}

// Position of a vector of the sample.
__device__ __forceinline__ int sampled_at(int vector, int count) {
    constexpr int together = kSampled * kSampledTogether, places = kSamples / together;
    return int(int64_t(count / together) * (vector / kSampledTogether) / places) * together +
           vector % kSampledTogether * kSampled;
}

// This thread's vectors of the sample.
template <int kThreads, int kEach>
__device__ __forceinline__ void load_sample(float4 (&x)[kEach], const float* logits, int count,
                                            bool vectors) {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
        x[i] = load4(logits, sampled_at(i * kThreads + int(threadIdx.x), count), count, vectors);
}

// Adds the logits of `bound` or more to the candidates. The logits are in vectors of four, the
// first one at position `first`.
template <typename S, int kBatch>
__device__ __forceinline__ void keep(S& s, Candidate* candidates, uint32_t room,
                                     const float4 (&x)[kBatch], int first, float bound) {
    // The count is a float: then no predicates have to be kept until the second loop.
    float number = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
        number += ptx::set_ge(x[i].x, bound) + ptx::set_ge(x[i].y, bound) +
                  ptx::set_ge(x[i].z, bound) + ptx::set_ge(x[i].w, bound);
    const uint32_t kept = uint32_t(number);
    const uint32_t inclusive = inclusive_sum(kept);
    uint32_t at = 0;
    if (threadIdx.x % 32 == 31)
        at = ptx::atom_shared_add(ptx::shared_address(&s.candidates), inclusive);
    at = __shfl_sync(~0u, at, 31) + inclusive - kept;
    if (at + kept > room) return;
    uint32_t to = ptx::shared_address(candidates + at);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
        const float of[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (of[j] >= bound) {
                ptx::st_shared_v2(to, __float_as_uint(of[j]),
                                  uint32_t(first + i * 4 * S::kThreads + j));
                to += uint32_t(sizeof(Candidate));
            }
    }
}

// Loads this thread's vectors of the step that begins at `begin`, if `begin` is before `end`. Whole
// steps of a row that is aligned to 16 bytes need no check of the row's end.
template <int kThreads, int kBatch>
__device__ __forceinline__ void load_step(float4 (&x)[kBatch], const float* logits, int begin,
                                          int end, bool vectors) {
    constexpr int kEach = 4 * kThreads;
    const int first = begin + 4 * int(threadIdx.x);
    if (vectors && begin + kBatch * kEach <= end) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) x[i] = ptx::ld_global_nc(logits + first + i * kEach);
    } else if (begin < end) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) x[i] = load4(logits, first + i * kEach, end, vectors);
    }
}

// Keeps the logits in `begin .. end` that are at least `bound`, in no particular order. `x` holds
// the first step. Each further step is in flight while the previous one is handled.
template <typename S, int kBatch>
__device__ __forceinline__ void collect(S& s, Candidate* candidates, uint32_t room,
                                        const float* logits, int begin, int end, bool vectors,
                                        float bound, float4 (&x)[kBatch]) {
    constexpr int kStep = kBatch * 4 * S::kThreads;
    float4 next[kBatch];
    int first = begin + 4 * int(threadIdx.x);
#pragma unroll 1
    for (; begin < end; begin += 2 * kStep, first += 2 * kStep) {
        load_step<S::kThreads>(next, logits, begin + kStep, end, vectors);
        keep(s, candidates, room, x, first, bound);
        if (begin + kStep >= end) return;
        load_step<S::kThreads>(x, logits, begin + 2 * kStep, end, vectors);
        keep(s, candidates, room, next, first + kStep, bound);
    }
}

// Copies the candidates of the cluster's other CTAs to the first one. Returns the number of all
// candidates, which is more than `room` if a CTA had no room.
__device__ __forceinline__ uint32_t gather(const Cluster& cluster, Shared& s, Candidate* candidates,
                                           uint32_t room) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t own = 0;
    if (lane < int(cluster.ctas))
        own = ptx::ld_shared_cluster_u32(ptx::mapa(ptx::shared_address(&s.candidates), lane));
    const uint32_t all = __reduce_add_sync(~0u, own);
    if (all > room) return all;
    // A warp copies the candidates of one CTA.
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
