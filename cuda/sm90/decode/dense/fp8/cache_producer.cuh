// Copies KV tiles of e4m3 bytes by TMA, as stages become free.
#pragma once

#include "../page_walk.cuh"

namespace mla::sm90::decode {

// Warp 0.
template <class C>
struct Fp8CacheProducer {
    using LatentState = typename C::LatentState;
    using L = typename C::L;
    using T = typename C::T;
    static constexpr int N = C::N;

    const Context<C>& c;
    const KernelParams& p = c.p;
    typename C::Control& s = c.s;

    __device__ void prefetch_descriptors(const TensorMaps& maps, int lane) const {
        if (lane == 0) ptx::prefetch_tensormap(&maps.cache_rope);
        if (lane == 1) ptx::prefetch_tensormap(&maps.cache_pairs);
        if constexpr (L::kTokenScales)
            if (lane == 2) ptx::prefetch_tensormap(&maps.cache);
    }

    __device__ void prefetch_kv_tile(const TensorMaps& maps, PagePosition kv_tile) const {
        const ptx::CachePolicy policy = ptx::createpolicy_evict_first();
        if (c.rank == 0)
            ptx::cp_async_bulk_prefetch_tensor(&maps.cache_pairs, policy, 0, kv_tile.offset, 0,
                                               kv_tile.page);
        if (c.rank == c.group_ctas() - 1)
            ptx::cp_async_bulk_prefetch_tensor(&maps.cache_rope, policy, 0, kv_tile.offset,
                                               kv_tile.page);
    }

    __device__ void run(const TensorMaps& maps, const TileScheduler& scheduler,
                        const WorkItem& first_item) const {
        LatentState ring;
        PageWalk<C>{c}.for_each_kv_tile(
            scheduler, first_item,
            [&](auto whole, bool, int tokens, const int (&page)[4], const int (&first)[4]) {
                const ptx::CachePolicy policy = c.cache_policy();
                const uint32_t full = s.latent_full[ring.stage].address(),
                               stage = c.latent_stage(ring.stage), rope = stage + L::kLatentBytes;
                s.latent_empty[ring.stage].wait(ring.phase ^ 1);
                wait_for_copies_in_flight<L>(s, ring);
                ptx::mbarrier_arrive_expect_tx(full, tokens * L::kKvTileBytes / kTileTokens);
                if constexpr (whole.value) {
                    ptx::cp_async_bulk_tensor(&maps.cache_pairs, stage, full, policy, 0, first[0],
                                              0, page[0]);
                    ptx::cp_async_bulk_tensor(&maps.cache_rope, rope, full, policy, 0, first[0],
                                              page[0]);
                    if constexpr (L::kTokenScales)
                        ptx::cp_async_bulk_tensor(&maps.cache, stage + L::kScalesOffset, full,
                                                  policy, 0, first[0], page[0]);
                } else {
#pragma unroll 1
                    for (int i = 0; i < 4; ++i) {
                        if (i * 16 >= tokens) break;
                        const int f = i == 0   ? first[0]
                                      : i == 1 ? first[1]
                                      : i == 2 ? first[2]
                                               : first[3];
                        const int z = i == 0   ? page[0]
                                      : i == 1 ? page[1]
                                      : i == 2 ? page[2]
                                               : page[3];
#pragma unroll 1
                        for (int group = 0; group < 4; ++group)
                            ptx::cp_async_bulk_tensor(&maps.cache_pairs,
                                                      stage + group * L::kGroupBytes + i * 2048,
                                                      full, policy, 0, f, group, z);
                        ptx::cp_async_bulk_tensor(&maps.cache_rope, rope + i * 16 * L::kRopeBytes,
                                                  full, policy, 0, f, z);
                        if constexpr (L::kTokenScales)
                            ptx::cp_async_bulk_tensor(
                                &maps.cache, stage + L::kScalesOffset + i * 16 * L::kScaleBytes,
                                full, policy, 0, f, z);
                    }
                }
                ring.advance(1);
            });
    }
};

}  // namespace mla::sm90::decode
