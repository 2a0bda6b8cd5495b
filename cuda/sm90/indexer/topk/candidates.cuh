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

// What a sample says of a row.
struct Guess {
    // A logit below which nothing is chosen, almost certainly.
    float least;
    // How far above its key the keys of most others lie; 0 if nothing is known.
    uint32_t range;

    __device__ __forceinline__ uint32_t key() const { return key_of(least); }
};

// Bins of equal steps of values. Larger values have no lower bin, and NaN has the lowest.
struct Steps {
    float least, width, scale;

    __device__ __forceinline__ Steps(float least, float largest)
        : least(least), width((largest - least) * (1.f / kBins)) {
        scale = __fdividef(1.f, width);
    }
    // Not if all are equal, nor between infinite ones.
    __device__ __forceinline__ bool usable() const { return scale > 0 && scale < 1e30f; }
    // Counted in bins from the first one.
    __device__ __forceinline__ float at(float x) const { return (x - least) * scale; }
    __device__ __forceinline__ uint32_t bin_of(float x) const {
        return uint32_t(fminf(fmaxf(at(x), 0.f), float(kBins - 1)));
    }
};

// Readies s.bins for another histogram.
__device__ __forceinline__ void clear_bins(Shared& s) {
    __syncthreads();
    *reinterpret_cast<uint4*>(&s.bins[4 * threadIdx.x]) = {0, 0, 0, 0};
    __syncthreads();
}

// So many of the sample are above the guess as the row's part that is chosen, and four standard
// deviations more. Each thread has a vector of the sample. Values in equal steps seldom need a
// second histogram, as keys mostly do. Bins are zero before, not afterwards.
__device__ __forceinline__ Guess guess_from(Shared& s, const float4& x, int count, int topk) {
    const float expected = float(kSamples) * float(topk) / float(count);
    const uint32_t wanted = uint32_t(expected + 4.f * sqrtf(expected) + 8.f);
    if (wanted >= kSamples) return {logit_of(0), 0};
    const uint32_t enough = max(wanted / 3, 12u);
    Range range;
    range.add(key_of(fminf(fminf(x.x, x.y), fminf(x.z, x.w))));
    range.add(key_of(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w))));
    range = range_of_cta(s, range);
    const Steps steps(logit_of(range.least), logit_of(range.largest));
    float least = 0;
    bool known = false;
    if (steps.usable()) {
        atomicAdd(&s.bins[steps.bin_of(x.x)], 1u);
        atomicAdd(&s.bins[steps.bin_of(x.y)], 1u);
        atomicAdd(&s.bins[steps.bin_of(x.z)], 1u);
        atomicAdd(&s.bins[steps.bin_of(x.w)], 1u);
        __syncthreads();
        find_bin(s, s.bins, kBins, wanted);
        least = steps.least + float(s.bin) * steps.width;
        known = s.inside <= enough;
    }
    if (!known) {
        clear_bins(s);
        Threshold t = {0, range.largest, wanted, kSamples};
        narrow(s, t, t.width, enough, [&](const auto& visit) {
            visit(key_of(x.x));
            visit(key_of(x.y));
            visit(key_of(x.z));
            visit(key_of(x.w));
        });
        least = logit_of(t.least);
    }
    return {least, max(range.largest, key_of(least)) - key_of(least)};
}

// Where the sample's vector of this thread begins.
__device__ __forceinline__ int sampled_at(int count) {
    constexpr int together = kSampled * kSampledTogether, places = kThreads / kSampledTogether;
    const int place = threadIdx.x / kSampledTogether;
    return int(int64_t(count / together) * place / places) * together +
           int(threadIdx.x) % kSampledTogether * kSampled;
}

// The same with a sample that is not there yet. Bins are zero, here and afterwards.
__device__ __forceinline__ Guess guess(Shared& s, const float* logits, int count, bool vectors,
                                       int topk) {
    const Guess guessed =
        guess_from(s, load4(logits, sampled_at(count), count, vectors), count, topk);
    clear_bins(s);
    return guessed;
}

// Adds to the candidates what is at least `least` of these logits, which are vectors of four from
// position `first` on.
template <int kBatch>
__device__ __forceinline__ void keep(Shared& s, Candidate* candidates, uint32_t room,
                                     const float4 (&x)[kBatch], int first, float least) {
    // Counted as numbers, so that no predicates have to be kept until they are needed again.
    float number = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
        number += ptx::set_ge(x[i].x, least) + ptx::set_ge(x[i].y, least) +
                  ptx::set_ge(x[i].z, least) + ptx::set_ge(x[i].w, least);
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
            if (of[j] >= least) {
                ptx::st_shared_v2(to, __float_as_uint(of[j]),
                                  uint32_t(first + i * 4 * kThreads + j));
                to += uint32_t(sizeof(Candidate));
            }
    }
}

// Keeps what is at least `least` of the logits `begin .. end`, in no particular order.
template <int kBatch>
__device__ __forceinline__ void collect(Shared& s, Candidate* candidates, uint32_t room,
                                        const float* logits, int begin, int end, bool vectors,
                                        float least) {
    constexpr int kStep = kBatch * 4 * kThreads;
    int first = begin + 4 * int(threadIdx.x);
    const float4* vector = reinterpret_cast<const float4*>(logits + first);
    float4 x[kBatch];
    // Whole steps of a row that begins on 16 bytes need not ask where it ends.
    if (vectors)
        for (; begin + kStep <= end; begin += kStep, first += kStep, vector += kStep / 4) {
#pragma unroll
            for (int i = 0; i < kBatch; ++i) x[i] = __ldg(vector + i * kThreads);
            keep(s, candidates, room, x, first, least);
        }
    for (; begin < end; begin += kStep, first += kStep) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            x[i] = load4(logits, first + i * 4 * kThreads, end, vectors);
        keep(s, candidates, room, x, first, least);
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
