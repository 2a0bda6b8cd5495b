// Eight consecutive elements of a row, which one thread moves at a time: 16 bytes of a 16-bit type.
//
// With Wide, a row consists of whole octets. Each octet is aligned to its size (at most to 16
// bytes), and moved in one or two accesses. Without Wide, elements move one by one, and the last
// octet of a row may have fewer.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace mla {

constexpr int kOctet = 8;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
    return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

template <typename T, int N = kOctet>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Group {
    T x[N];
};

template <typename T>
using Octet = Group<T>;

// The unit of an access: an octet of one-byte elements has only eight bytes.
template <int Bytes>
struct Unit {
    using type = uint4;
};
template <>
struct Unit<8> {
    using type = uint2;
};
template <>
struct Unit<4> {
    using type = uint32_t;
};

// Loads a group. `count` is the number of elements left in the row.
template <bool Wide, typename T, int N = kOctet>
__device__ __forceinline__ Group<T, N> load(const T* from, int count) {
    Group<T, N> to;
    if constexpr (Wide) {
        using U = typename Unit<sizeof(to)>::type;
#pragma unroll
        for (int i = 0; i < int(sizeof(to) / sizeof(U)); ++i)
            reinterpret_cast<U*>(&to)[i] = reinterpret_cast<const U*>(from)[i];
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) to.x[i] = i < count ? from[i] : T(0.f);
    }
    return to;
}

template <bool Wide, typename T, int N = kOctet>
__device__ __forceinline__ void store(T* to, const Group<T, N>& from, int count) {
    if constexpr (Wide) {
        using U = typename Unit<sizeof(from)>::type;
#pragma unroll
        for (int i = 0; i < int(sizeof(from) / sizeof(U)); ++i)
            reinterpret_cast<U*>(to)[i] = reinterpret_cast<const U*>(&from)[i];
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (i < count) to[i] = from.x[i];
    }
}

// Converts all elements to floats. 16-bit types are unpacked a word at a time. Otherwise, each
// element would occupy a register.
template <typename T, int N>
__device__ __forceinline__ void to_floats(const Group<T, N>& from, float (&to)[N]) {
    if constexpr (sizeof(T) == 4 || N % 2) {
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] = to_float(from.x[i]);
    } else {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(&from);
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            if constexpr (std::is_same_v<T, __nv_bfloat16>) {
                to[2 * i] = __uint_as_float(words[i] << 16);
                to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000);
            } else {
                const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
                to[2 * i] = pair.x;
                to[2 * i + 1] = pair.y;
            }
        }
    }
}

// Rounds floats to elements.
template <typename T, int N>
__device__ __forceinline__ Group<T, N> from_floats(const float (&from)[N]) {
    Group<T, N> to;
    if constexpr (sizeof(T) == 4 || N % 2) {
#pragma unroll
        for (int i = 0; i < N; ++i) to.x[i] = from_float<T>(from[i]);
    } else {
        uint32_t* words = reinterpret_cast<uint32_t*>(&to);
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            if constexpr (std::is_same_v<T, __nv_bfloat16>) {
                const __nv_bfloat162 pair = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
                words[i] = reinterpret_cast<const uint32_t&>(pair);
            } else {
                const __half2 pair = __floats2half2_rn(from[2 * i], from[2 * i + 1]);
                words[i] = reinterpret_cast<const uint32_t&>(pair);
            }
        }
    }
    return to;
}

// Converts an octet. If both types are the same, all bits stay as they are.
template <typename To, typename From>
__device__ __forceinline__ Octet<To> convert(const Octet<From>& from) {
    if constexpr (std::is_same_v<To, From>) {
        return from;
    } else {
        float x[kOctet];
        to_floats(from, x);
        return from_floats<To>(x);
    }
}

}  // namespace mla
