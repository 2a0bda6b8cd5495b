// Caches whose rotary keys lie behind their latents, and others.
#pragma once

#include <cstdint>

namespace mla {

// True if rotary keys lie behind the latents of their rows, which are of so many bytes, for the
// parameters of any kernel with a cache. Otherwise they have a tensor of their own.
template <typename Params>
bool is_one_row(const Params& p, int64_t latent_bytes) {
    return p.cache_rope == static_cast<const char*>(p.cache) + latent_bytes &&
           p.cache_rope_page_stride == p.cache_page_stride &&
           p.cache_rope_slot_stride == p.cache_slot_stride;
}

}  // namespace mla
