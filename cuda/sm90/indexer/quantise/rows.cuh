// Index keys and queries: normalised, rotated, transformed and rounded to e4m3.
//
// A warp has a row of 128 values, and each lane has four neighbouring ones. The operations come in
// the order of the CPU device's code, and each result is rounded. All values but the sums of the
// LayerNorm, which are in f64, are therefore the same as on the CPU, to the last bit.
//
// If tokens are few, an SM has nothing else to do while it waits for instructions that run once.
// The code therefore has as few instructions as possible.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "sm90/mla_sm90.h"

namespace mla::sm90::quantise {

constexpr int kThreads = 128;
constexpr int kRows = kThreads / 32;
constexpr int kWidth = 128;
constexpr int kRope = 64;

// One element of a tensor of any dtype.
__device__ __forceinline__ float element(const void* from, int64_t at, int dtype) {
    switch (dtype) {
        case MLA_DTYPE_BF16: return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[at]);
        case MLA_DTYPE_F16: return __half2float(static_cast<const __half*>(from)[at]);
        default: return static_cast<const float*>(from)[at];
    }
}

struct Values {
    float x[4];

    __device__ __forceinline__ void load(const void* from, int64_t at, int dtype, int lane) {
        at += lane * 4;
        switch (dtype) {
            case MLA_DTYPE_BF16: return take(static_cast<const __nv_bfloat16*>(from) + at);
            case MLA_DTYPE_F16: return take(static_cast<const __half*>(from) + at);
            default: return take(static_cast<const float*>(from) + at);
        }
    }

  private:
    template <typename T>
    __device__ __forceinline__ void take(const T* from) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = float(from[i]);
    }
};

__device__ __forceinline__ double sum_of_warp(double x) {
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

// (x - mean) / sqrt(variance + epsilon) * weight + bias.
__device__ __forceinline__ void normalise(Values& v, const MlaIndexKeysParams& p, int lane) {
    // These are loaded before anything waits.
    Values weight, bias;
    weight.load(p.norm_weight, 0, p.norm_weight_dtype, lane);
    bias.load(p.norm_bias, 0, p.norm_bias_dtype, lane);
    double sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += v.x[i];
    const double mean = sum_of_warp(sum) / kWidth;
    double squares = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) squares += (v.x[i] - mean) * (v.x[i] - mean);
    const double factor = rsqrt(sum_of_warp(squares) / kWidth + double(p.epsilon));
#pragma unroll
    for (int i = 0; i < 4; ++i)
        v.x[i] = float((v.x[i] - mean) * factor * double(weight.x[i]) + double(bias.x[i]));
}

// Rotates the first 64 values, which lanes 0 to 15 have.
__device__ __forceinline__ void rotate(Values& v, const MlaIndexRotary& r, int64_t token,
                                       int lane) {
    if (!r.positions) return;
    const int64_t position = r.positions[token];
    const bool inside = position >= 0 && position < r.positions_len;
    const float* cos = r.cos + (inside ? position : 0) * r.table_stride;
    const float* sin = r.sin + (inside ? position : 0) * r.table_stride;
    float other[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        other[i] = r.style == MLA_ROTARY_HALVES ? __shfl_xor_sync(~0u, v.x[i], 8) : v.x[i ^ 1];
    if (lane >= kRope / 4) return;
    float rotated[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int at = lane * 4 + i;
        const bool halves = r.style == MLA_ROTARY_HALVES;
        const int pair = halves ? at % (kRope / 2) : at / 2;
        const bool first = halves ? at < kRope / 2 : at % 2 == 0;
        const float c = cos[pair], s = sin[pair];
        // a cos - b sin, and b cos + a sin, each product rounded.
        const float own = __fmul_rn(v.x[i], c), across = __fmul_rn(other[i], s);
        rotated[i] = first ? __fsub_rn(own, across) : __fadd_rn(own, across);
        if (!inside) rotated[i] = __int_as_float(0x7fffffff);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) v.x[i] = rotated[i];
}

// The Hadamard transform in Sylvester's order, divided by the root of 128.
__device__ __forceinline__ void hadamard(Values& v, int lane) {
    for (int half = 1; half < 4; half *= 2) {
        Values old = v;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            v.x[i] = i & half ? __fsub_rn(old.x[i ^ half], old.x[i])
                              : __fadd_rn(old.x[i], old.x[i ^ half]);
    }
    for (int half = 1; half < 32; half *= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(~0u, v.x[i], half);
            v.x[i] = lane & half ? __fsub_rn(other, v.x[i]) : __fadd_rn(v.x[i], other);
        }
    }
    const float factor = 0.088388347648318447f;  // 128^-1/2
#pragma unroll
    for (int i = 0; i < 4; ++i) v.x[i] = __fmul_rn(v.x[i], factor);
}

// The smallest power of two that is at least max(|x|, 1e-4) / 448. NaN is ignored.
__device__ __forceinline__ float scale_of(const Values& v) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fabsf(v.x[i]));
    for (int mask = 16; mask > 0; mask /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
    largest = fminf(fmaxf(largest, 1e-4f), 3.402823466e38f);
    // 448 is 1.75 times 2^8: a maximum above 1.75 times a power of two takes the next power.
    const uint32_t bits = __float_as_uint(largest);
    return __uint_as_float((bits >> 23) - 8 + ((bits & 0x7fffff) > 0x600000) << 23);
}

__device__ __forceinline__ uint32_t codes_of(const Values& v, float scale) {
    // Exact: the scale is a power of two from 2^-22 to 2^120.
    const float inverse = __uint_as_float((254u << 23) - __float_as_uint(scale));
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        codes |=
            uint32_t(__nv_cvt_float_to_fp8(__fmul_rn(v.x[i], inverse), __NV_SATFINITE, __NV_E4M3))
            << 8 * i;
    return codes;
}

// Rotates and rounds a head's query of a token, and scales the head's weight.
__device__ __forceinline__ void write_query(const MlaIndexQueriesParams& p, Values& v,
                                            int64_t token, int64_t head, int lane) {
    const int64_t row = token * p.heads + head;
    rotate(v, p.rotary, token, lane);
    if (p.hadamard) hadamard(v, lane);
    const float scale = scale_of(v);
    static_cast<uint32_t*>(p.values)[row * (kWidth / 4) + lane] = codes_of(v, scale);
    if (lane == 0) {
        const float weight =
            element(p.head_weights, token * p.head_weight_stride + head, p.head_weights_dtype);
        p.weights[row] = __fmul_rn(weight, __fmul_rn(p.weight_scale, scale));
    }
}

// The work of block `block` on the queries.
__device__ __forceinline__ void write_queries(const MlaIndexQueriesParams& p, uint32_t block) {
    const int lane = threadIdx.x % 32;
    const int64_t row = int64_t(block) * kRows + threadIdx.x / 32;
    if (row >= int64_t(p.tokens) * p.heads) return;
    const int64_t token = row / p.heads, head = row % p.heads;
    Values v;
    v.load(p.queries, token * p.query_token_stride + head * p.query_head_stride, p.queries_dtype,
           lane);
    write_query(p, v, token, head, lane);
}

// The work of block `block` on the keys.
__device__ __forceinline__ void write_keys(const MlaIndexKeysParams& p, uint32_t block) {
    const int lane = threadIdx.x % 32;
    const int64_t token = int64_t(block) * kRows + threadIdx.x / 32;
    if (token >= p.tokens) return;
    Values v;
    v.load(p.keys, token * p.key_stride, p.keys_dtype, lane);
    const int64_t slot = p.slots[token];
    if (slot < 0 || slot >= p.pages * p.page_size) return;
    normalise(v, p, lane);
    rotate(v, p.rotary, token, lane);
    if (p.hadamard) hadamard(v, lane);
    const float scale = scale_of(v);
    const bool narrow = slot <= INT32_MAX;
    const int64_t of = narrow ? int32_t(slot) / p.page_size : slot / p.page_size;
    const int64_t offset = slot - of * p.page_size;
    char* page = static_cast<char*>(p.cache) + of * p.page_stride;
    *reinterpret_cast<uint32_t*>(page + offset * kWidth + lane * 4) = codes_of(v, scale);
    if (lane == 0)
        *reinterpret_cast<float*>(page + int64_t(p.page_size) * kWidth + offset * 4) = scale;
}

}  // namespace mla::sm90::quantise
