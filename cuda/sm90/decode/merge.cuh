// Partial results: where they lie, how they are merged, and how output rows are written. The blocks that did a tile's parts
// merge them together, without ever depending on each other: the last to arrive can do it all.
//
// An output warpgroup's accumulators are the transposed output: row = latent value, column = query row. They travel as
// float4: vector v of output thread t (0..255) holds accumulators 4 v .. 4 v + 3 of that thread, at index v * 256 + t.
// With N / 8 column groups, v = tile * (N / 8) + group.
#pragma once

#include "../../common/instructions.cuh"
#include "../../common/mbarrier.cuh"
#include "layout.cuh"

namespace mla::sm90::decode {

constexpr int kOutputThreads = 256;
constexpr int kOutputBarrier = 1;

// Writes output rows from accumulator fragments.
template <typename T>
struct OutputRows {
    T* out;
    int64_t token_stride, head_stride;
    int heads, q_begin;
    // Rows of the request: this block's tile starts at first_row and has `rows` of them.
    int first_row, rows;

    __device__ T* row(int r) const {
        const int row = first_row + r, token = unsigned(row) / unsigned(heads);
        return out + (q_begin + token) * token_stride + (row - token * heads) * head_stride;
    }

    // Writes a float4 of output thread `thread`. Called by whole warps.
    __device__ void write(T* row_pointer, bool valid, int thread, int tile, float4 v) const {
        const int lane = thread & 31;
        const int first = (thread >> 7) * 256 + tile * 64 + ((thread >> 5) & 3) * 16 + 2 * (lane & 3);
        const uint32_t low = transpose_matrix(pack<T>(v.x, v.y));
        const uint32_t high = transpose_matrix(pack<T>(v.z, v.w));
        if (valid) {
            *reinterpret_cast<uint32_t*>(row_pointer + first) = low;
            *reinterpret_cast<uint32_t*>(row_pointer + first + 8) = high;
        }
    }
};

// Writes the log-sum-exp of a row of the request, given in base 2.
__device__ __forceinline__ void write_lse(const KernelParams& p, int row, int q_begin, float lse2) {
    if (!p.lse) return;
    const int token = unsigned(row) / unsigned(p.heads);
    constexpr float ln2 = 0.69314718055994531f;
    p.lse[(row - token * p.heads) * p.lse_head_stride + q_begin + token] = lse2 * ln2;
}

// Base 2 log-sum-exp of a row from its reference maximum and its sum; minus infinity for a row without tokens.
__device__ __forceinline__ float row_lse(float maximum, float sum) { return sum > 0.f ? maximum + log2f(sum) : -INFINITY; }

// The parts of a tile in the workspace.
template <int N>
struct PartialSource {
    const float* partials;
    int slot_of_first;       // part 0; part k > 0 lies in slot_of_rest + k * step
    int slot_of_rest, step;
    int parts;

    __device__ const float* part(int k) const {
        return partials + (k ? slot_of_rest + k * step : slot_of_first) * PartialLayout<N>::kFloats;
    }
    __device__ float lse(int k, int row) const { return __ldcg(part(k) + PartialLayout<N>::kFragments * 4 + row); }
    __device__ float4 vector(int k, int index) const { return __ldcg(reinterpret_cast<const float4*>(part(k)) + index); }
};

__device__ inline bool MergeCounters::arrive(int parts, bool may_wait) {
    // Releases what all threads wrote before the barrier that this thread came from, and acquires what others released.
    if (atomic_increment(&arrived) == parts - 1) return true;
    if (!may_wait) return false;
    // Nobody depends on this block: when the others do not come (they may not even be running), the last one merges alone.
    constexpr int64_t patience = 100000;  // clocks
    const int64_t start = clock64();
    while (clock64() - start < patience)
        if (load_acquire(&arrived) == parts) return true;
    return false;
}

__device__ inline void MergeCounters::leave(int parts) {
    if (atomic_increment(&left) == parts - 1) {
        arrived = 0;
        ticket = 0;
        left = 0;
    }
}

// Merges the parts of a tile: out = sum over k of 2^(lse_k - lse) out_k. All blocks that hold a part may call this; they share
// the work by tickets. Every value is summed in the order of the parts, so the result does not depend on who does what.
//
// The unit of work is 32 float4, one per lane of a warp. With many parts several warps share a unit, each summing every
// `ways`-th part; the sums are added in order. That, and weights for many parts, needs memory: `scratch`, used if `idle`.
template <typename T, int N, bool idle, typename Small>
__device__ __forceinline__ void merge_parts(const KernelParams& p, const PartialSource<N> source, const OutputRows<T> out,
                                         MergeCounters* counters, float* scratch, Small& s, int thread) {
    const int lane = thread & 31, warp = thread >> 5, parts = source.parts;
    const bool few = idle || parts <= kMergeParts;
    float* weight = idle ? scratch : &s.weight[0][0];
    float4* sums = reinterpret_cast<float4*>(scratch + kCounters * N);
    // Each ticket is drawn while the work before it is done.
    int ticket = thread == 0 ? atomicAdd(&counters->ticket, 1) : 0;

    // Weights: thread t looks at row t % N of every (256 / N)-th part.
    constexpr int groups = kOutputThreads / N;
    const int row = thread % N, own = thread / N;
    const auto lse_of = [&](int k) { return few ? weight[k * N + row] : source.lse(k, row); };
    float maximum = -INFINITY, sum = 0.f;
#pragma unroll 8
    for (int k = own; k < parts; k += groups) {
        const float lse = source.lse(k, row);
        if (few) weight[k * N + row] = lse;
        maximum = fmaxf(maximum, lse);
    }
    s.of_thread[thread] = maximum;
    named_barrier(kOutputBarrier, kOutputThreads);
#pragma unroll
    for (int g = 0; g < groups; ++g) maximum = fmaxf(maximum, s.of_thread[g * N + row]);
    named_barrier(kOutputBarrier, kOutputThreads);
    const float offset = maximum == -INFINITY ? 0.f : maximum;
#pragma unroll 4
    for (int k = own; k < parts; k += groups) {
        const float e = exp2_approx(lse_of(k) - offset);
        if (few) weight[k * N + row] = e;
        sum += e;
    }
    s.of_thread[thread] = sum;
    named_barrier(kOutputBarrier, kOutputThreads);
    sum = 0.f;
#pragma unroll
    for (int g = 0; g < groups; ++g) sum += s.of_thread[g * N + row];
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
    if (few)
        for (int k = own; k < parts; k += groups) weight[k * N + row] *= inverse;
    if (own == 0) s.merged[row] = row_lse(maximum, sum);
    // What a part's value is multiplied by where its weight is not kept; an empty row has no part with a value.
    const auto weight_of = [](float lse, float merged) { return lse == -INFINITY ? 0.f : exp2_approx(lse - merged); };

    const int ways = !idle || parts <= 8 ? 1 : parts <= 16 ? 2 : parts <= 32 ? 4 : 8;
    constexpr int units = PartialLayout<N>::kFragments / 32;
    const int rounds = units * ways / 8, per_ticket = (rounds + parts - 1) / parts;
    while (true) {
        if (thread == 0) s.ticket = ticket;
        named_barrier(kOutputBarrier, kOutputThreads);
        const int first = s.ticket * per_ticket;
        named_barrier(kOutputBarrier, kOutputThreads);
        if (first >= rounds) break;
        if (thread == 0) ticket = atomicAdd(&counters->ticket, 1);
        if (first == 0 && thread < out.rows) write_lse(p, out.first_row + thread, out.q_begin, s.merged[thread]);
        // Two rounds at a time, so that their reads overlap.
        const int last = min(first + per_ticket, rounds);
#pragma unroll 1
        for (int round = first; round < last; round += 2) {
            const int way = warp % ways;
            int index[2];
            float4 v[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                // An odd last round is done twice.
                index[r] = (min(round + r, last - 1) * 8 + warp) / ways * 32 + lane;
                v[r] = make_float4(0.f, 0.f, 0.f, 0.f);
            }
            constexpr int batch = N == 64 ? 8 : 4;
#pragma unroll 1
            for (int k0 = way; k0 < parts; k0 += batch * ways) {
                float4 x[2][batch];
#pragma unroll
                for (int k = 0; k < batch; ++k) {
                    // Past the last part its values are read again, with weight zero.
                    const int part = min(k0 + k * ways, parts - 1);
#pragma unroll
                    for (int r = 0; r < 2; ++r) x[r][k] = source.vector(part, index[r]);
                }
#pragma unroll
                for (int k = 0; k < batch; ++k) {
                    const int part = min(k0 + k * ways, parts - 1);
                    const bool valid = k0 + k * ways < parts;
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const int column = 8 * ((index[r] >> 8) % (N / 8)) + 2 * (lane & 3);
                        float2 w;
                        if (few)
                            w = *reinterpret_cast<const float2*>(&weight[part * N + column]);
                        else
                            w = make_float2(weight_of(source.lse(part, column), s.merged[column]),
                                            weight_of(source.lse(part, column + 1), s.merged[column + 1]));
                        if (!valid) w = make_float2(0.f, 0.f);
                        v[r].x = fmaf(x[r][k].x, w.x, v[r].x);
                        v[r].y = fmaf(x[r][k].y, w.y, v[r].y);
                        v[r].z = fmaf(x[r][k].z, w.x, v[r].z);
                        v[r].w = fmaf(x[r][k].w, w.y, v[r].w);
                    }
                }
            }
            if (ways > 1) {
                sums[thread] = v[0];
                sums[kOutputThreads + thread] = v[1];
                named_barrier(kOutputBarrier, kOutputThreads);
                if (way == 0) {
                    for (int w = 1; w < ways; ++w) {
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            const float4 x = sums[r * kOutputThreads + thread + w * 32];
                            v[r] = make_float4(v[r].x + x.x, v[r].y + x.y, v[r].z + x.z, v[r].w + x.w);
                        }
                    }
                }
                named_barrier(kOutputBarrier, kOutputThreads);
            }
            if (way == 0) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int group = (index[r] >> 8) % (N / 8), row = 8 * group + (lane >> 2);
                    out.write(out.row(row), row < out.rows, index[r] & 255, (index[r] >> 8) / (N / 8), v[r]);
                }
            }
        }
    }
}

}  // namespace mla::sm90::decode
