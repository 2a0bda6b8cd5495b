// Sums the output over the KV tiles of each work item, and writes it, or its partial result.
#pragma once

#include "../splits.cuh"
#include "held_queries.cuh"

namespace mla::sm90::decode {

// Two warpgroups, with 256 latent values each.
template <class C>
struct PlainOutput {
    using Sums = typename C::Sums;
    using L = typename C::L;
    using T = typename C::T;
    static constexpr int N = C::N;

    const Context<C>& c;
    const KernelParams& p = c.p;
    typename C::Control& s = c.s;

    using LatentState = typename C::LatentState;
    using RopeState = typename C::RopeState;

    __device__ void run() {
        const int thread = threadIdx.x - 256, group = __shfl_sync(~0u, thread >> 7, 0),
                  lane = thread & 31;
        Splits<C> splits{c};
        LatentState latent;
        RopeState rope, scored;
        PipelineCounter<kQueuedItems> queue;
        for (const WorkItem* next; (next = c.acquire(queue)); c.release(queue)) {
            const WorkItem& item = *next;
            const int begin = item.kv_tile_begin, end = item.kv_tile_end;
            Sums sums;
            sums.clear();
            if (begin < end) HeldQueries<C>::skip(latent, rope);
            // Waits until the score MMAs of the first KV tile have been issued. Those of later KV
            // tiles are waited for below, each before its tile.
            if (C::kByRows && begin < end) s.scores_issued[scored.stage].wait(scored.phase);
#pragma unroll 1
            for (int kv_tile = begin; kv_tile < end; ++kv_tile) {
                s.scores_full[scored.stage].wait(scored.phase);
                const int4 any = s.any_factor[scored.stage];
                if (kv_tile > begin) sums.rescale(s.factor[scored.stage], any, thread);
                const uint32_t probabilities = c.rope_stage(rope.warp_uniform().stage);
                // The panels of a stage alternate between both groups.
                LatentState tile = latent.warp_uniform(), done = tile;
                const auto finish_step = [&](auto pending) {
                    ptx::wgmma_wait_group<pending.value>();
#pragma unroll
                    for (int i = 0; i < C::kStepStages; ++i)
                        free_stage(s.latent_empty[done.stage + i], lane);
                    done.advance(C::kStepStages);
                };
#pragma unroll
                for (int step = 0; step < Sums::kSteps; ++step) {
                    if (C::kByRows && step == Sums::kSteps - 1) {
                        // The last step runs during the next KV tile's softmax.
                        finish_step(std::integral_constant<int, 0>());
                        RopeState next = scored;
                        next.advance(1);
                        // The first KV tile of the next work item is waited for at the start of
                        // that item. This wait cannot miss its phase: the barrier's use after that
                        // needs the rope stage of the same KV tile, which is released behind the
                        // wait.
                        if (kv_tile + 1 < end) s.scores_issued[next.stage].wait(next.phase);
                    }
#pragma unroll
                    for (int i = 0; i < C::kStepStages; ++i)
                        s.latent_full[tile.stage + i].wait(tile.phase);
                    ptx::wgmma_fence();
                    sums.add(step, probabilities, c.latent_stage(tile.stage) + group * kPanelBytes);
                    ptx::wgmma_commit_group();
                    tile.advance(C::kStepStages);
                }
                if constexpr (Sums::kSteps == 4) {
                    finish_step(std::integral_constant<int, 3>());
                    finish_step(std::integral_constant<int, 2>());
                }
                if constexpr (C::kByRows) {
                    // The first half is complete. It is written while the second one is summed.
                    if (kv_tile + 1 == end && item.splits == 1) {
                        s.stats_full.wait(queue.count & 1);
                        sums.write_half(0, c.output_rows(item), s.inverse, thread);
                    }
                } else {
                    finish_step(std::integral_constant<int, 1>());
                }
                finish_step(std::integral_constant<int, 0>());
                free_stage(s.rope_empty[rope.stage], lane);
                latent.advance(C::kKvTileStages);
                rope.advance(1);
                scored.advance(1);
            }
            s.stats_full.wait(queue.count & 1);
            if (item.splits == 1) {
                if constexpr (C::kByRows) {
                    if (begin == end) sums.write_half(0, c.output_rows(item), s.inverse, thread);
                    sums.write_half(1, c.output_rows(item), s.inverse, thread);
                } else {
                    sums.write(c.output_rows(item), s.inverse, thread);
                }
                s.stats_empty.arrive();
            } else {
                splits.store(item, sums, thread);
            }
        }
        splits.combine(queue, thread);
    }
};

}  // namespace mla::sm90::decode
