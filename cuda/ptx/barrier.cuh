// Named barriers of warps that come from different places in the code.
#pragma once

namespace mla::ptx {

// Waits until `threads` threads, this warp's among them, have come to barrier `id`. Unlike bar.sync,
// it does not promise that all of them come to the same instruction.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, and returns whether `own` is true for any of them.
__device__ __forceinline__ bool barrier_red_or(int id, int threads, bool own) {
    int any;
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.ne.b32 p, %3, 0;\n"
        "barrier.red.or.pred q, %1, %2, p;\n"
        "selp.b32 %0, 1, 0, q;\n"
        "}\n"
        : "=r"(any)
        : "r"(id), "r"(threads), "r"(int(own))
        : "memory");
    return any != 0;
}

}  // namespace mla::ptx
