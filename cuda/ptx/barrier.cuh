// Named barriers for warps that come from different places in the code.
#pragma once

namespace mla::ptx {

// Waits until `threads` threads, including this warp's, have come to barrier `id`. Unlike bar.sync,
// it does not promise that all of them come to the same instruction.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Waits for all threads of the CTA in the same way.
__device__ __forceinline__ void barrier_sync_all() { asm volatile("barrier.sync 0;" ::: "memory"); }

}  // namespace mla::ptx
