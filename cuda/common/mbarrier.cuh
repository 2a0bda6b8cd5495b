// The names that cuda/sm90/prefill still uses for the instructions of cuda/ptx; nothing else does.
#pragma once

#include "../ptx/sm90.cuh"

namespace mla {

using ptx::shared_address;
__device__ __forceinline__ void barrier_init(uint32_t bar, uint32_t arrivals) {
    ptx::mbarrier_init(bar, arrivals);
}
__device__ __forceinline__ void fence_barrier_init() { ptx::fence_mbarrier_init(); }
__device__ __forceinline__ void barrier_arrive(uint32_t bar) { ptx::mbarrier_arrive(bar); }
__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes) {
    ptx::mbarrier_arrive_expect_tx(bar, bytes);
}
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
    ptx::mbarrier_wait(bar, parity);
}
__device__ __forceinline__ void fence_async_proxy() { ptx::fence_proxy_async(); }
__device__ __forceinline__ void named_barrier(int id, int threads) { ptx::bar_sync(id, threads); }
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    ptx::bar_arrive(id, threads);
}

}  // namespace mla
