// The scores warpgroup of tiles of more than 32 heads computes S = Q K^T and the softmax, and
// writes the probabilities to shared memory.
//
// Accumulators have heads for rows and keys for columns. For e = 0 and 1, lane 4 g + q of warp w
// has in d[4 i + e] the score of head 16 w + g at key 8 i + 2 q + e. In d[4 i + 2 + e] it has the
// score of head 16 w + g + 8 at the same key.
#pragma once

#include "../../../../common/quad.cuh"
#include "../../../../common/softmax.cuh"
#include "../../../../common/swizzle.cuh"
#include "../../../../ptx/wgmma.cuh"
#include "../combine.cuh"
#include "config.cuh"

namespace mla::sm90::sparse {

template <typename T, int rope_values>
struct WideScores {
    using L = WideLayout<rope_values>;
    using Held = uint32_t[L::kHeldPanels][16];

    const KernelParams& p;
    typename L::Control& s;
    uint32_t base;
    int warp, lane;
    PipelineState<L::kLatentStages> latent = {};
    PipelineState<L::kRopeStages> rope = {};
    PipelineCounter<kPublishedTiles> tile = {};

    // Softmax state of one of a lane's two heads.
    struct Running {
        float maximum = -INFINITY, sum = 0.f;
    };

    __device__ int row() const { return warp * 16 + (lane >> 2); }

    __device__ void run() {
        uint32_t done = 0;
        Held held;
        // Every CTA has an item.
        load_queries(WorkItem(p, TileScheduler::first(p)), held);
        int next;
#pragma unroll 1
        for (int i = TileScheduler::first(p); i < p.items; i = next, ++done) {
            wait_for_queries(held);
            Running low, high;
#pragma unroll 1
            while (true) {
                ptx::mbarrier_wait(ptx::shared_address(&s.tile_full[tile.stage()]), tile.phase());
                const int keys = read_keys(s.keys[tile.stage()], lane);
                if (keys == 0) break;
                score(held, low, high, keys);
                release_tile();
            }
            next = i + TileScheduler::step();
            if (next < p.items) load_queries(WorkItem(p, next), held);
            finish(WorkItem(p, i), low, high, done);
            release_tile();
        }
    }

  private:
    __device__ static void sync_group() { ScoresBarrier::sync(); }

    __device__ void release_tile() {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.tile_empty[tile.stage()]));
        ++tile.count;
    }

    // Issues the loads of the queries, when all MMAs of the previous item are done. Panels of odd
    // numbers are loaded into shared memory for the MMAs, and those of even numbers into registers.
    // Each lane loads 16 bytes of a row at a time.
    __device__ void load_queries(const WorkItem& item, Held& held) const {
        constexpr int chunks = 8 * L::kQueryPanels;
#pragma unroll 1
        for (int i = lane; i < 16 * chunks; i += 32) {
            const int chunk = i % chunks, own = warp * 16 + i / chunks;
            const bool valid = own < item.heads;
            const int at = chunk / 8, panel = 2 * at + 1;
            const char* from = item.latent(p, valid ? own : 0) + panel * 128 + chunk % 8 * 16;
            ptx::cp_async_16(base + at * kPanelBytes + swizzled<128>(own, chunk % 8), from, valid);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int own = row() + 8 * half;
            const bool valid = own < item.heads;
            const char* const latent_from = item.latent(p, valid ? own : 0) + 16 * (lane & 3);
            const char* const rope_from = item.rope(p, valid ? own : 0) + 16 * (lane & 3);
#pragma unroll
            for (int t = 0; t < L::kHeldPanels; ++t) {
                const int panel = 2 * t;
                const char* from = panel < 8 ? latent_from + panel * 128 : rope_from;
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    uint4 x = make_uint4(0, 0, 0, 0);
                    if (valid) x = *reinterpret_cast<const uint4*>(from + 64 * k);
                    // Values stay in the order in which they come, because moving them would wait
                    // for the loads.
                    uint32_t* to = held[t] + 8 * k + 4 * half;
                    to[0] = x.x;
                    to[1] = x.y;
                    to[2] = x.z;
                    to[3] = x.w;
                }
            }
        }
    }

    // Waits until the queries are there, and turns those in registers into operands.
    __device__ void wait_for_queries(Held& held) const {
#pragma unroll
        for (int t = 0; t < L::kHeldPanels; ++t)
#pragma unroll
            for (int i = 0; i < 16; i += 8) {
                uint32_t* of = held[t] + i;
                uint32_t low[4] = {of[0], of[1], of[2], of[3]};
                uint32_t high[4] = {of[4], of[5], of[6], of[7]};
                transpose_quad(low, lane & 3);
                transpose_quad(high, lane & 3);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    of[2 * j] = low[j];
                    of[2 * j + 1] = high[j];
                }
            }
        ptx::cp_async_wait_all();
        ptx::fence_proxy_async();
        sync_group();
    }

    // d += a query panel times a panel of keys, transposed.
    template <int panel>
    __device__ void multiply_panel(float (&d)[32], const Held& held, uint32_t keys) const {
        const uint64_t b = ptx::wgmma_descriptor(keys);
        if constexpr (panel % 2 == 0) {
            const uint32_t* a = held[panel / 2];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                ptx::WgmmaFromRegisters<T, 64>::run(d, a + 4 * k, b + 2 * k, panel > 0 || k > 0);
        } else {
            const uint64_t a = ptx::wgmma_descriptor(base + panel / 2 * kPanelBytes);
#pragma unroll
            for (int k = 0; k < 4; ++k)
                ptx::Wgmma<T, 64, ptx::Major::K>::run(d, a + 2 * k, b + 2 * k, panel > 0 || k > 0);
        }
    }

    template <int first>
    __device__ void multiply_stage(float (&d)[32], const Held& held) {
        const auto at = latent.warp_uniform();
        const uint32_t stage = base + L::kRingOffset + at.stage * L::kStageBytes;
        ptx::wgmma_fence();
        multiply_panel<first>(d, held, stage);
        multiply_panel<first + 1>(d, held, stage + kPanelBytes);
        multiply_panel<first + 2>(d, held, stage + 2 * kPanelBytes);
        multiply_panel<first + 3>(d, held, stage + 3 * kPanelBytes);
        latent.advance(1);
    }

    // Computes the probabilities of a KV tile.
    __device__ void score(const Held& held, Running& low, Running& high, int keys) {
        float d[32];
        const auto at = rope.warp_uniform();
        auto second = latent;
        second.advance(1);
        ptx::mbarrier_wait(ptx::shared_address(&s.latent_full[latent.stage]), latent.phase);
        ptx::mbarrier_wait(ptx::shared_address(&s.latent_full[second.stage]), second.phase);
        if constexpr (L::kRope > 0)
            ptx::mbarrier_wait(ptx::shared_address(&s.rope_full[at.stage]), at.phase);
        // The copies arrive at their barriers by themselves, so the threads that issued them have
        // executed no fence after them.
        ptx::fence_proxy_async();
        multiply_stage<0>(d, held);
        multiply_stage<4>(d, held);
        const uint32_t panel = base + L::kRopeOffset + at.stage * kPanelBytes;
        ptx::wgmma_fence();
        if constexpr (L::kRope > 0) multiply_panel<8>(d, held, panel);
        ptx::wgmma_commit_group();
        if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.scores_issued[at.stage]));
        ptx::wgmma_wait_group<0>();

        if (keys < kTileKeys) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * i + 2 * (lane & 3) + e >= keys)
                        d[4 * i + e] = d[4 * i + 2 + e] = -INFINITY;
        }
        const float factor0 = raise_lazily(low.maximum, row_maximum(d, 0));
        const float factor1 = raise_lazily(high.maximum, row_maximum(d, 2));
        exponentials(d, 0, low, factor0);
        exponentials(d, 2, high, factor1);
        // Probabilities are written over the rope panel, so the MMAs of all warps have to be done.
        sync_group();
        // The loads of this rope panel have waited for the same phase. After it, no thread still
        // reads the stage's earlier factors.
        ptx::mbarrier_wait(ptx::shared_address(&s.rope_empty[at.stage]), at.phase ^ 1);
        const bool any = __any_sync(~0u, factor0 != 1.f || factor1 != 1.f);
        if ((lane & 3) == 0) {
            s.factor[at.stage][row()] = factor0;
            s.factor[at.stage][row() + 8] = factor1;
            if (lane == 0) s.any_factor[at.stage][warp] = any;
        }
        const int own = warp * 16 + (lane & 15);
#pragma unroll
        for (int i = 0; i < 8; i += 2)
            ptx::stmatrix_x4(panel + swizzled<128>(own, i + (lane >> 4)),
                             ptx::cvt_rn_x2<T>(d[4 * i], d[4 * i + 1]),
                             ptx::cvt_rn_x2<T>(d[4 * i + 2], d[4 * i + 3]),
                             ptx::cvt_rn_x2<T>(d[4 * i + 4], d[4 * i + 5]),
                             ptx::cvt_rn_x2<T>(d[4 * i + 6], d[4 * i + 7]));
        ptx::fence_proxy_async();
        __syncwarp();
        // The lanes that wrote factors arrive. They arrive for the other lanes' probabilities, too.
        if ((lane & 3) == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.scores_full[at.stage]));
        rope.advance(1);
    }

    // The maximum of a row's 64 scores, in units of log2.
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

    __device__ void exponentials(float (&d)[32], int first, Running& of, float factor) const {
        const float offset = offset_of(of.maximum);
        float total[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& x = d[4 * i + first + e];
                x = ptx::ex2_approx(fmaf(x, p.scale_log2, -offset));
                total[e] += x;
            }
        }
        of.sum = fmaf(of.sum, factor, total[0] + total[1]);
    }

    // Publishes an item's maxima and sums for the output.
    __device__ void finish(const WorkItem& item, Running low, Running high, uint32_t done) {
        ptx::mbarrier_wait(ptx::shared_address(&s.stats_empty), (done & 1) ^ 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Running of = half ? high : low;
            of.sum += __shfl_xor_sync(~0u, of.sum, 1);
            of.sum += __shfl_xor_sync(~0u, of.sum, 2);
            if ((lane & 3) == 0) {
                const int own = row() + 8 * half;
                s.maximum[own] = of.maximum;
                s.sum[own] = of.sum;
                s.inverse[own] = TileScheduler::splits() > 1
                                     ? p.out_scale
                                     : finish_row(p, item, own, of.maximum, of.sum, p.out_scale);
            }
        }
        if ((lane & 3) == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.stats_full));
    }
};

}  // namespace mla::sm90::sparse
