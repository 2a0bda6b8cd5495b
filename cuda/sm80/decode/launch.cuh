// Choice of the instantiation for a batch, and its launch.
#pragma once

#include "fit.cuh"
#include "kernel_of.cuh"
#include "sm80/limits.cuh"

namespace mla::sm80::decode {

// Shape of a batch, as far as the host knows it.
struct Shape {
    // Number of query rows of the longest request.
    int rows;
    int rope_dim;
    // Number of requests, and maximum number of cached tokens of one.
    int requests;
    int64_t kv_len;
    // True if rotary keys lie in a tensor of their own.
    bool split;
    // True if splits and the instantiation must not depend on other requests.
    bool batch_invariant;
};

// One instantiation, as functions whose types do not depend on it.
struct Variant {
    MlaStatus (*fit)(const Limits&, const Shape&, Fit&);
    MlaStatus (*launch)(const Limits&, const Shape&, KernelParams&, cudaStream_t);
};

// Splits of at least 256 tokens, or of 512 with more than 16 rows: their partial results are
// larger.
template <class C>
OwnSplits own_splits(const Shape& s) {
    if (!s.batch_invariant) return {};
    const int tokens = C::kRows <= 16 ? 256 : 512;
    return {tokens / C::kTokens,
            int(std::min<int64_t>(ceil_div(s.kv_len, tokens), OwnSplits::kMax))};
}

template <class C>
Fit fit_to(const Limits& l, const Shape& s) {
    return fit<C>(l.shared_of_cta, l.shared_of_sm, kReserved, l.multiprocessors, s.rope_dim,
                  pair_of(s.rows, C::kRows), own_splits<C>(s));
}

// Loads the kernel, too.
template <class C>
MlaStatus fit_variant(const Limits& l, const Shape& s, Fit& f) {
    f = fit_to<C>(l, s);
    if (f.ctas > 0)
        return cuda_status("cudaFuncSetAttribute",
                           allow_shared<kernel_of<C>()>(l.device, f.shared_bytes));
    return unsupported("shared memory per block", l.shared_of_cta,
                       "as much as two tiles of the cache take: 99 KB");
}

template <class C>
MlaStatus launch_variant(const Limits& l, const Shape& s, KernelParams& p, cudaStream_t stream) {
    Fit f;
    const MlaStatus status = fit_variant<C>(l, s, f);
    if (status.code != MLA_OK) return status;
    p.pitch = C::pitch(s.rope_dim);
    p.stages = f.stages;
    p.pair = pair_of(s.rows, C::kRows);
    p.own = own_splits<C>(s);
    // Cost of making, storing and combining a partial result, in KV tiles: about two. It is four if
    // warps have roles, since their pipeline has to fill and to drain.
    p.tile_cost = C::kRoles ? 4 : 2;
    p.min_share = 128 / C::kTokens;
    // A request in one split has no partial result. That is worth more than a tile's cost.
    p.even_gain = p.tile_cost * 3 / 2;
    cudaLaunchConfig_t config = {};
    config.gridDim = {unsigned(f.ctas), 1, 1};
    config.blockDim = {unsigned(C::kCtaThreads), 1, 1};
    config.dynamicSmemBytes = f.shared_bytes;
    config.stream = stream;
    return cuda_status("cudaLaunchKernelEx", cudaLaunchKernelEx(&config, kernel_of<C>(), p));
}

template <class C>
Variant variant() {
    return {&fit_variant<C>, &launch_variant<C>};
}

// True if the device's shared memory has room for the number of CTAs per SM that registers allow.
// KV tiles of this size are not worth fewer CTAs.
template <class C>
bool has_room(const Limits& l, const Shape& s) {
    return fit_to<C>(l, s).ctas_per_sm == C::kCtasPerSm;
}

// Instantiation for 16 rows: with KV tiles of 32 tokens if there is room for them, else of 16.
template <typename T, int kLatent, CacheFormat kFormat>
Variant variant_with_room(const Limits& l, const Shape& s) {
    using Large = Config<T, kLatent, kFormat, 1, 1, 32>;
    using Small = Config<T, kLatent, kFormat, 1, 1, 16>;
    return has_room<Large>(l, s) ? variant<Large>() : variant<Small>();
}

// True if rows of the cache have scales.
template <CacheFormat kFormat>
constexpr bool kHasScales =
    kFormat == CacheFormat::e4m3_grouped || kFormat == CacheFormat::e4m3_token;

template <typename T, int kLatent, CacheFormat kFormat>
Variant variant_of_16(const Limits& l, const Shape& s) {
    if constexpr (!kHasScales<kFormat> && kLatent == 512)
        return variant_with_room<T, kLatent, kFormat>(l, s);
    else
        return variant<Config<T, kLatent, kFormat, 1, 1, 32>>();
}

// Number of tokens per CTA up to which tiles of 16 rows end sooner than larger tiles. Each small
// tile reads its request's tokens again, but small tiles begin and combine sooner. Measured on an
// H200. The numbers are higher for e4m3, because its conversion slows larger tiles down.
constexpr int max_short_tokens(CacheFormat format, int rows) {
    switch (format) {
        case CacheFormat::plain: return rows <= 32 ? 320 : 192;
        case CacheFormat::e4m3: return 512;
        case CacheFormat::e4m3_grouped:
        case CacheFormat::e4m3_token: return rows <= 32 ? 512 : 256;
    }
    return 0;
}

// True if a batch is that short, by the maximum length of its requests, and no CTA would have two
// of its tiles.
inline bool is_short(const Limits& l, const Shape& s, CacheFormat format, const Variant& of_16) {
    Fit f;
    if (of_16.fit(l, s, f).code != MLA_OK) return false;
    const int64_t tiles = int64_t(s.requests) * ceil_div(s.rows, 16);
    return tiles <= f.ctas &&
           tiles * s.kv_len <= int64_t(max_short_tokens(format, s.rows)) * f.ctas;
}

// Chooses by the rows of a request: 16, 32 or 64 rows per CTA, and 16 for short batches. With 64
// rows, a plain cache of one tensor and 512 latent columns, warps have roles if there is room.
template <typename T, int kLatent, CacheFormat kFormat>
Variant variant_of(const Limits& l, const Shape& s) {
    const Variant of_16 = variant_of_16<T, kLatent, kFormat>(l, s);
    if (s.rows <= 16 || (!s.batch_invariant && is_short(l, s, kFormat, of_16))) return of_16;
    if constexpr (!kHasScales<kFormat>)
        if (s.rows <= 32) return variant<Config<T, kLatent, kFormat, 2, 1, 16>>();
    if constexpr (kFormat == CacheFormat::plain && kLatent == 512) {
        // With fewer steps of queries in registers ptxas loads keys further ahead of their use. In
        // 163 KB three KV tiles leave room for the other 18 steps, and no more.
        using Fewer = RoleConfig<T, kLatent, 32, 16>;
        if (!s.split && has_room<Fewer>(l, s)) return variant<Fewer>();
        using More = RoleConfig<T, kLatent, 32, 18>;
        if (!s.split && has_room<More>(l, s)) return variant<More>();
    }
    return variant<Config<T, kLatent, kFormat, 2, 2, 16>>();
}

extern template Variant variant_of<__nv_bfloat16, 512, CacheFormat::plain>(const Limits&,
                                                                           const Shape&);
extern template Variant variant_of<__nv_bfloat16, 512, CacheFormat::e4m3>(const Limits&,
                                                                          const Shape&);
extern template Variant variant_of<__nv_bfloat16, 512, CacheFormat::e4m3_grouped>(const Limits&,
                                                                                  const Shape&);
extern template Variant variant_of<__nv_bfloat16, 512, CacheFormat::e4m3_token>(const Limits&,
                                                                                const Shape&);
extern template Variant variant_of<__nv_bfloat16, 256, CacheFormat::plain>(const Limits&,
                                                                           const Shape&);
extern template Variant variant_of<__nv_bfloat16, 256, CacheFormat::e4m3>(const Limits&,
                                                                          const Shape&);
extern template Variant variant_of<__half, 512, CacheFormat::plain>(const Limits&, const Shape&);
extern template Variant variant_of<__half, 512, CacheFormat::e4m3>(const Limits&, const Shape&);
extern template Variant variant_of<__half, 512, CacheFormat::e4m3_grouped>(const Limits&,
                                                                           const Shape&);
extern template Variant variant_of<__half, 512, CacheFormat::e4m3_token>(const Limits&,
                                                                         const Shape&);
extern template Variant variant_of<__half, 256, CacheFormat::plain>(const Limits&, const Shape&);
extern template Variant variant_of<__half, 256, CacheFormat::e4m3>(const Limits&, const Shape&);

}  // namespace mla::sm80::decode
