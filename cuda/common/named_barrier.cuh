// A named barrier of a CTA: its id in the kernel's enum, and its number of threads.
#pragma once

#include "../ptx/barrier.cuh"
#include "ptx/sm80.cuh"

namespace mla {

template <auto id, int threads>
struct NamedBarrier {
    __device__ static void sync() { ptx::bar_sync(int(id), threads); }
    // Like sync(), but for warps that come from different places in the code.
    __device__ static void sync_unaligned() { ptx::barrier_sync(int(id), threads); }
    // Arrives without waiting.
    __device__ static void arrive() { ptx::bar_arrive(int(id), threads); }
    // Waits; returns true if `own` is true for any of the threads.
    __device__ static bool sync_or(bool own) { return ptx::bar_red_or(int(id), threads, own); }
};

}  // namespace mla
