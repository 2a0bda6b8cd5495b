// Fits an instantiation to a device: CTAs, stages, shared memory and workspace.
#pragma once

#include <algorithm>

#include "config.cuh"

namespace mla::sm80::decode {

// Number of CTAs that do different rows of the same tokens. More of them would read the cache less
// often, but would leave more CTAs without rows.
inline int pair_of(int rows, int tile_rows) { return rows > tile_rows ? 2 : 1; }

// Launch sizes of an instantiation.
struct Fit {
    // Number of CTAs per SM, number of all CTAs, and number of KV tiles that each CTA holds.
    int ctas_per_sm, ctas, stages;
    size_t shared_bytes, workspace_bytes;
};

// Takes the maximum number of CTAs per SM for which registers suffice and each CTA has enough
// stages. Returns no CTAs if not even one per SM has enough stages.
template <class C>
Fit fit(int shared_of_cta, int shared_of_sm, int reserved, int multiprocessors, int rope_dim,
        int pair, const OwnSplits& own = {}) {
    const int tile = C::kTokens * C::pitch(rope_dim);
    Fit f = {};
    for (f.ctas_per_sm = C::kCtasPerSm;; --f.ctas_per_sm) {
        const int room = std::min(shared_of_cta, shared_of_sm / f.ctas_per_sm - reserved);
        f.stages = std::min((room - C::kStagesOffset) / tile, C::kMaxCtaStages);
        if (f.stages >= C::kMinCtaStages || f.ctas_per_sm == 1) break;
    }
    if (f.stages < C::kMinCtaStages) return {};
    f.shared_bytes = C::shared_bytes(rope_dim, f.stages);
    f.ctas = std::min(multiprocessors * f.ctas_per_sm, kMaxCtas) / pair * pair;
    f.workspace_bytes =
        kCounterBytes + size_t(own.of_cta()) * f.ctas * C::kPartialFloats * sizeof(float);
    return f;
}

}  // namespace mla::sm80::decode
