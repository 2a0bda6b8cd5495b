// Tensor copies between device memory and shared memory by the copy engine (TMA).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "instructions.cuh"

namespace mla {

__device__ __forceinline__ void tma_prefetch_descriptor(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The text of a copy with a policy or without: the number of dimensions, and the names of the
// coordinates.
#define MLA_TMA_LOAD_TEXT(rank, coordinates)                                              \
    "{\n"                                                                                 \
    ".reg .pred named;\n"                                                                 \
    "setp.ne.b64 named, %3, 0;\n"                                                         \
    "@named cp.async.bulk.tensor." #rank                                                  \
    "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "    \
    "[%1, {" coordinates                                                                  \
    "}], [%2], %3;\n"                                                                     \
    "@!named cp.async.bulk.tensor." #rank                                                 \
    "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {" coordinates \
    "}], [%2];\n"                                                                         \
    "}\n"

// Copies the box at (x, y, z) to `destination` and adds its bytes to `bar`.
__device__ __forceinline__ void tma_load(const CUtensorMap* map, uint32_t destination, uint32_t bar,
                                         L2Policy policy, int x, int y, int z) {
    asm volatile(MLA_TMA_LOAD_TEXT(3, "%4, %5, %6")::"r"(destination), "l"(map), "r"(bar),
                 "l"(policy.bits), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// As above, in a tensor of four dimensions.
__device__ __forceinline__ void tma_load(const CUtensorMap* map, uint32_t destination, uint32_t bar,
                                         L2Policy policy, int x, int y, int z, int w) {
    asm volatile(MLA_TMA_LOAD_TEXT(4, "%4, %5, %6, %7")::"r"(destination), "l"(map), "r"(bar),
                 "l"(policy.bits), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

// As above, of five.
__device__ __forceinline__ void tma_load(const CUtensorMap* map, uint32_t destination, uint32_t bar,
                                         L2Policy policy, int x, int y, int z, int w, int v) {
    asm volatile(MLA_TMA_LOAD_TEXT(5, "%4, %5, %6, %7, %8")::"r"(destination), "l"(map), "r"(bar),
                 "l"(policy.bits), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
                 : "memory");
}

#undef MLA_TMA_LOAD_TEXT

// Brings the box at (x, y, z) into L2.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map, L2Policy policy, int x, int y,
                                             int z) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.3d.L2.global.tile.L2::cache_hint [%0, {%2, %3, %4}], %1;" ::
            "l"(map),
        "l"(policy.bits), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// As above, in a tensor of four dimensions.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map, L2Policy policy, int x, int y,
                                             int z, int w) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.4d.L2.global.tile.L2::cache_hint [%0, {%2, %3, %4, %5}], "
        "%1;" ::"l"(map),
        "l"(policy.bits), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// As above, of five.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map, L2Policy policy, int x, int y,
                                             int z, int w, int v) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.5d.L2.global.tile.L2::cache_hint [%0, {%2, %3, %4, %5, "
        "%6}], %1;" ::"l"(map),
        "l"(policy.bits), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
        : "memory");
}

// In a tensor of four dimensions, without a policy.
__device__ __forceinline__ void tma_load(const CUtensorMap* map, uint32_t destination, uint32_t bar,
                                         int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// Copies the box at (x, y, z, w) from `source` to device memory, all but what lies outside of the
// tensor. What was written to `source` before has to be ordered by fence_async_proxy().
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t source, int x, int y,
                                          int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], "
        "[%1];" ::"l"(map),
        "r"(source), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until this thread's stores have read what they copy.
__device__ __forceinline__ void tma_wait_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until this thread's stores are done.
__device__ __forceinline__ void tma_wait_stores() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace mla
