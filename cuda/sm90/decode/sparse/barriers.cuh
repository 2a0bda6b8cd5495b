// The arrivals that complete a phase of each barrier of a CTA; kernel.cuh says who arrives.
#pragma once

#include "config.cuh"

namespace mla::sm90::sparse {

// `groups` warpgroups compute scores. Called by one thread; a barrier of the CTA follows.
template <int groups, class Control>
__device__ __forceinline__ void initialise(Control& s) {
    for (uint64_t& bar : s.full) ptx::mbarrier_init(ptx::shared_address(&bar), 1);
    for (uint64_t& bar : s.empty) ptx::mbarrier_init(ptx::shared_address(&bar), kOutputThreads);
    for (uint64_t& bar : s.tile_full) ptx::mbarrier_init(ptx::shared_address(&bar), kLoadWarps);
    for (uint64_t& bar : s.tile_empty)
        ptx::mbarrier_init(ptx::shared_address(&bar), 4 * groups + 8);
    for (uint64_t& bar : s.scores_full) ptx::mbarrier_init(ptx::shared_address(&bar), 128);
    for (uint64_t& bar : s.scores_empty)
        ptx::mbarrier_init(ptx::shared_address(&bar), kOutputThreads);
    for (uint64_t& bar : s.maxima_published) ptx::mbarrier_init(ptx::shared_address(&bar), 128);
    ptx::mbarrier_init(ptx::shared_address(&s.stats_full), 128);
    ptx::mbarrier_init(ptx::shared_address(&s.stats_empty), kOutputThreads);
    ptx::mbarrier_init(ptx::shared_address(&s.merged), 1);
    ptx::mbarrier_init(ptx::shared_address(&s.merged_stats), 1);
    s.ends.initialise();
    ptx::fence_mbarrier_init();
}

}  // namespace mla::sm90::sparse
