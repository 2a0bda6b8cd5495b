// Copies the query panels of each work item. TMA copies them if rows are evenly spaced; otherwise
// they are copied row by row.
#pragma once

#include "../../../../common/swizzle.cuh"
#include "held_queries.cuh"

namespace mla::sm90::decode {

// Run by warp 1.
template <class C>
struct PlainQueryProducer {
    using L = typename C::L;
    using T = typename C::T;
    static constexpr int N = C::N;

    const Context<C>& c;
    const KernelParams& p = c.p;
    typename C::Control& s = c.s;

    using LatentState = typename C::LatentState;
    using RopeState = typename C::RopeState;

    __device__ void prefetch_descriptors(const TensorMaps& maps, int lane) const {
        if (lane == 1 && p.even_query) ptx::prefetch_tensormap(&maps.q_latent);
        if (C::Dims::kRope > 0 && lane == 2 && p.even_query) ptx::prefetch_tensormap(&maps.q_rope);
    }

    __device__ void run(const TensorMaps& maps) {
        if (p.even_query)
            load_even_query(&maps.q_latent, &maps.q_rope);
        else
            load_query();
    }

  private:
    // Calls load(item, hold, full, tiles, where) for the queries of each work item. It is called
    // first for the held panels, with `hold`, and then for those that stay in shared memory.
    // where(i) returns the place and the first value of panel i.
    template <typename Load>
    __device__ void load_query_panels(Load load) {
        uint32_t held = 0;
        LatentState latent;
        RopeState rope;
        PipelineCounter<kQueuedItems> queue;
        for (const WorkItem* next; (next = c.acquire(queue)); c.release(queue)) {
            const WorkItem& item = *next;
            const int kv_tiles = item.kv_tile_end - item.kv_tile_begin;
            // Both kinds of panels use the same code, since code is fetched when it is run.
#pragma unroll 1
            for (int hold = C::kHeldPanels > 0 && kv_tiles > 0; hold >= 0; --hold) {
                // No lane may be left behind at a wait while the one that copies goes on.
                __syncwarp();
                if (!hold)
                    s.query_empty.wait((queue.count & 1) ^ 1);
                else if (held++ > 0)
                    s.held_query_empty.wait(held & 1);
                load(item, hold, hold ? s.held_query_full : s.query_full,
                     hold ? C::kHeldPanels : L::kQueryPanels, [&](int tile) {
                         if (hold)
                             return make_int2(HeldQueries<C>::panel(c, tile, latent, rope),
                                              C::kHeldRopePanels > 0 && tile == C::kHeldPanels - 1
                                                  ? L::kLatent
                                                  : tile * L::kQueryValues);
                         return make_int2(c.base + tile * L::kQueryPanelBytes,
                                          L::kFirstQueryValue + tile * L::kQueryValues);
                     });
            }
            if (kv_tiles > 0) {
                HeldQueries<C>::skip(latent, rope);
                latent.skip(kv_tiles * C::kKvTileStages);
                rope.skip(kv_tiles);
            }
        }
    }

    // A box of N rows has the latent panels that come together: all of them, or every other one.
    __device__ void load_even_query(const CUtensorMap* latent, const CUtensorMap* rope) {
        load_query_panels([&](const WorkItem& item, int, const Barrier<0>& full, int tiles,
                              auto where) {
            if ((threadIdx.x & 31) != 0) return;
            full.expect(tiles * L::kQueryPanelBytes);
            const int row = item.q_begin * p.heads + c.first_row(item);
            const int2 first = where(0), last = where(tiles - 1);
            ptx::cp_async_bulk_tensor(latent, first.x, full.address(), 0, row, first.y / 64, 0);
            if (C::Dims::kRope > 0 && last.y == L::kLatent)
                ptx::cp_async_bulk_tensor(rope, last.x, full.address(), 0, row, 0, 0);
        });
    }

    // Loads queries that are not evenly spaced.
    __device__ void load_query() {
        const int thread = threadIdx.x & 31;
        // Number of tails that have been waited for. `tail` is true if the previous work item has
        // another one.
        uint32_t tails = 0;
        bool tail = false;
        load_query_panels([&](const WorkItem& item, int hold, const Barrier<0>& full, int tiles,
                              auto where) {
            const int first = c.first_row(item), valid = c.rows(item);
#pragma unroll 1
            for (int tile = 0; tile < tiles; ++tile) {
                const int2 to = where(tile);
                const bool latent = to.y < L::kLatent;
                const char* source = latent ? static_cast<const char*>(p.q_latent) + to.y * 2
                                            : static_cast<const char*>(p.q_rope);
                const int64_t token_stride =
                    latent ? p.q_latent_token_stride : p.q_rope_token_stride;
                const int64_t head_stride = latent ? p.q_latent_head_stride : p.q_rope_head_stride;
                for (int i = thread; i < N * 8; i += 32) {
                    const int r = i / 8, chunk = i & 7;
                    const int row = first + r, token = token_of(row, p.inverse_heads),
                              head = row - token * p.heads;
                    const char* own =
                        source + ((item.q_begin + token) * token_stride + head * head_stride) * 2 +
                        chunk * 16;
                    // A narrower rotary part fills some chunks of its panel.
                    constexpr int rope_chunks = C::Dims::kRope / 8;
                    const bool there =
                        r < valid && (latent || rope_chunks == 8 || chunk < rope_chunks);
                    ptx::cp_async_16(to.x + swizzled<128>(r, chunk), there ? own : source, there);
                }
            }
            ptx::cp_async_wait_all();
            ptx::fence_proxy_async();
            if (C::kHeldPanels > 0 && !hold) {
                // This waits for a phase of tail_cleared. The stages of the next held queries may
                // include the one in which the previous work item ended. They do not include the
                // one in which the item before that ended, because the ring is too long. No later
                // tail is cleared before this item's queries are there, so the wait cannot miss its
                // phase.
                if (tail) s.tail_cleared.wait(tails++ & 1);
                tail = item.kv_tile_begin < item.kv_tile_end &&
                       item.kv_tile_end * kTileTokens > item.kv_len;
            }
            full.arrive();
        });
    }
};

}  // namespace mla::sm90::decode
