// Rotary embedding: pairs of elements are rotated by an angle per position and pair.
#pragma once

#include "../common/octet.cuh"
#include "../include/mla.h"

namespace mla {

// Rows of the tables for one token. They are null for a position outside of the tables, and the
// vectors of such a position become NaN.
struct Angles {
    const float* cos;
    const float* sin;

    __device__ Angles(const MlaCacheWriteParams& p, int64_t token) : cos(nullptr), sin(nullptr) {
        const int64_t position = p.positions[token];
        if (position < 0 || position >= p.positions_len) return;
        cos = p.cos + position * p.table_stride;
        sin = p.sin + position * p.table_stride;
    }
};

// `N` consecutive entries of a table from `first` on.
template <bool Wide, int N>
__device__ __forceinline__ Group<float, N> angle(const float* table, int first, int count) {
    Group<float, N> to;
    if (table) return load<Wide, float, N>(table + first, count);
#pragma unroll
    for (int i = 0; i < N; ++i) to.x[i] = __int_as_float(0x7fffffff);
    return to;
}

// Each product is rounded by itself, without fused multiply-adds, so that any implementation in f32
// gives the same bits.
__device__ __forceinline__ float rotated_first(float a, float b, float cos, float sin) {
    return __fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin));
}

__device__ __forceinline__ float rotated_second(float a, float b, float cos, float sin) {
    return __fadd_rn(__fmul_rn(b, cos), __fmul_rn(a, sin));
}

// Octet `octet` of a rotary vector after the rotation, rounded to its type. `x` is the octet
// itself; partners outside of it are read from `vector`. With Wide and MLA_ROTARY_HALVES, a half
// consists of whole octets.
template <bool Wide, typename T>
__device__ __forceinline__ Octet<T> rotated(const Octet<T>& x, const T* vector, int octet,
                                            const Angles& angles, int style, int rope_dim) {
    const int first = octet * kOctet, half = rope_dim / 2;
    float own[kOctet];
    to_floats(x, own);
    if (style == MLA_ROTARY_INTERLEAVED) {
        constexpr int pairs = kOctet / 2;
        const auto cos = angle<Wide, pairs>(angles.cos, first / 2, half - first / 2);
        const auto sin = angle<Wide, pairs>(angles.sin, first / 2, half - first / 2);
#pragma unroll
        for (int i = 0; i < pairs; ++i) {
            const float a = own[2 * i], b = own[2 * i + 1];
            own[2 * i] = rotated_first(a, b, cos.x[i], sin.x[i]);
            own[2 * i + 1] = rotated_second(a, b, cos.x[i], sin.x[i]);
        }
        return from_floats<T>(own);
    }
    if constexpr (Wide) {
        const bool second = first >= half;
        const int pair = second ? first - half : first;
        float other[kOctet];
        to_floats(load<true>(vector + (second ? first - half : first + half), kOctet), other);
        const auto cos = angle<true, kOctet>(angles.cos, pair, kOctet);
        const auto sin = angle<true, kOctet>(angles.sin, pair, kOctet);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            own[i] = second ? rotated_second(other[i], own[i], cos.x[i], sin.x[i])
                            : rotated_first(own[i], other[i], cos.x[i], sin.x[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            const int e = first + i;
            if (e >= rope_dim) continue;
            const bool second = e >= half;
            const int pair = second ? e - half : e;
            const float other = to_float(vector[second ? pair : pair + half]);
            const float cos = angle<false, 1>(angles.cos, pair, 1).x[0],
                        sin = angle<false, 1>(angles.sin, pair, 1).x[0];
            own[i] = second ? rotated_second(other, own[i], cos, sin)
                            : rotated_first(own[i], other, cos, sin);
        }
    }
    return from_floats<T>(own);
}

// Rotates `N` pairs of one vector of the queries from pair `first` on. The thread owns both sides
// of each pair, so the vector may be rotated in place. Its values are in flight before the
// position, and with it the angles, are known.
template <bool Wide, typename T, int N>
__device__ __forceinline__ void rotate_pairs(const MlaCacheWriteParams& p, int64_t token,
                                             const T* from, T* to, int first) {
    const bool interleaved = p.rotary_style == MLA_ROTARY_INTERLEAVED;
    const int at = interleaved ? 2 * first : first;
    const int beyond = interleaved ? at + N : at + p.rope_dim / 2;
    const auto low_raw = load<Wide, T, N>(from + at, N),
               high_raw = load<Wide, T, N>(from + beyond, N);
    const Angles angles(p, token);
    const auto cos = angle<Wide, N>(angles.cos, first, N);
    const auto sin = angle<Wide, N>(angles.sin, first, N);
    float low[N], high[N];
    to_floats(low_raw, low);
    to_floats(high_raw, high);
    const auto rotate = [&](float& a, float& b, int i) {
        const float x = a, y = b;
        a = rotated_first(x, y, cos.x[i], sin.x[i]);
        b = rotated_second(x, y, cos.x[i], sin.x[i]);
    };
    if (!interleaved || N == 1) {
#pragma unroll
        for (int i = 0; i < N; ++i) rotate(low[i], high[i], i);
    } else {
#pragma unroll
        for (int i = 0; i + 1 < N; i += 2) {
            rotate(low[i], low[i + 1], i / 2);
            rotate(high[i], high[i + 1], (i + N) / 2);
        }
    }
    store<Wide, T, N>(to + at, from_floats<T>(low), N);
    store<Wide, T, N>(to + beyond, from_floats<T>(high), N);
}

}  // namespace mla
