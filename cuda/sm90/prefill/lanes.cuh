// What the lanes of a warp do together. On the host one lane stands for them, so that what they
// compute can be tested there.
#pragma once

#include <cuda_runtime.h>

namespace mla::sm90::prefill {

#ifdef __CUDA_ARCH__
struct Lanes {
    static constexpr int kCount = 32;
    __device__ static int own() { return threadIdx.x & 31; }
    __device__ static int lowest(int x) { return __reduce_min_sync(~0u, x); }
    __device__ static int highest(int x) { return __reduce_max_sync(~0u, x); }
    __device__ static int sum(int x) { return __reduce_add_sync(~0u, x); }
    __device__ static int of(int x, int lane) { return __shfl_sync(~0u, x, lane); }
    // The first lane that says so; there is one.
    __device__ static int first(bool own) { return __ffs(__ballot_sync(~0u, own)) - 1; }
    // The sum of the lanes up to this one.
    __device__ static int running_sum(int x) {
#pragma unroll
        for (int d = 1; d < kCount; d *= 2) {
            const int other = __shfl_up_sync(~0u, x, d);
            if (own() >= d) x += other;
        }
        return x;
    }
};
#else
struct Lanes {
    static constexpr int kCount = 1;
    static int own() { return 0; }
    static int lowest(int x) { return x; }
    static int highest(int x) { return x; }
    static int sum(int x) { return x; }
    static int of(int x, int) { return x; }
    static int first(bool) { return 0; }
    static int running_sum(int x) { return x; }
};
#endif

}  // namespace mla::sm90::prefill
