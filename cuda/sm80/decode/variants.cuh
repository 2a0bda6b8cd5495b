// The instantiation for a batch, by what the host knows of it.
#pragma once

#include "common/one_row.cuh"
#include "launch.cuh"

namespace mla::sm80::decode {

// The types and the width that an instantiation depends on. It also depends on the shape of the
// batch and on the device's limits.
struct Kind {
    bool bf16;
    int latent_dim;
    CacheFormat format;
};

template <typename T>
Variant variant_for(const Kind& k, const Limits& l, const Shape& s) {
    if (k.format == CacheFormat::e4m3_grouped)
        return variant_of<T, 512, CacheFormat::e4m3_grouped>(l, s);
    if (k.format == CacheFormat::e4m3_token)
        return variant_of<T, 512, CacheFormat::e4m3_token>(l, s);
    if (k.format == CacheFormat::plain)
        return k.latent_dim == 512 ? variant_of<T, 512, CacheFormat::plain>(l, s)
                                   : variant_of<T, 256, CacheFormat::plain>(l, s);
    return k.latent_dim == 512 ? variant_of<T, 512, CacheFormat::e4m3>(l, s)
                               : variant_of<T, 256, CacheFormat::e4m3>(l, s);
}

inline Variant variant_for(const Kind& k, const Limits& l, const Shape& s) {
    return k.bf16 ? variant_for<__nv_bfloat16>(k, l, s) : variant_for<__half>(k, l, s);
}

// Raises `bytes` to the size of a workspace that is enough for any batch of requests with this
// number of rows, and for a cache of one tensor or two. A batch of few and short requests has
// another instantiation than others, and a split cache may have one more. This loads all of them.
// `longest` is the maximum length, which counts if `batch_invariant`.
inline MlaStatus max_workspace(const Kind& k, const Limits& l, int rows, int rope_dim,
                               size_t& bytes, bool batch_invariant = false, int64_t longest = 1) {
    for (const Shape& s : {Shape{rows, rope_dim, INT32_MAX, longest, false, batch_invariant},
                           Shape{rows, rope_dim, INT32_MAX, longest, true, batch_invariant},
                           Shape{rows, rope_dim, 1, longest, false, batch_invariant}}) {
        Fit f;
        const MlaStatus status = variant_for(k, l, s).fit(l, s, f);
        if (status.code != MLA_OK) return status;
        bytes = std::max(bytes, f.workspace_bytes);
    }
    return ok();
}

// The kernels' name of a format that they take. A check refuses others.
inline CacheFormat cache_format(int format) {
    // The switch has no default, so a new format is an error of the compiler here, too.
    switch (static_cast<MlaCacheFormat>(format)) {
        case MLA_CACHE_FP8: return CacheFormat::e4m3;
        case MLA_CACHE_FP8_DS_MLA: return CacheFormat::e4m3_grouped;
        case MLA_CACHE_FP8_PER_TOKEN: return CacheFormat::e4m3_token;
        case MLA_CACHE_F32:
        case MLA_CACHE_F16:
        case MLA_CACHE_BF16: break;
    }
    return CacheFormat::plain;
}

// The functions below find a call's rotary keys in the parameters of dense and of sparse calls,
// once `with_rope` has filled these in.

template <typename Params>
int64_t key_bytes(const Params& p) {
    const RowShape row = row_shape(p.cache_format, p.latent_dim, p.rope_dim);
    return row.bytes - row.rope_offset;
}

template <typename Params>
bool is_split(const Params& p) {
    return p.rope_dim > 0 && !is_one_row(p, latent_bytes(p.cache_format, p.latent_dim));
}

// Accepted formats, for refusals.
constexpr const char* kAcceptedFormats =
    "that of q_dtype, MLA_CACHE_FP8 (3), MLA_CACHE_FP8_DS_MLA (4) or MLA_CACHE_FP8_PER_TOKEN (5)";

// Accepted addresses of rotary keys, for refusals.
template <typename Params>
const char* accepted_rope(const Params& p) {
    return is_scaled(p) ? "behind the latent and its scales, at the strides of the rows"
                        : "null, or a device pointer aligned to 16 bytes";
}

// A page size's logarithm to the base of 2, or -1.
inline int shift_of(int page_size) {
    for (int shift = 0; shift < 31; ++shift)
        if (page_size == 1 << shift) return shift;
    return -1;
}

constexpr float kLog2E = 1.44269504088896340736f;

}  // namespace mla::sm80::decode
