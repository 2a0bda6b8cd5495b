// The results made of a head's maximum and sum.
#pragma once

#include "list_walk.cuh"

namespace mla::sm90::sparse {

__device__ __forceinline__ float natural_lse(float maximum, float sum) {
    constexpr float ln2 = 0.69314718055994531f;
    return sum == 0.f ? -INFINITY : (maximum + log2f(sum)) * ln2;
}

// The share of a head's output that a sink, a further key without a value, leaves.
__device__ __forceinline__ float sink_factor(const KernelParams& p, const WorkItem& item, int row,
                                             float lse) {
    if (!p.sinks || row >= item.heads) return 1.f;
    return 1.f / (1.f + __expf(p.sinks[item.first_head + row] - lse));
}

__device__ __forceinline__ void write_lse(const KernelParams& p, const WorkItem& item, int row,
                                          float lse) {
    if (p.lse && row < item.heads)
        p.lse[(item.first_head + row) * p.lse_head_stride + item.token] = lse;
}

// Writes the log-sum-exp of a head, which is done, and returns the factor of its output.
__device__ __forceinline__ float finish_row(const KernelParams& p, const WorkItem& item, int row,
                                            float maximum, float sum, float scale) {
    const float lse = natural_lse(maximum, sum);
    write_lse(p, item, row, lse);
    return sum > 0.f || sum != sum ? scale / sum * sink_factor(p, item, row, lse) : 0.f;
}

}  // namespace mla::sm90::sparse
