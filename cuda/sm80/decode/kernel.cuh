// Absorbed MLA decode on mma.sync: one launch for a batch, scheduled on the device.
//
// Per KV tile: each warp multiplies its query rows and a quarter of the columns (scores), the
// quarters meet in shared memory (softmax), and the warp multiplies P by the same columns (values).
// Where two or more CTAs share an SM, they take turns at what takes long. A CTA that has it for
// itself computes the scores of the next tile before the values of this one, so that warps come to
// the barrier between them with long work behind and before them.
#pragma once

#include <type_traits>

#include "combine.cuh"
#include "loader.cuh"

namespace mla::sm80::decode {

template <class C>
__global__ __launch_bounds__(C::kThreads, C::kResident) void decode_kernel(
    const __grid_constant__ KernelParams p) {
    using Softmax = std::conditional_t<C::kShared, SharedSoftmax<C>, RegisterSoftmax<C>>;
    char* shared = ptx::dynamic_shared();
    const int warp = threadIdx.x / 32;
    const int row_group = warp / kColumnGroups, column_group = warp % kColumnGroups;
    auto& own = reinterpret_cast<typename C::WarpShared*>(shared + C::kWarpOffset)[warp];
    auto& statistics = *reinterpret_cast<typename C::Statistics*>(shared + C::kStatisticsOffset);
    const bool has_rope = column_group * 16 < p.rope_dim;
    const int stage_bytes = C::kTokens * p.pitch;

    typename C::Plan plan(p, own.plan);
    plan.begin();
    Loader<C> loader(p, plan, own.loader, own.valid);
    if (!loader.has(0)) return;
    for (int i = C::kOneStage; i < p.stages; ++i) loader.next();

    Softmax softmax(shared, row_group, column_group);
    const Products<C> products(p.pitch, column_group, has_rope);
    const Output<C> output(p, shared, row_group, column_group);

    int stage = 0;
    own.index = 0;
    while (true) {
        const Item& item = plan.item(own.index);
        const int rows = item.q_len * p.heads;
        QueryFragments<C> q;
        q.load(
            [&](int r) {
                struct Row {
                    const char *latent, *rope;
                } pointers = {nullptr, nullptr};
                const int row = item.first_row + row_group * C::kWarpRows + r;
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
            column_group, has_rope);
        // How many tokens a row of the warp attends to. What it depends on is read where it is
        // asked for: registers are few.
        const auto limit_of = [&](int r) {
            const int kv_len = ptx::ld_shared_s32(ptx::shared_address(&item.kv_len));
            if (!p.causal) return kv_len;
            const int first_row = ptx::ld_shared_s32(ptx::shared_address(&item.first_row));
            const int before = ptx::ld_shared_s32(ptx::shared_address(&item.before));
            const int row = first_row + row_group * C::kWarpRows + r;
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
                products.scores(q, address_of(at), unit, s);
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
        const auto add_values = [&](int tile) {
            rescale_output();
            if (p.causal &&
                (tile + 1) * C::kTokens > ptx::ld_shared_s32(ptx::shared_address(&item.unmasked)) &&
                item.q_len > 1) {
                products.clear_nonfinite(shared + C::kStagesOffset + stage * stage_bytes,
                                         row_group);
                // Row groups clear for each other.
                if constexpr (C::kRowGroups > 1 && !C::kBytes) __syncthreads();
            }
            products.values(softmax, address_of(stage), o);
        };
        const auto has_tile = [&](int tile) {
            return tile < ptx::ld_shared_s32(ptx::shared_address(&item.tile_end));
        };
        const auto following = [&](int at) { return at + 1 == p.stages ? 0 : at + 1; };
        if constexpr (C::kOneStage) {
#pragma unroll 1
            for (int tile = item.tile_begin; has_tile(tile); ++tile) {
                wait_for_copies(p.stages - 2);
                // This tile is there, and no warp needs the one before it.
                __syncthreads();
                loader.next();
                put_scores(stage);
                __syncthreads();
                softmax.apply(p, products, facts_of(tile, stage), limit_of);
                if constexpr (C::kShared) __syncthreads();
                add_values(tile);
                stage = following(stage);
            }
        } else {
            wait_for_copies(p.stages - 1);
            __syncthreads();
            put_scores(stage);
            __syncthreads();
            softmax.apply(p, products, facts_of(item.tile_begin, stage), limit_of);
            wait_for_copies(p.stages - 2);
            __syncthreads();
#pragma unroll 1
            for (int tile = item.tile_begin; has_tile(tile); ++tile) {
                const bool more = has_tile(tile + 1);
                const int next = following(stage);
                if (more) put_scores(next);
                add_values(tile);
                __syncthreads();
                loader.next();
                if (more) {
                    softmax.apply(p, products, facts_of(tile + 1, next), limit_of);
                    wait_for_copies(p.stages - 2);
                    __syncthreads();
                }
                stage = next;
            }
        }
        softmax.finish(statistics);
        __syncthreads();
        output.write(item, o);
        // The last tile's copies were followed by a look at what comes next.
        const int next_item = own.index + 1;
        if (!loader.has(next_item)) return;
        __syncwarp();
        own.index = next_item;
    }
}

}  // namespace mla::sm80::decode
