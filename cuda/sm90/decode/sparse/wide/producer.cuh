// The loading warps of tiles of more than 32 heads. They copy rows of the cache to the ring, as
// panels that wgmma reads.
#pragma once

#include "../../../../common/swizzle.cuh"
#include "../list_walk.cuh"
#include "config.cuh"

namespace mla::sm90::sparse {

// One of the four warps. It loads 16 rows of each KV tile.
template <int rope_values>
struct WideProducer {
    using L = WideLayout<rope_values>;

    ListWalk<L> walk;
    uint32_t base;
    PipelineState<L::kLatentStages> latent = {};
    PipelineState<L::kRopeStages> rope = {};
    ptx::CachePolicy policy = ptx::createpolicy_evict_first();

    // Each case has a loop of its own. With the choice inside the loop, whole prompts took a tenth
    // longer.
    __device__ void run() {
        if (L::kRope > 0 && walk.p.split)
            walk.run([&](uint32_t taken, int keys) { load<true>(taken, keys); });
        else
            walk.run([&](uint32_t taken, int keys) { load<false>(taken, keys); });
    }

  private:
    static constexpr int kWarpRows = 16;

    template <bool split>
    __device__ void load(uint32_t taken, int keys) {
        // Two lanes look up each row of the warp.
        const int own = walk.warp * kWarpRows + (walk.lane & (kWarpRows - 1));
        const char* row = own < keys ? walk.row(walk.entry(taken + own)) : nullptr;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t stage = base + L::kRingOffset + latent.stage * L::kStageBytes;
            copy_panels<kStagePanels>(row, half * kStagePanels, stage,
                                      walk.s.latent_empty[latent.stage], latent.phase,
                                      walk.s.latent_full[latent.stage]);
            latent.advance(1);
        }
        if constexpr (L::kRope == 0) return;
        // copy_panels adds the offset of a rotary key that lies behind its latent. This subtracts
        // it.
        if (split && row) row = walk.rope(walk.entry(taken + own)) - kLatent * 2;
        copy_panels<1>(row, 2 * kStagePanels, base + L::kRopeOffset + rope.stage * kPanelBytes,
                       walk.s.rope_empty[rope.stage], rope.phase, walk.s.rope_full[rope.stage]);
        rope.advance(1);
    }

    // Copies some panels of this warp's rows when their stage is empty. Eight lanes write a whole
    // line of shared memory. If an instruction copied one row, its lanes would write to four
    // panels, and everything would take a fifth longer.
    template <int panels>
    __device__ void copy_panels(const char* row, int first, uint32_t stage, uint64_t& empty,
                                uint32_t phase, uint64_t& full) const {
        ptx::mbarrier_wait(ptx::shared_address(&empty), phase ^ 1);
        const int chunk = walk.lane & 7;
#pragma unroll
        for (int i = 0; i < kWarpRows / 4; ++i) {
            const int of_warp = 4 * i + walk.lane / 8;
            const char* from = reinterpret_cast<const char*>(
                __shfl_sync(~0u, reinterpret_cast<unsigned long long>(row), of_warp));
            const uint32_t to = stage + swizzled<128>(walk.warp * kWarpRows + of_warp, chunk);
#pragma unroll
            for (int j = 0; j < panels; ++j)
                copy(to + j * kPanelBytes, from, (first + j) * 128 + chunk * 16);
        }
        ptx::cp_async_mbarrier_arrive_noinc(ptx::shared_address(&full));
    }

    // Copies 16 bytes of a row. If there is no row, writes zeros.
    __device__ void copy(uint32_t to, const char* row, int offset) const {
        const void* from = row ? row + offset : walk.p.q_latent;
        if (walk.p.read_once)
            ptx::cp_async_16(to, from, row != nullptr, policy);
        else
            ptx::cp_async_16(to, from, row != nullptr);
    }
};

}  // namespace mla::sm90::sparse
