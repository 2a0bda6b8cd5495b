// Copies of consecutive bytes by the copy engine, without a tensor map.
#pragma once

#include <cstdint>

namespace mla {

// Copies `bytes` bytes of device memory to `destination` and adds them to `bar`: addresses and
// count are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source, uint32_t bytes,
                                          uint32_t bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(destination),
        "l"(source), "r"(bytes), "r"(bar)
        : "memory");
}

}  // namespace mla
