// The two GEMMs of a KV tile, for one warpgroup of 64 query rows.
#pragma once

#include <cstdint>

#include "../../common/swizzle.cuh"
#include "../../ptx/sm90.cuh"
#include "../../ptx/wgmma.cuh"
#include "config.cuh"

namespace mla::sm90::prefill {

// Returns an address that is the same in all lanes. The shuffle tells the compiler so. The compiler
// then keeps the descriptors made from the address in uniform registers.
__device__ __forceinline__ uint32_t warp_uniform(uint32_t address) {
    return __shfl_sync(~0u, address, 0);
}

// scores = query (64 x P+R) key^T (keys x P+R), both K-major.
template <typename Config>
__device__ __forceinline__ void multiply_query_key(float (&scores)[Config::kKeys / 2],
                                                   uint32_t query, uint32_t key) {
    using Mma = ptx::Wgmma<typename Config::Element, Config::kKeys, ptx::Major::K>;
    // The start address of a descriptor is in units of 16 bytes.
    const uint64_t query_start = ptx::wgmma_descriptor(warp_uniform(query)),
                   key_start = ptx::wgmma_descriptor(warp_uniform(key));
#pragma unroll
    for (int step = 0; step < Config::kQkSteps; step++) {
        const int panel = step / 4, column = step % 4 * 32;
        Mma::run(scores, query_start + (panel * Config::kQueryPanelBytes + column) / 16,
                 key_start + (panel * Config::kKeyPanelBytes + column) / 16, step > 0);
    }
}

// Computes the scores of the 16 rows of one warp, without the warpgroup's other warps. This is
// slower.
template <typename Config>
__device__ __forceinline__ void multiply_query_key_by_warp(float (&scores)[Config::kKeys / 2],
                                                           uint32_t query, uint32_t key,
                                                           int thread) {
    const int lane = thread % 32;
    // Lane 8 i + j gives the address of row j of matrix i. Queries: rows 0..7 and 8..15 of the
    // first 8 columns, then of the next 8. Keys: keys 0..7 in the first 8 columns and the next 8,
    // then keys 8..15.
    const int query_row = thread / 32 * 16 + lane % 16, query_chunk = lane / 16;
    const int key_row = lane / 16 * 8 + lane % 8, key_chunk = lane / 8 % 2;
#pragma unroll
    for (int i = 0; i < Config::kKeys / 2; i++) scores[i] = 0.f;
#pragma unroll 1
    for (int step = 0; step < Config::kQkSteps; step++) {
        const int panel = step / 4, chunk = step % 4 * 2;
        uint32_t a[4];
        ptx::ldmatrix_x4(a, query + panel * Config::kQueryPanelBytes +
                                swizzled<128>(query_row, chunk + query_chunk));
#pragma unroll
        for (int i = 0; i < Config::kKeys / 16; i++) {
            const int row = 16 * i + key_row;
            uint32_t b[4];
            ptx::ldmatrix_x4(
                b, key + panel * Config::kKeyPanelBytes + swizzled<128>(row, chunk + key_chunk));
            ptx::mma_m16n8k16<typename Config::Element>(&scores[8 * i], a, b[0], b[1]);
            ptx::mma_m16n8k16<typename Config::Element>(&scores[8 * i + 4], a, b[2], b[3]);
        }
    }
}

// out += weights (64 x keys, in registers) value (keys x V, MN-major).
template <typename Config>
__device__ __forceinline__ void multiply_weight_value(
    float (&out)[Config::kValue / 2], const uint32_t (&weights)[Config::kKeySteps][4],
    uint32_t value, bool accumulate) {
    using Mma = ptx::WgmmaFromRegisters<typename Config::Element, Config::kValue, ptx::Major::M>;
    const uint64_t start = ptx::wgmma_descriptor(warp_uniform(value), Config::kKeyPanelBytes);
#pragma unroll
    for (int step = 0; step < Config::kKeySteps; step++) {
        Mma::run(out, weights[step], start + step * 16 * kPanel * 2 / 16, accumulate || step > 0);
    }
}

}  // namespace mla::sm90::prefill
