// The query panels that live in registers, and how they get there.
#pragma once

#include "../context.cuh"

namespace mla::sm90::decode {

// With more than 64 rows, the scores warpgroup holds some query panels in registers. They come
// through the rings, before the first KV tile of each work item.
template <class C>
struct HeldQueries {
    using LatentState = typename C::LatentState;
    using RopeState = typename C::RopeState;

    __device__ static void skip(LatentState& latent, RopeState& rope) {
        if constexpr (C::kHeldPanels > 0) {
            latent.advance(C::kHeldStages);
            if constexpr (C::kHeldRopePanels > 0) rope.advance(1);
        }
    }
    // Address of a held panel.
    __device__ static uint32_t panel(const Context<C>& c, int panel, const LatentState& latent,
                                     const RopeState& rope) {
        return C::kHeldRopePanels > 0 && panel == C::kHeldPanels - 1
                   ? c.rope_stage(rope.stage)
                   : c.latent_stage(latent.stage) + panel * kPanelBytes;
    }
};

}  // namespace mla::sm90::decode
