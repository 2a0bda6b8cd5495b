// Dense absorbed MLA decode for Hopper: docs/kernels/decode.md.
//
// A CTA works on up to N query rows of one request. Its warps have roles, each in a file of its
// own:
//
//   warp 0        CacheProducer   copies KV tiles by TMA          {plain,fp8}/cache_producer.cuh
//   warp 1        QueryProducer   copies the query rows           {plain,fp8}/query_producer.cuh
//   warp 2        TileScheduler   publishes the work items        scheduler.cuh
//   warp 3        Prologue        brings in the block table       prologue.cuh
//   warpgroup 1   Scores          S = Q K^T, softmax, P           {plain,fp8}/scores.cuh
//   the last two  Output          O += P V, combines the splits   {plain,fp8}/output.cuh, splits
//
// The Config decides which roles, and which cache format they read (config.cuh).
#pragma once

#include "config.cuh"
#include "prologue.cuh"

namespace mla::sm90::decode {

// The warp of the scores that prefetches queries into L2, while it has nothing else to do. With 16
// rows or fewer, it has no rows of its own.
constexpr int kFetchingWarp = 5;
// The length of all requests in the batch that is planned to warm up. It is several KV tiles, so
// that query tiles have splits.
constexpr int kWarmUpLength = 4096;

template <class C>
__global__ __launch_bounds__(C::kThreads,
                             1) void decode_kernel(const __grid_constant__ KernelParams p,
                                                   const __grid_constant__ TensorMaps maps) {
    using L = typename C::L;
    using StartBarrier = NamedBarrier<BarrierId::start, C::kThreads - 32>;
    extern __shared__ __align__(1024) char shared[];
    auto& s = *reinterpret_cast<typename C::Control*>(shared + L::kControlOffset);
    const Context<C> context{p, ptx::shared_address(shared), s, Context<C>::own_rank(),
                             Context<C>::own_group()};
    typename C::CacheProducer cache_producer{context};
    typename C::QueryProducer query_producer{context};
    const Prologue<C> prologue{context};

    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const bool warms_up = warp == 1;
    TileScheduler scheduler(p, warms_up ? &s.warm_up_length : s.lens, warms_up ? 0 : 1,
                            C::N * context.group_ctas(), context.group_id, context.groups());
    // From here on, CTAs of the stream's next kernel may start wherever a CTA of this one ends.
    // Until the previous kernel has ended, this one touches only shared memory and the launch's own
    // parameters: warps 2 and 3 execute griddepcontrol.wait before StartBarrier, for the whole CTA.
    ptx::griddepcontrol_launch_dependents();
    if (warp == 2) {
        ptx::griddepcontrol_wait();
        prologue.fetch_lengths(lane);
    } else if (warp == 0) {
        if (lane == 0) s.init(p);
    } else if (warp == 1) {
        cache_producer.prefetch_descriptors(maps, lane);
        query_producer.prefetch_descriptors(maps, lane);
        // The warm-up reads cu_q_lens, though it reads no lengths.
        if (p.cu_q_lens) ptx::griddepcontrol_wait();
        if (lane == 0) s.warm_up_length = kWarmUpLength;
        __syncwarp();
    } else if (warp == 3) {
        ptx::griddepcontrol_wait();
        prologue.fetch_table(lane);
    }
    // The warp that warms up begins at once.
    if (!warms_up) StartBarrier::sync();
    if (warp == 0) WarmUpBarrier::arrive();

    // If the even share of the registers is enough, they stay as they are.
    constexpr bool uneven = C::kLoadRegisters != 0;
    const int warpgroup = warp >> 2;
    if (warpgroup == 0) {
        if constexpr (uneven) ptx::setmaxnreg_dec<C::kLoadRegisters>();
        if (warp == 2) prologue.finish_lengths();
        // Warps 0 and 2 plan the work, each for itself. The first copies then need not wait for the
        // queue. Warp 1 would only wait for work items. While the lengths are in flight, it plans a
        // made-up batch instead, because code is slow when it runs for the first time. All three
        // run the same code, since `plan` and `next` are inlined once.
        if (warp != 3) {
            if (!warms_up) s.lengths_full.wait(0);
            scheduler.plan();
            PipelineCounter<kQueuedItems> queue;
            while (true) {
                const WorkItem item = scheduler.next();
                if (warp == 0) {
                    cache_producer.run(maps, scheduler, item);
                    break;
                }
                if (warms_up) {
                    WarmUpBarrier::sync();
                    query_producer.run(maps);
                    break;
                }
                context.publish(queue, item);
                if (!item.is_valid()) break;
            }
        } else {
            const PagePosition first_tile = prologue.finish_table(scheduler);
            if (lane == 0 && first_tile.page >= 0)
                cache_producer.prefetch_kv_tile(maps, first_tile);
        }
    } else if (warpgroup <= C::kScoreGroups) {
        if constexpr (uneven && C::kScoreRegisters > even_registers(C::kThreads))
            ptx::setmaxnreg_inc<C::kScoreRegisters>();
        else if constexpr (uneven)
            ptx::setmaxnreg_dec<C::kScoreRegisters>();
        if (warp == kFetchingWarp) prologue.prefetch_queries(lane);
        typename C::Scores{context}.run();
    } else {
        if constexpr (uneven) ptx::setmaxnreg_inc<C::kOutputRegisters>();
        typename C::Output{context}.run();
    }
}

}  // namespace mla::sm90::decode
