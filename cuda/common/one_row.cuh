// Tells caches whose rotary keys lie behind their latents, in one row, from other caches, and those
// whose rows have scales.
#pragma once

#include <cstdint>

#include "../formats/formats.cuh"

namespace mla {

// Bytes of a latent and its scales. In a cache of one row, the rotary key lies behind them.
inline int64_t latent_bytes(int32_t format, int64_t latent_dim) {
    return row_shape(format, latent_dim, 0).rope_offset;
}

// Fills in where rotary keys lie if the parameters have null there, which stands for a cache of one
// row.
template <typename Params>
Params with_rope(Params p, int64_t latent_bytes) {
    if (p.cache_rope) return p;
    const uintptr_t rope = reinterpret_cast<uintptr_t>(p.cache) + uintptr_t(latent_bytes);
    p.cache_rope = reinterpret_cast<decltype(p.cache_rope)>(rope);
    p.cache_rope_page_stride = p.cache_page_stride;
    p.cache_rope_slot_stride = p.cache_slot_stride;
    return p;
}

// Does the same for parameters that name the format and the width of a latent themselves.
template <typename Params>
Params with_rope(const Params& p) {
    return with_rope(p, latent_bytes(p.cache_format, p.latent_dim));
}

// True if rotary keys lie directly behind the latents of their rows, which have `latent_bytes`
// bytes. Takes the parameters of any kernel with a cache. If false, rotary keys have a tensor of
// their own.
template <typename Params>
bool is_one_row(const Params& p, int64_t latent_bytes) {
    return p.cache_rope == static_cast<const char*>(p.cache) + latent_bytes &&
           p.cache_rope_page_stride == p.cache_page_stride &&
           p.cache_rope_slot_stride == p.cache_slot_stride;
}

// True if the rows of the cache have scales.
template <typename Params>
bool is_scaled(const Params& p) {
    return p.cache_format == MLA_CACHE_FP8_DS_MLA || p.cache_format == MLA_CACHE_FP8_PER_TOKEN;
}

}  // namespace mla
