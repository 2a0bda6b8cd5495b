// Eight consecutive elements of a row: what one thread moves at a time, 16 bytes of a 16-bit type.
//
// With Wide, a row is whole octets and every octet is aligned to its size (16 bytes at most): one or two accesses.
// Without, elements move one by one, and the last octet of a row may have fewer.
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
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

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

// `count` is how many elements are left in the row.
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

// An exact conversion where the types are the same, bits and all.
template <typename To, typename From>
__device__ __forceinline__ Octet<To> convert(const Octet<From>& from) {
    Octet<To> to;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
        if constexpr (std::is_same_v<To, From>)
            to.x[i] = from.x[i];
        else
            to.x[i] = from_float<To>(to_float(from.x[i]));
    }
    return to;
}

}  // namespace mla
