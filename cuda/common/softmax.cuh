// The algebra of split softmax: the state of a row after some of its keys, and the merge of two
// such states.
//
//   state (m, l, o)   m  the reference maximum that exponents are taken relative to
//                     l  the sum of base^(score - m)
//                     o  the sum of base^(score - m) * value
//   merge             m = max(m1, m2);  f1 = base^(m1 - m), f2 = base^(m2 - m)
//                     l = f1 l1 + f2 l2;  o = f1 o1 + f2 o2
//   result            o / l, and the log-sum-exp m + log(l)
//
// A row that has seen no key has m = -inf and l = 0. Its log-sum-exp is -inf, and its output is 0.
// A score that is NaN makes l NaN, while m ignores it. The row's log-sum-exp and all of its output
// are then NaN, too. A result whose log-sum-exp is `lse` is the state (lse, 1, output). The order
// of merging changes only roundings. Code that needs the same bits each time merges in a fixed
// order.
//
// o is in registers, spread over lanes in many ways. It is therefore not a member, and its owner
// multiplies it by `factor`.
#pragma once

#include "ptx/sm80.cuh"

namespace mla {

// Functions of attention kernels. Scores are in units of log2, and the special-function unit
// computes exponentials.
struct Base2 {
    __device__ static __forceinline__ float exp(float x) { return ptx::ex2_approx(x); }
    __device__ static __forceinline__ float log(float x) { return log2f(x); }
};

// Functions for results that cross the interface: natural logarithms, correctly rounded or nearly
// so.
struct BaseE {
    __device__ static __forceinline__ float exp(float x) { return expf(x); }
    __device__ static __forceinline__ float log(float x) { return logf(x); }
};

// The number that is subtracted from scores: 0 for a maximum of -inf, since -inf minus -inf is NaN.
__device__ __forceinline__ float offset_of(float maximum) {
    return maximum == -INFINITY ? 0.f : maximum;
}

template <typename Base>
struct SoftmaxState {
    float maximum = -INFINITY, sum = 0.f;

    // Factor that converts sums relative to this state's maximum to sums relative to `to`.
    __device__ __forceinline__ float factor(float to) const {
        return Base::exp(maximum - offset_of(to));
    }
    // Adds a state whose maximum is not above this one's; `factor` is that state's factor.
    __device__ __forceinline__ void add(const SoftmaxState& other, float factor) {
        sum = fmaf(other.sum, factor, sum);
    }
    // Raises the maximum to `to`; returns the factor for earlier sums.
    __device__ __forceinline__ float raise(float to) {
        const float by = factor(to);
        maximum = to;
        sum *= by;
        return by;
    }

    // Adds any state; returns the factors for the sums so far and for the other's.
    __device__ __forceinline__ float2 merge(const SoftmaxState& other) {
        const float top = fmaxf(maximum, other.maximum), its = other.factor(top);
        const float mine = raise(top);
        add(other, its);
        return {mine, its};
    }

    // The sum of a row that saw a NaN is NaN, and so is its log-sum-exp.
    __device__ __forceinline__ float log_sum_exp() const {
        return sum == 0.f ? -INFINITY : maximum + Base::log(sum);
    }
};

// Base 2 log-sum-exp of a row.
__device__ __forceinline__ float log2_sum_exp2(float maximum, float sum) {
    return SoftmaxState<Base2>{maximum, sum}.log_sum_exp();
}

// Natural log-sum-exp of a row whose maximum is in units of log2.
__device__ __forceinline__ float natural_lse(float maximum, float sum) {
    constexpr float ln2 = 0.69314718055994531f;
    return sum == 0.f ? -INFINITY : (maximum + log2f(sum)) * ln2;
}

// Adds a quadruple of an accumulator. Its first two values are of one row, and its last two of the
// row eight further down. Each row has a factor.
__device__ __forceinline__ void add_rows(float4& sum, const float4& x, float low, float high) {
    sum.x = fmaf(x.x, low, sum.x);
    sum.y = fmaf(x.y, low, sum.y);
    sum.z = fmaf(x.z, high, sum.z);
    sum.w = fmaf(x.w, high, sum.w);
}

// Lazy rescale: the reference maximum rises to a row's true maximum only when that exceeds it by
// more than this (in units of log2). Nearly every factor is then 1, and no accuracy is lost: l and
// o carry the same scale, and a term is at most 2^8.
constexpr float kLazyMaximum = 8.f;

// True if the reference maximum has to rise to `top`.
__device__ __forceinline__ bool exceeds_lazily(float maximum, float top) {
    return top > maximum + kLazyMaximum;
}

// Raises a reference maximum if it has to rise to `top`; returns the factor for earlier sums.
__device__ __forceinline__ float raise_lazily(float& maximum, float top) {
    const bool raise = exceeds_lazily(maximum, top);
    const float factor = raise ? ptx::ex2_approx(maximum - top) : 1.f;
    maximum = raise ? top : maximum;
    return factor;
}

}  // namespace mla
