// Shared-memory barriers that count arrivals and bytes ("mbarrier"), and the fences that go with
// them.
//
// A barrier is named by its 32-bit shared-memory address. A wait names the parity of the phase it
// waits for: the first phase is 0, and a wait for parity 1 on a fresh barrier returns at once.
#pragma once

#include <cstdint>

namespace mla {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint32_t bar, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Arrives and announces `bytes` that the copy engine will deliver in this phase.
__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
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

// Orders ordinary shared-memory accesses of this thread before later ones by the copy engine and
// the tensor cores.
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Adds to a counter in device memory and returns what it was, ordering this thread's earlier
// writes, and those that barriers order before them, before later reads of any thread that sees the
// sum.
__device__ __forceinline__ int atomic_add(int* counter, int n) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(n)
                 : "memory");
    return before;
}

// Adds to a counter in device memory, after this thread's earlier writes and those that barriers
// order before them.
__device__ __forceinline__ void add_release(int* counter, int n) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(n) : "memory");
}

// Adds one, without any order.
__device__ __forceinline__ int atomic_increment_relaxed(int* counter) {
    int before;
    asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    return before;
}

__device__ __forceinline__ int load_acquire(const int* address) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// A barrier among `threads` threads of the block; id 0 is __syncthreads'.
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts this warp in at such a barrier, and does not wait for the others.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A barrier among `threads` threads; whether any of them says so.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool own) {
    int any;
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.ne.b32 p, %3, 0;\n"
        "bar.red.or.pred q, %1, %2, p;\n"
        "selp.b32 %0, 1, 0, q;\n"
        "}\n"
        : "=r"(any)
        : "r"(id), "r"(threads), "r"(int(own))
        : "memory");
    return any;
}

}  // namespace mla
