// Expanded attention of query rows to keys and values per head, on sm_90a.
//
// There is one persistent CTA per SM, with three warpgroups. In the first one, two producer threads
// load tiles with TMA, and the scheduler warp finds the next tile. The other two warpgroups are
// consumers of 64 query rows each. Their pipelines do not drain between tiles. A consumer has the
// upper rows of one tile and the lower rows of the next, since under causal masking the upper ones
// have less to do. The drawing shows tile a, which has three KV tiles, and the beginning of tile b.
// K, V and Q are loads, S are scores, and O are outputs:
//
//     scheduler        claims b ...                     claims c ...
//     producers    Ka2 Ka1 Va2 Ka0 Va1 Va0 | Kb2 Kb1 Vb2 ...
//                  Qa                      | Qb
//     consumer 0   Sa2 |  Sa1, softmax a2  |  Sa0, Oa2, softmax a1  |  Sb2, Oa1, softmax a0  |  ...
//     consumer 1      the same, half a step later
//
// In each step, a consumer enqueues the scores of a KV tile and the output of the previous one. It
// computes the softmax of the scores while the tensor cores work on that output and on the other
// consumer's MMAs. Named barriers let one consumer enqueue its MMAs while the other computes
// exponentials. KV tiles are taken from the last to the first, so those that need a mask come
// first. In the first of them, a warp leaves out the chunks that none of its rows sees. A tile's
// output is stored through shared memory, after the second scores of the next tile.
//
// The mbarriers have one phase for each use of the data that they guard:
//
//     query_full[c], query_empty[c]    the rows of consumer c, upper or lower; released after the
//                                      tile's last scores
//     key_full[s], key_empty[s]        a stage of keys; released after the scores, or after their
//                                      softmax if it may need the keys again
//     value_full[s], value_empty[s]    a stage of values; released after the output
//     work_full[i], work_empty[i]      a tile's description; released after its last weights
//     expected                         the description of the tile that this CTA takes first if the
//                                      host is right; one phase
//     work_wanted                      lets the scheduler claim the next tile, near the end of the
//                                      last one published
//
// Each warp of a consumer releases for itself, and only stages that it has waited for itself. If a
// barrier advanced before a warp had waited for it, the warp would miss a phase. The parity that it
// then waits for might never come.
#pragma once

#include <cuda_runtime.h>

#include "../../ptx/sm90.cuh"
#include "config.cuh"
#include "consumer.cuh"
#include "params.cuh"
#include "producer.cuh"
#include "scheduler_warp.cuh"

namespace mla::sm90::prefill {

template <typename Config>
__device__ __forceinline__ void initialize(Shared<Config>& shared) {
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
    for (int stage = 0; stage < kWorkStages; stage++) {
        ptx::mbarrier_init(ptx::shared_address(&shared.work_full[stage]), 1);
        ptx::mbarrier_init(ptx::shared_address(&shared.work_empty[stage]), 4 * kConsumers + 2);
    }
    ptx::mbarrier_init(ptx::shared_address(&shared.work_wanted), 1);
    ptx::mbarrier_init(ptx::shared_address(&shared.expected), 1);
    ptx::mbarrier_init(ptx::shared_address(&shared.idle), 1);
    ptx::fence_mbarrier_init();
}

template <typename Config>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_kernel(const __grid_constant__ KernelParams p, const __grid_constant__ Maps maps) {
    extern __shared__ uint8_t memory[];
    // The 128-byte swizzle of panels is relative to addresses that are multiples of 1024 bytes.
    auto& shared = *reinterpret_cast<Shared<Config>*>((reinterpret_cast<uintptr_t>(memory) + 1023) &
                                                      ~uintptr_t(1023));
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == 0) {
        ptx::setmaxnreg_dec<Config::kProducerRegisters>();
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        // The scheduler finds the first tile while the other warps get ready to wait for it.
        if (warp == kSchedulerWarp) return SchedulerWarp<Config>{p, shared, lane}.run();
        const Producer<Config> producer{p, maps, shared};
        if (lane == 0) {
            if (warp == kSetupWarp) initialize(shared);
            if (warp == kKeyWarp) producer.prefetch({&maps.key, &maps.key_rope, &maps.value});
            if (warp == kQueryWarp) producer.prefetch({&maps.query, &maps.query_rope, &maps.out});
        }
        __syncwarp();
        if (warp == kSetupWarp) SetupBarrier::arrive();
        StartBarrier::sync_unaligned();
        if (warp == kKeyWarp && lane == 0) producer.load_keys_and_values();
        if (warp == kQueryWarp && lane == 0) producer.load_queries();
    } else {
        StartBarrier::sync_unaligned();
        ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
        Consumer<Config>{p, maps, shared, warpgroup - 1, int(threadIdx.x % 128)}.run();
    }
}

}  // namespace mla::sm90::prefill
