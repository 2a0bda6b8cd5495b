// Absorbed MLA decode on mma.sync: one launch for a batch, scheduled on the device.
//
// For each KV tile, each warp multiplies its query rows by a quarter of the columns (scores). The
// quarters of a score are added in shared memory (softmax). The warp then multiplies P by the same
// columns (values). If several CTAs share an SM, one computes while another waits. A CTA that has
// an SM for itself computes the scores of the next tile before the values of this one. Its warps
// thus have work before and after each barrier.
#pragma once

#include <type_traits>

#include "combine.cuh"
#include "loader.cuh"
#include "row_groups.cuh"

namespace mla::sm80::decode {

template <class C>
__global__ __launch_bounds__(C::kThreads, C::kCtasPerSm) void decode_kernel(
    const __grid_constant__ KernelParams p) {
    using Softmax = std::conditional_t<C::kShared, SharedSoftmax<C>, RegisterSoftmax<C>>;
    char* shared = ptx::dynamic_shared();
    const ThreadPosition position;
    auto& own =
        reinterpret_cast<typename C::WarpShared*>(shared + C::kWarpOffset)[threadIdx.x / 32];
    auto& statistics = *reinterpret_cast<typename C::Statistics*>(shared + C::kStatisticsOffset);
    const int stage_bytes = C::kTokens * p.pitch;

    typename C::Scheduler scheduler(p, own.scheduler);
    scheduler.plan();
    Loader<C> loader(p, position, scheduler, own);
    if (!loader.has(0)) return;
    for (int i = 1; i < p.stages; ++i) loader.next();

    Softmax softmax(shared, position);
    const RowGroups<C> groups(position);
    const Gemms<C> gemms(p, position);
    const Output<C> output(p, shared, position.row_group(), position.column_group());

    int stage = 0;
    own.index = 0;
    while (true) {
        const WorkItem& item = scheduler.item(own.index);
        const int rows = item.q_len * p.heads;
        QueryFragments<C> q;
        q.load(
            [&](int r) {
                struct Row {
                    const char *latent, *rope;
                } pointers = {nullptr, nullptr};
                const int row = item.first_row + position.row_group() * C::kWarpRows + r;
                if (row < rows) {
                    const int token = item.q_begin + row / p.heads, head = row % p.heads;
                    pointers.latent =
                        static_cast<const char*>(p.q_latent) +
                        2 * (token * p.q_latent_token_stride + head * p.q_latent_head_stride);
                    pointers.rope =
                        static_cast<const char*>(p.q_rope) +
                        2 * (token * p.q_rope_token_stride + head * p.q_rope_head_stride);
                }
                return pointers;
            },
            position.column_group(), position.column_group() * 16 < p.rope_dim);
        // Number of tokens that row r of the warp attends to. Its inputs are read from shared
        // memory at each call: registers are few.
        const auto limit_of = [&](int r) {
            const int kv_len = ptx::ld_shared_s32(ptx::shared_address(&item.kv_len));
            if (!p.causal) return kv_len;
            const int first_row = ptx::ld_shared_s32(ptx::shared_address(&item.first_row));
            const int before = ptx::ld_shared_s32(ptx::shared_address(&item.before));
            const int row = first_row + position.row_group() * C::kWarpRows + r;
            return min(before + row / p.heads + 1, kv_len);
        };
        const auto facts_of = [&](int tile, int at) {
            TileFacts facts;
            facts.first = tile * C::kTokens;
            facts.valid = p.sparse ? own.valid[at] : ~0u;
            facts.masked = p.sparse || facts.first + C::kTokens >
                                           ptx::ld_shared_s32(ptx::shared_address(&item.unmasked));
            facts.stage = shared + C::kStagesOffset + at * stage_bytes;
            return facts;
        };
        const auto address_of = [&](int at) {
            return ptx::shared_address(shared + C::kStagesOffset + at * stage_bytes);
        };
        const auto put_scores = [&](int at) {
#pragma unroll
            for (int unit = 0; unit < C::kTokens / 16; ++unit) {
                Scores<C> s;
                gemms.scores(q, address_of(at), unit, s);
                softmax.put(unit, s);
            }
        };
        Accumulators<C> o = {};
        softmax.begin_item();
        const auto rescale_output = [&] {
#pragma unroll
            for (int i = 0; i < C::kWarpTiles; ++i) {
                const float2 factors = softmax.rescale(i);
                if (__any_sync(~0u, factors.x != 1.f || factors.y != 1.f))
#pragma unroll
                    for (int j = 0; j < C::kColumns / 8; ++j) {
                        o[i][j][0] *= factors.x;
                        o[i][j][1] *= factors.x;
                        o[i][j][2] *= factors.y;
                        o[i][j][3] *= factors.y;
                    }
            }
        };
        const auto add_values = [&](int tile, bool rescale) {
            if (rescale) rescale_output();
            if (!C::kGrouped && p.causal &&
                (tile + 1) * C::kTokens > ptx::ld_shared_s32(ptx::shared_address(&item.unmasked)) &&
                item.q_len > 1) {
                // Row groups clear values for each other, so both must have computed their scores
                // of them.
                if constexpr (C::kRowGroups > 1) __syncthreads();
                gemms.clear_nonfinite(shared + C::kStagesOffset + stage * stage_bytes,
                                      position.row_group());
                if constexpr (C::kRowGroups > 1) __syncthreads();
            }
            gemms.values(softmax, address_of(stage), o, [](int) {});
        };
        const auto has_tile = [&](int tile) {
            return tile < ptx::ld_shared_s32(ptx::shared_address(&item.tile_end));
        };
        const auto following = [&](int at) { return at + 1 == p.stages ? 0 : at + 1; };
        if constexpr (C::kOneStage) {
#pragma unroll 1
            for (int tile = item.tile_begin; has_tile(tile); ++tile) {
                wait_for_copies(p.stages - 2);
                // After this barrier, this tile is there, and no warp needs the one before it.
                __syncthreads();
                loader.next();
                put_scores(stage);
                __syncthreads();
                softmax.apply(p, gemms, facts_of(tile, stage), limit_of);
                if constexpr (C::kShared) __syncthreads();
                add_values(tile, true);
                stage = following(stage);
            }
        } else {
            // The first two tiles are there.
            wait_for_all_but(p.stages > 3);
            __syncthreads();
            const auto is_first = [&](int tile) {
                return tile == ptx::ld_shared_s32(ptx::shared_address(&item.tile_begin));
            };
            // The stage of `tile` + 1. The loop begins a tile early, to compute the scores of the
            // first tile.
            int ahead = stage;
            // True if the output of the row group's rows has to be rescaled.
            bool rescale = false;
#pragma unroll 1
            for (int tile = item.tile_begin - 1;; ++tile) {
                const bool more = has_tile(tile + 1), values = !is_first(tile + 1);
                if (!is_first(tile)) {
                    if (values) groups.wait(tile - 1);
                    loader.next();
                }
                if (more) put_scores(ahead);
                if (values) add_values(tile, rescale);
                if (!more) break;
                if (values) {
                    wait_for_all_but(p.stages > 3);
                    groups.pass(tile);
                }
                groups.sync();
                rescale =
                    groups.sync_or(softmax.apply(p, gemms, facts_of(tile + 1, ahead), limit_of));
                stage = ahead;
                ahead = following(ahead);
            }
            stage = ahead;
        }
        softmax.finish(statistics);
        if constexpr (C::kScaleUnits) {
            const float by = softmax.output_unit();
#pragma unroll
            for (auto& tile : o)
#pragma unroll
                for (auto& columns : tile)
#pragma unroll
                    for (float& x : columns) x *= by;
        }
        __syncthreads();
        output.write(item, o, own.scheduler.share);
        // After the last tile's copies, the loader has looked up the next item.
        const int next_item = own.index + 1;
        if (!loader.has(next_item)) return;
        __syncwarp();
        own.index = next_item;
    }
}

}  // namespace mla::sm80::decode
