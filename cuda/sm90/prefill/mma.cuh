// The two matrix products of a tile, for one warpgroup of 64 query rows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cute/arch/mma_sm90.hpp>
#include <cute/tensor.hpp>

#include <utility>

#include "../../common/swizzle.cuh"
#include "../../ptx/sm90.cuh"
#include "../../ptx/wgmma.cuh"
#include "tile.cuh"

namespace mla::sm90::prefill {

namespace detail {

// CUTLASS's names of the element types.
template <typename T>
struct Operand;
template <>
struct Operand<__nv_bfloat16> {
    using Type = cute::bfloat16_t;
};
template <>
struct Operand<__half> {
    using Type = cute::half_t;
};

template <typename Op, int registers, size_t... i>
__device__ __forceinline__ void multiply(float (&d)[registers], uint64_t a, uint64_t b,
                                         bool accumulate, std::index_sequence<i...>) {
    Op::fma(a, b, d[i]..., accumulate ? cute::GMMA::ScaleOut::One : cute::GMMA::ScaleOut::Zero);
}

template <typename Op, int registers, size_t... i>
__device__ __forceinline__ void multiply(float (&d)[registers], const uint32_t (&a)[4], uint64_t b,
                                         bool accumulate, std::index_sequence<i...>) {
    Op::fma(a[0], a[1], a[2], a[3], b, d[i]...,
            accumulate ? cute::GMMA::ScaleOut::One : cute::GMMA::ScaleOut::Zero);
}

// All lanes have the same address. Told so, the compiler keeps the descriptors made of it in
// uniform registers.
__device__ __forceinline__ uint32_t uniform(uint32_t address) {
    return __shfl_sync(~0u, address, 0);
}

}  // namespace detail

// scores = query (64 x P+R) key^T (keys x P+R), both with the summed dimension along their rows.
template <typename Tile>
__device__ __forceinline__ void multiply_query_key(float (&scores)[Tile::kKeys / 2], uint32_t query,
                                                   uint32_t key) {
    using T = typename detail::Operand<typename Tile::Element>::Type;
    using Op = decltype(cute::GMMA::ss_op_selector<
                        T, T, float, cute::Shape<cute::_64, cute::Int<Tile::kKeys>, cute::_16>>());
    // Adding bytes / 16 moves a descriptor's start.
    const uint64_t query_start = ptx::wgmma_descriptor(detail::uniform(query)),
                   key_start = ptx::wgmma_descriptor(detail::uniform(key));
#pragma unroll
    for (int step = 0; step < Tile::kQkSteps; step++) {
        const int panel = step / 4, column = step % 4 * 32;
        detail::multiply<Op>(scores, query_start + (panel * Tile::kQueryPanelBytes + column) / 16,
                             key_start + (panel * Tile::kKeyPanelBytes + column) / 16, step > 0,
                             std::make_index_sequence<Tile::kKeys / 2>());
    }
}

// The same for the 16 rows of one warp, without the warpgroup's others; slower.
template <typename Tile>
__device__ __forceinline__ void multiply_query_key_by_warp(float (&scores)[Tile::kKeys / 2],
                                                           uint32_t query, uint32_t key,
                                                           int thread) {
    const int lane = thread % 32;
    // Lane 8 i + j gives the address of row j of matrix i. Of the queries: rows 0..7 and 8..15 of
    // the first 8 columns, then of the next 8; of the keys: keys 0..7 in the first 8 columns and
    // the next 8, then keys 8..15.
    const int query_row = thread / 32 * 16 + lane % 16, query_chunk = lane / 16;
    const int key_row = lane / 16 * 8 + lane % 8, key_chunk = lane / 8 % 2;
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 2; i++) scores[i] = 0.f;
#pragma unroll 1
    for (int step = 0; step < Tile::kQkSteps; step++) {
        const int panel = step / 4, chunk = step % 4 * 2;
        uint32_t a[4];
        ptx::ldmatrix_x4(a, query + panel * Tile::kQueryPanelBytes +
                                swizzled<128>(query_row, chunk + query_chunk));
#pragma unroll
        for (int i = 0; i < Tile::kKeys / 16; i++) {
            const int row = 16 * i + key_row;
            uint32_t b[4];
            ptx::ldmatrix_x4(
                b, key + panel * Tile::kKeyPanelBytes + swizzled<128>(row, chunk + key_chunk));
            ptx::mma_m16n8k16<typename Tile::Element>(&scores[8 * i], a, b[0], b[1]);
            ptx::mma_m16n8k16<typename Tile::Element>(&scores[8 * i + 4], a, b[2], b[3]);
        }
    }
}

// out += weights (64 x keys, in registers) value (keys x V, the summed dimension across its rows).
template <typename Tile>
__device__ __forceinline__ void multiply_weight_value(float (&out)[Tile::kValue / 2],
                                                      const uint32_t (&weights)[Tile::kKeySteps][4],
                                                      uint32_t value, bool accumulate) {
    using T = typename detail::Operand<typename Tile::Element>::Type;
    using Op = decltype(cute::GMMA::rs_op_selector<
                        T, T, float, cute::Shape<cute::_64, cute::Int<Tile::kValue>, cute::_16>,
                        cute::GMMA::Major::K, cute::GMMA::Major::MN>());
    const uint64_t start = ptx::wgmma_descriptor(detail::uniform(value), Tile::kKeyPanelBytes);
#pragma unroll
    for (int step = 0; step < Tile::kKeySteps; step++) {
        detail::multiply<Op>(out, weights[step], start + step * 16 * kPanel * 2 / 16,
                             accumulate || step > 0, std::make_index_sequence<Tile::kValue / 2>());
    }
}

}  // namespace mla::sm90::prefill
