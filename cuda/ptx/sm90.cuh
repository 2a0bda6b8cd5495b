// Instructions that Hopper and Blackwell add to sm80.cuh, under the names that PTX gives them.
// Warpgroup MMAs have a file of their own, wgmma.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "sm80.cuh"
#include "sm89.cuh"

namespace mla::ptx {

// --------------------------------------------------------------------------------------- mbarrier
//
// A barrier in shared memory that counts arrivals and bytes. It is given by its address. A wait
// names the parity of the phase that it waits for. The first phase is 0, so a wait for parity 1 on
// a fresh barrier returns at once.

__device__ __forceinline__ void mbarrier_init(uint32_t bar, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to TMA.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Arrives and announces `bytes` that TMA will deliver in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}\n" ::"r"(bar),
        "r"(parity)
        : "memory");
}

// Arrives when all cp.async copies that this thread has issued have landed. The arrival is one of
// those that the barrier counts.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

// Orders ordinary shared-memory accesses of this thread before later ones by TMA and
// the tensor cores.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// -------------------------------------------------------------------------------------------- TMA

// Copies `bytes` bytes of device memory to `destination` and counts them at `bar`. Addresses and
// `bytes` are multiples of 16.
__device__ __forceinline__ void cp_async_bulk(uint32_t destination, const void* source,
                                              uint32_t bytes, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(destination),
        "l"(source), "r"(bytes), "r"(bar)
        : "memory");
}

// Does the same with an L2 policy.
__device__ __forceinline__ void cp_async_bulk(uint32_t destination, const void* source,
                                              uint32_t bytes, uint32_t bar, CachePolicy policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1], %2, [%3], %4;" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(bar), "l"(policy.bits)
        : "memory");
}

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Assembly of a tensor copy with a policy, or without one if the policy is 0. `rank` is the number
// of dimensions, and `coordinates` are the names of the coordinates.
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

// Copies the box at (x, y, z) to `destination` and counts its bytes at `bar`.
__device__ __forceinline__ void cp_async_bulk_tensor(const CUtensorMap* map, uint32_t destination,
                                                     uint32_t bar, CachePolicy policy, int x, int y,
                                                     int z) {
    asm volatile(MLA_TMA_LOAD_TEXT(3, "%4, %5, %6")::"r"(destination), "l"(map), "r"(bar),
                 "l"(policy.bits), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// Does the same in a tensor of four dimensions.
__device__ __forceinline__ void cp_async_bulk_tensor(const CUtensorMap* map, uint32_t destination,
                                                     uint32_t bar, CachePolicy policy, int x, int y,
                                                     int z, int w) {
    asm volatile(MLA_TMA_LOAD_TEXT(4, "%4, %5, %6, %7")::"r"(destination), "l"(map), "r"(bar),
                 "l"(policy.bits), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

// Does the same in a tensor of five dimensions.
__device__ __forceinline__ void cp_async_bulk_tensor(const CUtensorMap* map, uint32_t destination,
                                                     uint32_t bar, CachePolicy policy, int x, int y,
                                                     int z, int w, int v) {
    asm volatile(MLA_TMA_LOAD_TEXT(5, "%4, %5, %6, %7, %8")::"r"(destination), "l"(map), "r"(bar),
                 "l"(policy.bits), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
                 : "memory");
}

#undef MLA_TMA_LOAD_TEXT

// Copies the box at (x, y, z) to `destination` in each CTA of the cluster whose bit of `ctas` is
// set, and counts its bytes at `bar` there.
__device__ __forceinline__ void cp_async_bulk_tensor_multicast(const CUtensorMap* map,
                                                               uint32_t destination, uint32_t bar,
                                                               uint16_t ctas, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "h"(ctas)
        : "memory");
}

// Prefetches the box at (x, y, z) into L2.
__device__ __forceinline__ void cp_async_bulk_prefetch_tensor(const CUtensorMap* map,
                                                              CachePolicy policy, int x, int y,
                                                              int z) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.3d.L2.global.tile.L2::cache_hint [%0, {%2, %3, %4}], %1;" ::
            "l"(map),
        "l"(policy.bits), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// Does the same in a tensor of four dimensions.
__device__ __forceinline__ void cp_async_bulk_prefetch_tensor(const CUtensorMap* map,
                                                              CachePolicy policy, int x, int y,
                                                              int z, int w) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.4d.L2.global.tile.L2::cache_hint [%0, {%2, %3, %4, %5}], "
        "%1;" ::"l"(map),
        "l"(policy.bits), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// Does the same in a tensor of five dimensions.
__device__ __forceinline__ void cp_async_bulk_prefetch_tensor(const CUtensorMap* map,
                                                              CachePolicy policy, int x, int y,
                                                              int z, int w, int v) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.5d.L2.global.tile.L2::cache_hint [%0, {%2, %3, %4, %5, "
        "%6}], %1;" ::"l"(map),
        "l"(policy.bits), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
        : "memory");
}

// Copies a box of a tensor of four dimensions, without a policy.
__device__ __forceinline__ void cp_async_bulk_tensor(const CUtensorMap* map, uint32_t destination,
                                                     uint32_t bar, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// Stores the box at (x, y, z, w) from `source` to device memory, except for what lies outside of
// the tensor. Earlier writes to `source` have to be ordered by fence_proxy_async().
__device__ __forceinline__ void cp_async_bulk_tensor_store(const CUtensorMap* map, uint32_t source,
                                                           int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], "
        "[%1];" ::"l"(map),
        "r"(source), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until this thread's stores have read their sources.
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until this thread's stores are done.
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// ------------------------------------------------------------------------------ clusters

// Index of this CTA's cluster, and number of clusters, along x. In a launch without clusters, each
// CTA is a cluster.
__device__ __forceinline__ uint32_t clusterid() {
    uint32_t r;
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(r));
    return r;
}
__device__ __forceinline__ uint32_t nclusterid() {
    uint32_t r;
    asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(r));
    return r;
}

// Rank of this CTA in its cluster, and number of the cluster's CTAs.
__device__ __forceinline__ uint32_t cluster_ctarank() {
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ __forceinline__ uint32_t cluster_nctarank() {
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
    return r;
}

// The cluster's barrier, for all of its threads that have not exited. Data written before the
// arrival can be read after the wait.
__device__ __forceinline__ void barrier_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// Arrival of a thread that has written nothing for the others, and so needs no device-wide fence.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

// Address in the shared memory of CTA `rank` that corresponds to `address` in this CTA.
__device__ __forceinline__ uint32_t mapa(uint32_t address, uint32_t rank) {
    uint32_t r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
    return r;
}

// Arrives at a barrier of any CTA of the cluster. This does not make earlier writes of this thread
// visible there, which would take a fence.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Arrives at such a barrier and announces `bytes` that st_async will deliver in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect_tx_cluster(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

// Stores to the shared memory of any CTA of the cluster, and counts the bytes at a barrier there. A
// thread that waits for the barrier sees what was stored.
__device__ __forceinline__ void st_async_u32(uint32_t address, uint32_t v, uint32_t bar) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address),
        "r"(v), "r"(bar)
        : "memory");
}
__device__ __forceinline__ void st_async_v4_u32(uint32_t address, uint4 v, uint32_t bar) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(address),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(bar)
        : "memory");
}
// Stores floats as floats. If accumulators were taken for integers, they would be copied between
// MMAs in flight, and ptxas would serialise these MMAs.
__device__ __forceinline__ void st_async_v4_f32(uint32_t address, float4 v, uint32_t bar) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(address),
        "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar)
        : "memory");
}

__device__ __forceinline__ uint32_t ld_shared_cluster_u32(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ float ld_shared_cluster_f32(uint32_t address) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ float4 ld_shared_cluster_v4_f32(uint32_t address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ uint2 ld_shared_cluster_v2_u32(uint32_t address) {
    uint2 v;
    asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "r"(address)
                 : "memory");
    return v;
}

// ------------------------------------------------------------------------------ matrices of a warp

// Stores four 8x8 matrices of 16-bit values; lane 8 i + j gives the address of row j of matrix i.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(a), "r"(b), "r"(c), "r"(d)
        : "memory");
}

// Stores them with rows and columns exchanged: row j of a matrix in memory is its column j.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t a, uint32_t b,
                                                  uint32_t c, uint32_t d) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(
            address),
        "r"(a), "r"(b), "r"(c), "r"(d)
        : "memory");
}

// ------------------------------------------------------------------- registers and launches

// These change the number of registers that each thread of this warpgroup has.
template <int registers>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Programmatic dependent launch: from here on, the next kernel of the stream may start, if its
// launch allows it. Before sm_90 there is no such thing, and a kernel starts when the previous one
// has ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// For a kernel in such a launch: waits for earlier kernels of the stream. Before this call, the
// kernel may neither read what one of them writes nor write what one of them accesses.
__device__ __forceinline__ void griddepcontrol_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace mla::ptx
