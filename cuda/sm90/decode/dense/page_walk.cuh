// The walk over the KV tiles of this CTA, which finds their pages ahead of the copies.
#pragma once

#include "context.cuh"

namespace mla::sm90::decode {

// Waits until so few copies are in flight that one to this stage may begin.
template <class L, class Control, class PipelineState>
__device__ __forceinline__ void wait_for_copies_in_flight(const Control& s,
                                                          const PipelineState& next) {
    if constexpr (L::kStagesInFlight < L::kLatentStages) {
        const PipelineState before = next.back(L::kStagesInFlight);
        s.latent_full[before.stage].wait(before.phase);
    }
}

// The loop of warp 0 over the KV tiles of all work items, whatever the cache format.
template <class C>
struct PageWalk {
    using L = typename C::L;
    using T = typename C::T;
    static constexpr int N = C::N;

    const Context<C>& c;
    const KernelParams& p = c.p;
    typename C::Control& s = c.s;

    // Calls load(whole, begins, tokens, page, first) once per KV tile, by one lane. If `whole`, the
    // tile's tokens lie together, at page[0] and first[0]. Otherwise they are up to four runs
    // of 16 tokens, each with its page and its first token there. `begins` is true for the work
    // item's first KV tile. This warp knows the first work item without the queue.
    template <typename Load>
    __device__ void for_each_kv_tile(const TileScheduler& scheduler, const WorkItem& first_item,
                                     Load load) const {
        const int lane = threadIdx.x & 31;
        // Tokens that lie together in a page are copied together: a whole KV tile, or 16.
        const int runs = p.run == kTileTokens ? 1 : 4;
        bool copied = c.table_is_small();
        const auto keep = [&](const WorkItem& item) {
            __syncwarp();
            if (lane == 0)
                s.loading = {item.request, item.kv_tile_begin, item.kv_tile_end, item.kv_len};
            __syncwarp();
        };
        if (lane == 0) s.evict_first = scheduler.kv_tiles() <= p.evict_first_kv_tiles;
        keep(first_item);
        PipelineCounter<kQueuedItems> queue;
        const Loading& item = s.loading;
        while (item.request >= 0) {
            const int begin = item.kv_tile_begin, end = item.kv_tile_end;
            // Each lane holds the position of one run: of the current 32 runs, and of the 32 after
            // them.
            const auto position_of_run = [&](int run) {
                const int token = run * p.run, page = c.page_of(token);
                if (token >= item.kv_len) return PagePosition{-1, 0};
                const int64_t entry = item.request * p.block_table_stride + page;
                return PagePosition{copied ? ptx::ld_shared_s32(c.table_copy() + int(entry) * 4)
                                           : p.block_table[entry],
                                    token - page * p.page_size};
            };
            if (copied) s.table_full.wait(0);
            PagePosition current = position_of_run(begin * runs + lane), following = {};
            int run = 0;
#pragma unroll 1
            for (int kv_tile = begin; kv_tile < end; ++kv_tile, run += runs) {
                if (run == 32) {
                    run = 0;
                    current = following;
                }
                int page[4], first[4];
                if (runs == 1) {
                    page[0] = __shfl_sync(~0u, current.page, run);
                    first[0] = __shfl_sync(~0u, current.offset, run);
                    if (lane == 0)
                        load(std::true_type(), kv_tile == begin, kTileTokens, page, first);
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        page[i] = __shfl_sync(~0u, current.page, run + i);
                        first[i] = __shfl_sync(~0u, current.offset, run + i);
                    }
                    const int tokens =
                        min((item.kv_len - kv_tile * kTileTokens + 15) & ~15, kTileTokens);
                    if (lane == 0) load(std::false_type(), kv_tile == begin, tokens, page, first);
                }
                __syncwarp();
                if (run == 0) {
                    // The table's copy is read only after the first copies have been issued. These
                    // go to other stages than the table's copy. Later copies may overwrite it, but
                    // it has been read by then.
                    following = position_of_run(kv_tile * runs + 32 + lane);
                    copied = false;
                    __syncwarp();
                }
            }
            c.release(queue);
            s.item_full[queue.stage()].wait(queue.phase());
            keep(s.items[queue.stage()]);
        }
    }
};

}  // namespace mla::sm90::decode
