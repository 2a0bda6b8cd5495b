// Logits as keys: numbers without sign in the order of the logits.
#pragma once

#include "params.cuh"

namespace mla::sm90::topk {

// Equal for -0 and +0; 0 for NaN, below the key of -inf.
__device__ __forceinline__ uint32_t key_of(float logit) {
    if (logit != logit) return 0;
    // -0 + 0 is +0.
    const uint32_t bits = __float_as_uint(logit + 0.f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The least and the largest key.
struct Range {
    uint32_t least = ~0u, largest = 0;

    __device__ __forceinline__ void add(uint32_t key) {
        least = min(least, key);
        largest = max(largest, key);
    }
    __device__ __forceinline__ void reduce() {
        least = __reduce_min_sync(~0u, least);
        largest = __reduce_max_sync(~0u, largest);
    }
};

// Reads `count` logits into shared memory as keys; their range, of this thread's alone.
__device__ __forceinline__ Range load_keys(const float* logits, uint32_t* keys, int count,
                                           bool vectors) {
    Range range;
    const int whole = vectors ? count / 4 : 0;
    const float4* from = reinterpret_cast<const float4*>(logits);
    uint4* to = reinterpret_cast<uint4*>(keys);
    // Four loads in flight.
    constexpr int kBatch = 4;
    for (int base = threadIdx.x; base < whole; base += kBatch * kThreads) {
        float4 x[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (base + i * kThreads < whole) x[i] = __ldcs(from + base + i * kThreads);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (base + i * kThreads >= whole) break;
            const uint4 key = {key_of(x[i].x), key_of(x[i].y), key_of(x[i].z), key_of(x[i].w)};
            range.add(key.x);
            range.add(key.y);
            range.add(key.z);
            range.add(key.w);
            to[base + i * kThreads] = key;
        }
    }
    for (int i = whole * 4 + threadIdx.x; i < count; i += kThreads) {
        const uint32_t key = key_of(__ldcs(logits + i));
        range.add(key);
        keys[i] = key;
    }
    return range;
}

}  // namespace mla::sm90::topk
