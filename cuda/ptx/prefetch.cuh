// Bulk prefetches to L2, which sm_90 has.
#pragma once

#include "sm80.cuh"

namespace mla::ptx {

// Prefetches `bytes` bytes into L2 under a policy. The number and the address are multiples of 16.
__device__ __forceinline__ void cp_async_bulk_prefetch(const void* source, uint32_t bytes,
                                                       CachePolicy policy) {
    asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(source),
                 "r"(bytes), "l"(policy.bits)
                 : "memory");
}

}  // namespace mla::ptx
