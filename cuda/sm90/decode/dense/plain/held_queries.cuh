// The query panels that live in registers, and how they get there.
#pragma once

#include "../context.cuh"

namespace mla::sm90::decode {

// Query panels that the scores warpgroup holds in registers (more than 64 rows) come through the
// rings, before the first KV tile of each work item.
template <class C>
struct HeldQueries {
    using LatentRing = typename C::LatentRing;
    using RopeRing = typename C::RopeRing;

    __device__ static void skip(LatentRing& latent, RopeRing& rope) {
        if constexpr (C::kHeldPanels > 0) {
            latent.advance(C::kHeldStages);
            rope.advance(1);
        }
    }
    // Address of a held panel.
    __device__ static uint32_t panel(const Context<C>& c, int panel, const LatentRing& latent,
                                     const RopeRing& rope) {
        return panel == C::kHeldPanels - 1 ? c.rope_stage(rope.slot)
                                           : c.latent_stage(latent.slot) + panel * kPanelBytes;
    }
};

}  // namespace mla::sm90::decode
