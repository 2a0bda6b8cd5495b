// The names that cuda/sm90/prefill still uses for the instructions of cuda/ptx; nothing else does.
#pragma once

#include "../ptx/sm90.cuh"

namespace mla {

__device__ __forceinline__ void tma_load(const CUtensorMap* map, uint32_t destination, uint32_t bar,
                                         int x, int y, int z, int w) {
    ptx::cp_async_bulk_tensor(map, destination, bar, x, y, z, w);
}
__device__ __forceinline__ void tma_prefetch_descriptor(const CUtensorMap* map) {
    ptx::prefetch_tensormap(map);
}
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t source, int x, int y,
                                          int z, int w) {
    ptx::cp_async_bulk_tensor_store(map, source, x, y, z, w);
}
__device__ __forceinline__ void tma_wait_stores_read() { ptx::cp_async_bulk_wait_group_read(); }
__device__ __forceinline__ void tma_wait_stores() { ptx::cp_async_bulk_wait_group(); }

}  // namespace mla
