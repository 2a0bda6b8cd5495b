// Tile scheduler: the work items of a CTA.
#pragma once

#include "params.cuh"
#include "ptx/sm90.cuh"

namespace mla::sm90::sparse {

// A tile of heads of a query token, as far as loads and stores need it.
struct WorkItem {
    int token, first_head, heads;

    __device__ WorkItem(const KernelParams& p, int index) {
        // Exact for fewer than 2^27 items. A token has at most 8.
        token = int(uint64_t(index) * p.token_factor >> 31);
        first_head = (index - token * p.head_tiles) * p.tile_heads;
        heads = min(p.tile_heads, p.heads - first_head);
    }

    // Addresses of a head's latent and rotary query values.
    __device__ const char* latent(const KernelParams& p, int head) const {
        return static_cast<const char*>(p.q_latent) +
               (token * p.q_latent_token_stride + (first_head + head) * p.q_latent_head_stride) * 2;
    }
    __device__ const char* rope(const KernelParams& p, int head) const {
        return static_cast<const char*>(p.q_rope) +
               (token * p.q_rope_token_stride + (first_head + head) * p.q_rope_head_stride) * 2;
    }
};

// The static tile scheduler: a cluster takes every step()-th item. Its numbers are read where they
// are needed, because keeping them would cost registers in every role.
struct TileScheduler {
    __device__ static int first(const KernelParams& p) {
        return p.first_item + int(ptx::clusterid());
    }
    __device__ static int step() { return int(ptx::nclusterid()); }
    // This CTA's split of each item, and how many there are.
    __device__ static int split() { return int(ptx::cluster_ctarank()); }
    __device__ static int splits() { return int(ptx::cluster_nctarank()); }
};

}  // namespace mla::sm90::sparse
