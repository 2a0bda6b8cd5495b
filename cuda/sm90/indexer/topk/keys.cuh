// Sortable keys of logits: unsigned numbers in the order of the logits.
#pragma once

#include "params.cuh"

namespace mla::sm90::topk {

constexpr uint32_t kKeyOfMinusInfinity = 0x007fffffu;

// The sortable key of a logit. It is equal for -0 and +0. NaN has key 0, below the key of -inf.
__device__ __forceinline__ uint32_t key_of(float logit) {
    if (logit != logit) return 0;
    // -0 + 0 is +0.
    const uint32_t bits = __float_as_uint(logit + 0.f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The logit of a key, or -inf if the key is below that of -inf. Numbers that are not below this
// logit have no lower key.
__device__ __forceinline__ float logit_of(uint32_t key) {
    key = max(key, kKeyOfMinusInfinity);
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// Minimum and maximum of keys.
struct Range {
    uint32_t lowest = ~0u, largest = 0;

    __device__ __forceinline__ void add(uint32_t key) {
        lowest = min(lowest, key);
        largest = max(largest, key);
    }
    __device__ __forceinline__ void reduce() {
        lowest = __reduce_min_sync(~0u, lowest);
        largest = __reduce_max_sync(~0u, largest);
    }
};

// The range of all threads' keys, in every thread.
template <typename S>
__device__ __forceinline__ Range range_of_cta(S& s, Range range) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    range.reduce();
    if (lane == 0) s.warp_range[warp] = {range.lowest, range.largest};
    __syncthreads();
    Range all;
    if (lane < S::kWarps) all = {s.warp_range[lane].x, s.warp_range[lane].y};
    all.reduce();
    return all;
}

}  // namespace mla::sm90::topk
