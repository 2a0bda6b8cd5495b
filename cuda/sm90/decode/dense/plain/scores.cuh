// Scores of query rows and cached tokens of bf16 or f16, their softmax, and the probabilities.
#pragma once

#include "../../../../common/finite.cuh"
#include "../../../../common/softmax.cuh"
#include "../../../../common/swizzle.cuh"
#include "../../../../ptx/wgmma.cuh"
#include "held_queries.cuh"

namespace mla::sm90::decode {

// One warpgroup computes S = Q K^T, the softmax, and P.
template <class C>
struct PlainScores {
    using L = typename C::L;
    using T = typename C::T;
    static constexpr int N = C::N;

    const Context<C>& c;
    const KernelParams& p = c.p;
    typename C::Control& s = c.s;

    using LatentState = typename C::LatentState;
    using RopeState = typename C::RopeState;

    __device__ void run() {
        const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
        const bool has_rows = warp * 16 < N;
        const int row0 = warp * 16 + (lane >> 2), row1 = row0 + 8;
        LatentState latent;
        // State of the ring of softmax results (factors, P). Unlike `rope`, it does not advance for
        // stages that hold queries.
        RopeState rope, scored;
        // Number of work items whose queries have been held.
        uint32_t held = 0;
        PipelineCounter<kQueuedItems> queue;
        for (const WorkItem* next; (next = c.acquire(queue)); c.release(queue)) {
            const WorkItem& item = *next;
            const int begin = item.kv_tile_begin, end = item.kv_tile_end, kv_len = item.kv_len;
            // Rows attend to the tokens before their limit.
            const int first = c.first_row(item);
            int limit0 = item.kv_len, limit1 = item.kv_len;
            const int seen_by_all = c.seen_by_all(item);
            if (p.causal) {
                limit0 = min(item.kv_len, item.kv_len - item.q_len +
                                              token_of(first + row0, p.inverse_heads) + 1);
                limit1 = min(item.kv_len, item.kv_len - item.q_len +
                                              token_of(first + row1, p.inverse_heads) + 1);
            }
            float max0 = -INFINITY, max1 = -INFINITY, sum0 = 0.f, sum1 = 0.f;
            uint32_t query[C::kHeldPanels > 0 ? C::kHeldPanels : 1][16];
            if constexpr (C::kHeldPanels > 0) {
                if (begin < end) hold_queries(query, latent, rope, held++, warp, lane);
            }
            s.query_full.wait(queue.count & 1);
            for (int kv_tile = begin; kv_tile < end; ++kv_tile) {
                float d[32];
                multiply(d, query, latent, rope);
                ptx::wgmma_commit_group();
                if (C::kByRows && lane == 0) s.scores_issued[scored.stage].arrive();
                ptx::wgmma_wait_group<0>();
                if (kv_tile + 1 == end) s.query_empty.arrive();

                float factor0 = 1.f, factor1 = 1.f;
                // True if a token that only later query tokens see has a value that is not finite.
                bool contaminates = false;
                if (has_rows) {
                    if ((kv_tile + 1) * kTileTokens > seen_by_all) {
                        if (seen_by_all < kv_len) contaminates = any_not_finite(d);
                        mask(d, kv_tile * kTileTokens + 2 * (lane & 3), limit0, limit1);
                    }
                    const float top0 = row_maximum(d, 0), top1 = row_maximum(d, 2);
                    factor0 = raise_lazily(max0, top0);
                    factor1 = raise_lazily(max1, top1);
                    exponentials(d, 0, max0, sum0, factor0);
                    exponentials(d, 2, max1, sum1, factor1);
                }
                // The writes below go to panels that the MMAs of other warps read. These MMAs have
                // to be done.
                ScoresBarrier::sync();
                const int tokens = kv_len - kv_tile * kTileTokens;
                if (tokens < kTileTokens) {
                    clear_tail(latent, tokens, thread);
                    if (C::kHeldPanels > 0 && !p.even_query) {
                        // All warps have written their zeros when one of them arrives.
                        ScoresBarrier::sync();
                        s.tail_cleared.arrive();
                    }
                }
                if (contaminates)
                    clear_hidden(latent, max(seen_by_all - kv_tile * kTileTokens, 0),
                                 min(tokens, kTileTokens), thread);
                // TMA, if it fills the stage, has waited for the same phase before.
                s.rope_empty[rope.stage].wait(rope.phase ^ 1);
                if (has_rows) {
                    const bool any = __any_sync(
                        ~0u, (factor0 != 1.f && row0 < N) || (factor1 != 1.f && row1 < N));
                    if ((lane & 3) == 0) {
                        s.factor[scored.stage][row0] = factor0;
                        s.factor[scored.stage][row1] = factor1;
                    }
                    if (lane == 0) reinterpret_cast<int*>(&s.any_factor[scored.stage])[warp] = any;
                    store_probabilities(d, c.rope_stage(rope.stage), warp, lane);
                }
                ptx::fence_proxy_async();
                __syncwarp();
                // The lanes that wrote factors arrive. They arrive for the other lanes'
                // probabilities, too.
                if ((lane & 3) == 0) s.scores_full[scored.stage].arrive();
                latent.advance(C::kKvTileStages);
                rope.advance(1);
                scored.advance(1);
            }
            if (begin == end) s.query_empty.arrive();

            s.stats_empty.wait((queue.count & 1) ^ 1);
            if (has_rows) hand_over(row0, row1, max0, max1, sum0, sum1);
            // This arrival covers what this thread wrote here, and also the zeros behind the last
            // token. The output will combine splits in the memory in which these lie.
            s.stats_full.arrive();
            if (has_rows && item.splits == 1)
                write_lses(item, first, row0, row1, max0, max1, sum0, sum1);
        }
    }

  private:
    // Issues the MMAs of S = Q K^T for a KV tile, as its panels arrive.
    template <typename Queries>
    __device__ __forceinline__ void multiply(float (&d)[32], const Queries& query,
                                             const LatentState& latent,
                                             const RopeState& rope) const {
        LatentState tile = latent.warp_uniform();
#pragma unroll
        for (int i = 0; i < C::Dims::kLatentPanels; ++i) {
            const int panel = i % L::kStagePanels;
            if (panel == 0) s.latent_full[tile.stage].wait(tile.phase);
            multiply_panel(d, query, i, c.latent_stage(tile.stage) + panel * kPanelBytes, i > 0);
            if (panel == L::kStagePanels - 1) tile.advance(1);
        }
        if constexpr (C::Dims::kRope > 0) {
            s.rope_full[rope.stage].wait(rope.phase);
            multiply_panel<C::Dims::kRope>(d, query, C::Dims::kLatentPanels,
                                           c.rope_stage(rope.warp_uniform().stage), 1);
        }
    }

    // Masks the tokens from their rows' limits on. `column` is this lane's first token.
    __device__ __forceinline__ static void mask(float (&d)[32], int column, int limit0,
                                                int limit1) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (column + 8 * i >= limit0) d[4 * i] = -INFINITY;
            if (column + 8 * i + 1 >= limit0) d[4 * i + 1] = -INFINITY;
            if (column + 8 * i >= limit1) d[4 * i + 2] = -INFINITY;
            if (column + 8 * i + 1 >= limit1) d[4 * i + 3] = -INFINITY;
        }
    }

    // Publishes the maxima and sums of a work item's rows for the output. Each of a row's four
    // lanes gets the row's sum.
    __device__ __forceinline__ void hand_over(int row0, int row1, float max0, float max1,
                                              float& sum0, float& sum1) const {
        sum0 += __shfl_xor_sync(~0u, sum0, 1);
        sum0 += __shfl_xor_sync(~0u, sum0, 2);
        sum1 += __shfl_xor_sync(~0u, sum1, 1);
        sum1 += __shfl_xor_sync(~0u, sum1, 2);
        if ((threadIdx.x & 3) != 0) return;
        s.maximum[row0] = max0;
        s.maximum[row1] = max1;
        s.sum[row0] = sum0;
        s.sum[row1] = sum1;
        s.inverse[row0] = c.inverse_of(sum0);
        s.inverse[row1] = c.inverse_of(sum1);
    }

    // Writes the log-sum-exps of a work item that is the only split.
    __device__ __forceinline__ void write_lses(const WorkItem& item, int first, int row0, int row1,
                                               float max0, float max1, float sum0,
                                               float sum1) const {
        if ((threadIdx.x & 3) != 0) return;
        const int valid = c.rows(item);
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            const int row = i ? row1 : row0;
            if (row < valid)
                write_lse(p, first + row, item.q_begin,
                          log2_sum_exp2(i ? max1 : max0, i ? sum1 : sum0));
        }
    }

    // d += Q panel times K panel, transposed: the first `values` of a panel.
    template <int values = 64, typename Queries>
    __device__ void multiply_panel(float (&d)[32], const Queries& query, int query_tile,
                                   uint32_t cache_tile, int accumulate) const {
        const uint64_t b = ptx::wgmma_descriptor(cache_tile);
        ptx::wgmma_fence();
        // If the output is by rows, every other panel is in registers.
        constexpr int stride = L::kQueryValues / 64;
        if (query_tile % stride == L::kFirstQueryValue / 64) {
            const uint64_t a =
                ptx::wgmma_descriptor(c.base + query_tile / stride * L::kQueryPanelBytes);
#pragma unroll
            for (int k = 0; k < values / 16; ++k)
                ptx::Wgmma<T, 64, ptx::Major::K>::run(d, a + 2 * k, b + 2 * k,
                                                      k > 0 ? 1 : accumulate);
        } else if constexpr (C::kHeldPanels > 0) {
            const uint32_t* a = query[query_tile / stride];
#pragma unroll
            for (int k = 0; k < values / 16; ++k)
                ptx::WgmmaFromRegisters<T, 64>::run(d, a + 4 * k, b + 2 * k,
                                                    k > 0 ? 1 : accumulate);
        }
    }

    // Takes the queries to be held from the rings, as operands of MMAs.
    template <typename Queries>
    __device__ void hold_queries(Queries& query, LatentState& latent, RopeState& rope,
                                 uint32_t held, int warp, int lane) const {
        // The cache producer has counted this use of the stages before the queries are there.
#pragma unroll
        for (int i = 0; i < C::kHeldStages; ++i) s.latent_full[latent.stage + i].wait(latent.phase);
        if constexpr (C::kHeldRopePanels > 0) s.rope_full[rope.stage].wait(rope.phase);
        s.held_query_full.wait(held & 1);
        const int row = warp * 16 + (lane & 15);
#pragma unroll
        for (int t = 0; t < C::kHeldPanels; ++t)
#pragma unroll
            for (int k = 0; k < 4; ++k)
                ptx::ldmatrix_x4(*reinterpret_cast<uint32_t (*)[4]>(&query[t][4 * k]),
                                 HeldQueries<C>::panel(c, t, latent, rope) +
                                     swizzled<128>(row, 2 * k + (lane >> 4)));
        // TMA will overwrite what these lanes have read. An arrival does not wait until earlier
        // loads have returned, but the fence does. After the barrier of the warpgroup, the loads of
        // all lanes have returned (docs/log/decode.md, "Correctness").
        ptx::fence_proxy_async();
        ScoresBarrier::sync();
        s.held_query_taken.arrive();
        __syncwarp();
        // Two lanes of each of these four warps arrive, instead of the eight warps that free a KV
        // tile's stages.
        if (lane < 2) {
            if constexpr (C::kHeldRopePanels > 0) s.rope_empty[rope.stage].arrive();
#pragma unroll
            for (int i = 0; i < C::kHeldStages; ++i) s.latent_empty[latent.stage + i].arrive();
        }
        HeldQueries<C>::skip(latent, rope);
    }

    // Zeroes the latent values of tokens past the end. Memory may hold anything there, and 0 * NaN
    // is NaN.
    __device__ void clear_tail(LatentState tile, int tokens, int thread) const {
        for (int t = 0; t < C::kKvTileStages; ++t) {
            const uint32_t stage = c.latent_stage(tile.stage);
            for (int i = tokens * 8 + thread; i < kTileTokens * 8; i += 128) {
#pragma unroll
                for (int j = 0; j < L::kStagePanels; ++j)
                    ptx::st_shared_v4(stage + j * kPanelBytes + i * 16, make_uint4(0, 0, 0, 0));
            }
            tile.advance(1);
        }
    }

    // True if a score of a warp's rows is NaN or infinite, even if the row may not see it. A token
    // with a value that is not finite has no finite score in any row, so half of the rows suffice.
    __device__ static bool any_not_finite(const float (&d)[32]) {
        float sum[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum[0] = fmaf(d[4 * i], 0.f, sum[0]);
            sum[1] = fmaf(d[4 * i + 1], 0.f, sum[1]);
        }
        return __any_sync(~0u, sum[0] + sum[1] != 0.f);
    }

    // Clears values that are not finite among the latent values of these tokens, which some rows do
    // not see. Rows that see the tokens already have NaN in their scores. Every warp that has rows
    // finds such tokens, so each clears a share. clear_tail clears the places behind the last
    // token.
    __device__ void clear_hidden(LatentState tile, int begin, int end, int thread) const {
        constexpr int threads = N < 16 ? 32 : N / 16 * 32;
        // Without this, values that depend on it would be computed earlier, and spilled.
        asm volatile("" : "+r"(thread));
#pragma unroll 1
        for (int i = 0; i < C::kKvTileStages; ++i) {
            const uint32_t stage = c.latent_stage(tile.stage);
#pragma unroll 1
            for (int at = begin * 8 + thread; at < end * 8; at += threads)
#pragma unroll 1
                for (int panel = 0; panel < L::kStagePanels; ++panel)
                    clear_not_finite<T>(stage + panel * kPanelBytes + at * 16);
            tile.advance(1);
        }
    }

    // Maximum of a row's 64 scores, in units of log2.
    __device__ float row_maximum(const float (&d)[32], int first) const {
        float m = fmaxf(d[first], d[first + 1]), n = fmaxf(d[first + 4], d[first + 5]);
#pragma unroll
        for (int i = 2; i < 8; i += 2) {
            m = fmaxf(m, fmaxf(d[4 * i + first], d[4 * i + first + 1]));
            n = fmaxf(n, fmaxf(d[4 * i + 4 + first], d[4 * i + 5 + first]));
        }
        m = fmaxf(m, n);
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
        return fmaxf(m, __shfl_xor_sync(~0u, m, 2)) * p.scale_log2;
    }

    __device__ void exponentials(float (&d)[32], int first, float maximum, float& sum,
                                 float factor) const {
        const float offset = offset_of(maximum);
        float total[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float& x = d[4 * i + first + j];
                x = ptx::ex2_approx(fmaf(x, p.scale_log2, -offset));
                total[j] += x;
            }
        }
        sum = fmaf(sum, factor, total[0] + total[1]);
    }

    // Writes P as a K-major panel. A row of the panel is a query row, with 64 tokens.
    __device__ static void store_probabilities(const float (&d)[32], uint32_t tile, int warp,
                                               int lane) {
        const int row = warp * 16 + (lane & 15);
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const int chunk = i + (lane >> 4);
            ptx::stmatrix_x4(tile + swizzled<128>(row, chunk),
                             ptx::cvt_rn_x2<T>(d[4 * i], d[4 * i + 1]),
                             ptx::cvt_rn_x2<T>(d[4 * i + 2], d[4 * i + 3]),
                             ptx::cvt_rn_x2<T>(d[4 * i + 4], d[4 * i + 5]),
                             ptx::cvt_rn_x2<T>(d[4 * i + 6], d[4 * i + 7]));
        }
    }
};

}  // namespace mla::sm90::decode
