// A named barrier of a CTA: its id in the kernel's enum, and how many threads meet there.
#pragma once

#include "../ptx/barrier.cuh"
#include "ptx/sm80.cuh"

namespace mla {

template <auto id, int threads>
struct NamedBarrier {
    __device__ static void sync() { ptx::bar_sync(int(id), threads); }
    // The same for warps that come from different places in the code.
    __device__ static void meet() { ptx::barrier_sync(int(id), threads); }
    // Arrives without waiting.
    __device__ static void arrive() { ptx::bar_arrive(int(id), threads); }
    // Waits; returns true if `own` is true for any of the threads.
    __device__ static bool any(bool own) { return ptx::bar_red_or(int(id), threads, own); }
};

}  // namespace mla
