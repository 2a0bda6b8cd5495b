// Expanded attention of query rows to keys and values per head, on sm_90a.
//
// One persistent CTA per SM, three warpgroups. Of the first, two threads bring tiles
// with TMA and one warp works out which tile comes next; the other two warpgroups
// compute, 64 query rows each, and go on from tile to tile without a stop. Each has the upper rows
// of one tile and the lower ones of the next, since where keys are hidden the upper ones have less
// to do (tile a of three KV tiles, then b):
//
//     scheduler        claims b ...                     claims c ...
//     producers    Ka2 Ka1 Va2 Ka0 Va1 Va0 | Kb2 Kb1 Vb2 ...
//                  Qa                      | Qb
//     consumer 0   Sa2 |  Sa1, softmax a2  |  Sa0, Oa2, softmax a1  |  Sb2, Oa1, softmax a0  |  ...
//     consumer 1      the same, half a step later
//
// that is, in each step: enqueue the scores of a KV tile and the output of the one before;
// then, while the tensor cores work on the output and on the other consumer's MMAs, the softmax
// of the scores. Between the two consumers, named barriers let one enqueue its MMAs while the
// other computes exponentials. KV tiles are taken from the last to the first, so that the ones
// that need a mask come first; of the first of them a warp leaves out what none of its rows sees. A
// tile's output is stored behind the second scores of the next tile, through shared memory.
//
// What waits for what, each barrier with one phase per use of what it guards:
//
//     query_full[c], query_empty[c]    the rows of consumer c, upper or lower; given back after the
//                                      tile's last scores
//     key_full[s], key_empty[s]        given back after the scores, or after their softmax where it
//                                      may need them again
//     value_full[s], value_empty[s]    given back after the output
//     work_full[i], work_empty[i]      a tile's description; given back after its last weights
//     expected                         the description of the tile that this CTA takes first if the
//                                      host is right; once
//     work_wanted                      lets the scheduler claim the next tile, when the end of the
//                                      last one announced comes near
//
// Each warp of a consumer gives back for itself, and only what it has waited for itself: a barrier
// that goes on while a warp has yet to wait for it is a phase missed, and the parity that the warp
// then waits for may never come.
#pragma once

#include <cuda_runtime.h>

#include "../../ptx/sm90.cuh"
#include "consumer.cuh"
#include "params.cuh"
#include "producer.cuh"
#include "scheduler.cuh"
#include "tile.cuh"

namespace mla::sm90::prefill {

template <typename Tile>
__device__ __forceinline__ void initialize(Shared<Tile>& shared) {
    for (int consumer = 0; consumer < kConsumers; consumer++) {
        ptx::mbarrier_init(ptx::shared_address(&shared.query_full[consumer]), 1);
        ptx::mbarrier_init(ptx::shared_address(&shared.query_empty[consumer]), 4);
    }
    for (int stage = 0; stage < kStages; stage++) {
        ptx::mbarrier_init(ptx::shared_address(&shared.key_full[stage]), 1);
        ptx::mbarrier_init(ptx::shared_address(&shared.key_empty[stage]), 4 * kConsumers);
        ptx::mbarrier_init(ptx::shared_address(&shared.value_full[stage]), 1);
        ptx::mbarrier_init(ptx::shared_address(&shared.value_empty[stage]), 4 * kConsumers);
    }
    for (int slot = 0; slot < kAnnounced; slot++) {
        ptx::mbarrier_init(ptx::shared_address(&shared.work_full[slot]), 1);
        ptx::mbarrier_init(ptx::shared_address(&shared.work_empty[slot]), 4 * kConsumers + 2);
    }
    ptx::mbarrier_init(ptx::shared_address(&shared.work_wanted), 1);
    ptx::mbarrier_init(ptx::shared_address(&shared.expected), 1);
    ptx::mbarrier_init(ptx::shared_address(&shared.idle), 1);
    ptx::fence_mbarrier_init();
}

template <typename Tile>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_kernel(const __grid_constant__ KernelParams p, const __grid_constant__ Maps maps) {
    extern __shared__ uint8_t memory[];
    // The panels' swizzle counts from multiples of 1024 bytes.
    auto& shared = *reinterpret_cast<Shared<Tile>*>((reinterpret_cast<uintptr_t>(memory) + 1023) &
                                                    ~uintptr_t(1023));
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == 0) {
        ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        // It works out what to bring first while the others go as far as to wait for that.
        if (warp == kSchedulerWarp) return Scheduler<Tile>{p, shared, lane}.run();
        const Producer<Tile> producer{p, maps, shared};
        if (lane == 0) {
            if (warp == kSetupWarp) initialize(shared);
            if (warp == kKeyWarp) producer.prefetch({&maps.key, &maps.key_rope, &maps.value});
            if (warp == kQueryWarp) producer.prefetch({&maps.query, &maps.query_rope, &maps.out});
        }
        __syncwarp();
        if (warp == kSetupWarp) SetupBarrier::arrive();
        StartBarrier::meet();
        if (warp == kKeyWarp && lane == 0) producer.bring_keys_and_values();
        if (warp == kQueryWarp && lane == 0) producer.bring_queries();
    } else {
        StartBarrier::meet();
        ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
        Consumer<Tile>{p, maps, shared, warpgroup - 1, int(threadIdx.x % 128)}.run();
    }
}

}  // namespace mla::sm90::prefill
