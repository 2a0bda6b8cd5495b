// The softmax state of one row.
#pragma once

#include "common/softmax.cuh"

namespace mla::sm80 {

// The softmax state of one row. The reference maximum is in units of log2, and rises lazily.
struct RowState {
    float maximum = -INFINITY;
    // Sum over this lane's keys only.
    float sum = 0.f;

    // Takes the maximum of some scores into account, and returns the factor for earlier sums.
    __device__ float raise(float top) {
        const float factor = raise_lazily(maximum, top);
        sum *= factor;
        return factor;
    }

    // Probability of a score times `scale`, which is in units of log2; 0 for minus infinity.
    __device__ float probability(float score, float scale) {
        const float p = ptx::ex2_approx(fmaf(score, scale, -offset_of(maximum)));
        sum += p;
        return p;
    }
};

// Reductions over the four lanes that have a row's tokens.
__device__ __forceinline__ float quad_maximum(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

}  // namespace mla::sm80
