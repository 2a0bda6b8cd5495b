// Collective operations of the lanes of a warp. On the host, one lane stands for them, so that code
// that uses them can be tested there.
#pragma once

#include <cuda_runtime.h>

namespace mla {

#ifdef __CUDA_ARCH__
struct Lanes {
    static constexpr int kCount = 32;
    __device__ static int own() { return threadIdx.x & 31; }
    __device__ static int lowest(int x) { return __reduce_min_sync(~0u, x); }
    __device__ static int highest(int x) { return __reduce_max_sync(~0u, x); }
    __device__ static int sum(int x) { return __reduce_add_sync(~0u, x); }
    __device__ static float sum(float x) {
#pragma unroll
        for (int d = kCount / 2; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
        return x;
    }
    __device__ static int of(int x, int lane) { return __shfl_sync(~0u, x, lane); }
    __device__ static float of(float x, int lane) { return __shfl_sync(~0u, x, lane); }
    __device__ static int last(int x) { return of(x, kCount - 1); }
    __device__ static bool all(bool own) { return __all_sync(~0u, own); }
    // First lane whose `own` is true; there is one.
    __device__ static int first(bool own) { return __ffs(__ballot_sync(~0u, own)) - 1; }
    // First lane whose `own` is true; 0 if there is none.
    __device__ static int first_or_zero(bool own) {
        const unsigned lanes = __ballot_sync(~0u, own);
        return lanes ? __ffs(lanes) - 1 : 0;
    }
    // Mask of the lanes whose `own` is true, their number, and the n-th of them, from 0 on.
    __device__ static unsigned ballot(bool own) { return __ballot_sync(~0u, own); }
    __device__ static int count(unsigned lanes) { return __popc(lanes); }
    __device__ static int nth(unsigned lanes, int n) { return __fns(lanes, 0, n + 1); }
    // Number of lanes of a mask that come before this one.
    __device__ static int before(unsigned lanes) { return __popc(lanes & ((1u << own()) - 1)); }
    // Inclusive prefix sum over the lanes.
    __device__ static int running_sum(int x) {
#pragma unroll
        for (int d = 1; d < kCount; d *= 2) {
            const int other = __shfl_up_sync(~0u, x, d);
            if (own() >= d) x += other;
        }
        return x;
    }
    // f(a) and f(b), by two lanes at the same time.
    template <typename F>
    __device__ static int2 both(F f, int a, int b) {
        const int x = f(own() == 0 ? a : b);
        return make_int2(__shfl_sync(~0u, x, 0), __shfl_sync(~0u, x, 1));
    }
};
#else
struct Lanes {
    static constexpr int kCount = 1;
    static int own() { return 0; }
    static int lowest(int x) { return x; }
    static int highest(int x) { return x; }
    static int sum(int x) { return x; }
    static float sum(float x) { return x; }
    static int of(int x, int) { return x; }
    static float of(float x, int) { return x; }
    static int last(int x) { return x; }
    static bool all(bool own) { return own; }
    static int first(bool) { return 0; }
    static int first_or_zero(bool) { return 0; }
    static unsigned ballot(bool own) { return own; }
    static int count(unsigned lanes) { return int(lanes); }
    static int nth(unsigned, int) { return 0; }
    static int running_sum(int x) { return x; }
    template <typename F>
    static int2 both(F f, int a, int b) {
        return make_int2(f(a), f(b));
    }
};
#endif

}  // namespace mla
