// Copies KV tiles of bf16 or f16 by TMA, as stages become free.
#pragma once

#include "../page_walk.cuh"
#include "held_queries.cuh"

namespace mla::sm90::decode {

// Warp 0.
template <class C>
struct PlainCacheProducer {
    using L = typename C::L;
    using T = typename C::T;
    static constexpr int N = C::N;

    const Context<C>& c;
    const KernelParams& p = c.p;
    typename C::Control& s = c.s;

    using LatentState = typename C::LatentState;
    using RopeState = typename C::RopeState;

    __device__ void prefetch_descriptors(const TensorMaps& maps, int lane) const {
        if (lane == 0) ptx::prefetch_tensormap(&maps.cache);
        if (lane == 3) ptx::prefetch_tensormap(&maps.cache_pairs);
        if (C::Dims::kRope > 0 && lane == 4) ptx::prefetch_tensormap(&maps.cache_rope);
    }

    // Prefetches four latent panels of a KV tile into L2. The first copies come when the work has
    // been planned, and the memory is idle until then. Prefetching more at once is slower.
    __device__ void prefetch_kv_tile(const TensorMaps& maps, PagePosition kv_tile) const {
        const ptx::CachePolicy policy = ptx::createpolicy_evict_first();
#pragma unroll 1
        for (int i = c.rank; i < 4 / L::kStagePanels; i += c.group_ctas())
            ptx::cp_async_bulk_prefetch_tensor(&maps.cache_pairs, policy, 0, kv_tile.offset, 0,
                                               i * L::kStagePanels / 2, kv_tile.page);
    }

    __device__ void run(const TensorMaps& maps, const TileScheduler& scheduler,
                        const WorkItem& first_item) const {
        LatentState latent;
        RopeState rope;
        uint32_t held = 0;
        PageWalk<C>{c}.for_each_kv_tile(
            scheduler, first_item,
            [&](auto whole, bool begins, int tokens, const int (&page)[4], const int (&first)[4]) {
                if (begins) make_room_for_held(latent, rope, held++);
                load_kv_tile<whole.value>(maps, latent, rope, tokens, page, first);
            });
    }

  private:
    // Copies the panels of a KV tile as stages become free. They are copied whole, or run by run
    // from up to four pages.
    template <bool whole>
    __device__ __forceinline__ void load_kv_tile(const TensorMaps& maps, LatentState& latent,
                                                 RopeState& rope, int tokens, const int (&page)[4],
                                                 const int (&first)[4]) const {
        const ptx::CachePolicy policy = c.cache_policy();
        const auto load_panel = [&](const CUtensorMap* map, uint32_t full, uint32_t stage, int x) {
            if (whole) {
                ptx::cp_async_bulk_tensor(map, stage, full, policy, x, first[0], page[0]);
            } else {
#pragma unroll 1
                for (int i = 0; i * 16 < tokens; ++i) {
                    const int f = i == 0   ? first[0]
                                  : i == 1 ? first[1]
                                  : i == 2 ? first[2]
                                           : first[3];
                    const int z = i == 0 ? page[0] : i == 1 ? page[1] : i == 2 ? page[2] : page[3];
                    ptx::cp_async_bulk_tensor(map, stage + i * 2048, full, policy, x, f, z);
                }
            }
        };
#pragma unroll 1
        for (int i = 0; i < C::Dims::kLatentPanels; i += L::kStagePanels) {
            const uint32_t full = s.latent_full[latent.stage].address(),
                           stage = c.latent_stage(latent.stage);
            s.latent_empty[latent.stage].wait(latent.phase ^ 1);
            wait_for_copies_in_flight<L>(s, latent);
            ptx::mbarrier_arrive_expect_tx(full, tokens * 128 * L::kStagePanels);
            if (whole) {
                ptx::cp_async_bulk_tensor(&maps.cache_pairs, stage, full, policy, 0, first[0], 0,
                                          i / 2, page[0]);
            } else {
#pragma unroll 1
                for (int j = 0; j < L::kStagePanels; ++j)
                    load_panel(&maps.cache, full, stage + j * kPanelBytes, (i + j) * 64);
            }
            latent.advance(1);
        }
        if constexpr (C::Dims::kRope == 0) return;
        s.rope_empty[rope.stage].wait(rope.phase ^ 1);
        s.rope_full[rope.stage].expect(tokens * 128);
        load_panel(&maps.cache_rope, s.rope_full[rope.stage].address(), c.rope_stage(rope.stage),
                   0);
        rope.advance(1);
    }

    // Called by the thread that fills the rings, before the KV tiles of a work item. A wait tells a
    // phase from the next one, but not from the one after that. This thread therefore waits for
    // every use of a stage, as no other thread does. For the same reason, it waits until the
    // queries of the previous work item have been taken.
    __device__ void make_room_for_held(LatentState& latent, RopeState& rope, uint32_t held) const {
        if constexpr (C::kHeldPanels > 0) {
            // The first held queries go to stages that are free from the start, so their copy does
            // not wait for this thread. This thread must not wait for these stages either. If the
            // queries have been taken already, the stages' barriers are a phase further, and a wait
            // would not end.
            if (held > 0) {
                s.held_query_taken.wait((held & 1) ^ 1);
#pragma unroll
                for (int i = 0; i < C::kHeldStages; ++i)
                    s.latent_empty[latent.stage + i].wait(latent.phase ^ 1);
                if constexpr (C::kHeldRopePanels > 0) s.rope_empty[rope.stage].wait(rope.phase ^ 1);
                s.held_query_empty.arrive();
            }
            // These arrivals bring no data, but they count every use of a stage.
#pragma unroll
            for (int i = 0; i < C::kHeldStages; ++i) s.latent_full[latent.stage + i].arrive();
            if constexpr (C::kHeldRopePanels > 0) s.rope_full[rope.stage].arrive();
            HeldQueries<C>::skip(latent, rope);
        }
    }
};

}  // namespace mla::sm90::decode
