// The C interface of this kernel. It checks every argument, and launches the kernel.

#include "../../../common/one_row.cuh"
#include "launch.cuh"
#include "sm90/mla_sm90.h"
#include "sm90/mla_sm90_division.h"

namespace mla::sm90::sparse {
namespace {

// The kinds of rows (rows.cuh).
enum class Format { same, e4m3, ds_mla, per_token };

// Finds the format in which this kernel reads a cache. Returns false if the kernel does not take
// the cache. The switch has no default, so a new format is an error of the compiler here, too.
bool format_of(const MlaSparseParams& p, Format& format) {
    switch (static_cast<MlaCacheFormat>(p.cache_format)) {
        case MLA_CACHE_BF16: format = Format::same; return p.q_dtype == MLA_DTYPE_BF16;
        case MLA_CACHE_F16: format = Format::same; return p.q_dtype == MLA_DTYPE_F16;
        case MLA_CACHE_FP8: format = Format::e4m3; return true;
        case MLA_CACHE_FP8_DS_MLA: format = Format::ds_mla; return true;
        case MLA_CACHE_FP8_PER_TOKEN: format = Format::per_token; return true;
        case MLA_CACHE_F32: break;
    }
    return false;
}

// The format of a cache that the kernel takes.
Format format_of(const MlaSparseParams& p) {
    Format format = Format::same;
    format_of(p, format);
    return format;
}

bool is_width(int width) { return width >= 0 && width <= 8192; }

MlaStatus check_shape(const MlaSparseParams& p) {
    const bool bf16 = p.q_dtype == MLA_DTYPE_BF16, f16 = p.q_dtype == MLA_DTYPE_F16;
    Format format;
    return Check()
        .that(p.tokens >= 0 && p.tokens < 1 << 24, "tokens", p.tokens, "less than 2^24")
        .that(p.heads >= 1 && p.heads <= 128, "heads", p.heads, "1..=128")
        .that(is_width(p.width), "width", p.width, "0..=8192")
        .that(is_width(p.second.width), "second.width", p.second.width, "0..=8192")
        .that(p.latent_dim == kLatent, "latent_dim", p.latent_dim, "512")
        .that(p.rope_dim == 64 || p.rope_dim == 0, "rope_dim", p.rope_dim, "64 or 0")
        .that(bf16 || f16, "q_dtype", p.q_dtype, "MLA_DTYPE_BF16 (0) or MLA_DTYPE_F16 (1)")
        .that(format_of(p, format), "cache_format", p.cache_format,
              "the format of q_dtype, MLA_CACHE_FP8 (3), MLA_CACHE_FP8_DS_MLA (4) or "
              "MLA_CACHE_FP8_PER_TOKEN (5)")
        .status();
}

RowShape row_of(const MlaSparseParams& p) {
    return row_shape(p.cache_format, p.latent_dim, p.rope_dim);
}

// True if rotary keys lie in a tensor of their own.
bool is_split(const MlaSparseParams& p, const MlaListedCache& c) {
    return p.rope_dim > 0 && !is_one_row(c, row_of(p).rope_offset);
}

MlaListedCache first(const MlaSparseParams& p) {
    return {p.cache,
            p.cache_rope,
            p.lists,
            p.counts,
            p.cache_page_stride,
            p.cache_slot_stride,
            p.cache_rope_page_stride,
            p.cache_rope_slot_stride,
            p.list_stride,
            p.pages,
            p.width,
            p.page_size};
}

// The names of a listed cache's fields.
struct ListedNames {
    const char *cache, *lists, *counts, *pages, *page_size, *page_stride, *slot_stride,
        *list_stride, *rope, *rope_page_stride, *rope_slot_stride;
};
#define MLA_LISTED_NAMES(of)      \
    {of "cache",                  \
     of "lists",                  \
     of "counts",                 \
     of "pages",                  \
     of "page_size",              \
     of "cache_page_stride",      \
     of "cache_slot_stride",      \
     of "list_stride",            \
     of "cache_rope",             \
     of "cache_rope_page_stride", \
     of "cache_rope_slot_stride"}
constexpr ListedNames kFirst = MLA_LISTED_NAMES(""), kSecond = MLA_LISTED_NAMES("second.");
#undef MLA_LISTED_NAMES

void check_listed(Check& check, const MlaSparseParams& p, const MlaListedCache& c,
                  const ListedNames& names) {
    const bool split = is_split(p, c);
    const RowShape shape = row_of(p);
    const int64_t row = split ? shape.rope_offset : shape.bytes;
    check.that(c.page_size >= 1, names.page_size, c.page_size, "at least 1")
        .that(c.pages >= 1 && c.pages <= INT32_MAX, names.pages, c.pages, "1..=2147483647")
        .that(c.cache && is_aligned(c.cache, 16), names.cache, address(c.cache),
              "a device pointer aligned to 16 bytes")
        .that(c.cache_rope && is_aligned(c.cache_rope, 16), names.rope, address(c.cache_rope),
              "a device pointer aligned to 16 bytes")
        .that(!split || !is_scaled(p), names.rope, address(c.cache_rope),
              "behind the latent and its scales, at the strides of the rows")
        .that(is_aligned(c.counts, 4), names.counts, address(c.counts),
              "null, or a device pointer aligned to 4 bytes");
    const int64_t key = shape.bytes - shape.rope_offset;
    if (split && c.pages > 1)
        check
            .that(c.cache_rope_page_stride % 16 == 0, names.rope_page_stride,
                  c.cache_rope_page_stride, "a multiple of 16 bytes")
            .stride(c.cache_rope_page_stride, names.rope_page_stride, key);
    if (split && c.page_size > 1)
        check
            .that(c.cache_rope_slot_stride % 16 == 0, names.rope_slot_stride,
                  c.cache_rope_slot_stride, "a multiple of 16 bytes")
            .stride(c.cache_rope_slot_stride, names.rope_slot_stride, key);
    if (c.width > 0) check.pointer(c.lists, 4, names.lists);
    if (c.pages > 1)
        check
            .that(c.cache_page_stride % 16 == 0, names.page_stride, c.cache_page_stride,
                  "a multiple of 16 bytes")
            .stride(c.cache_page_stride, names.page_stride, row);
    if (c.page_size > 1)
        check
            .that(c.cache_slot_stride % 16 == 0, names.slot_stride, c.cache_slot_stride,
                  "a multiple of 16 bytes")
            .stride(c.cache_slot_stride, names.slot_stride, row);
    if (p.tokens > 1) check.stride(c.list_stride, names.list_stride, 0);
}

MlaStatus check(const MlaSparseParams& p) {
    Check check;
    check_listed(check, p, first(p), kFirst);
    if (p.second.width > 0) check_listed(check, p, p.second, kSecond);
    check.that(p.dense_within >= 0 && p.dense_within <= p.width, "dense_within", p.dense_within,
               "0 to width");
    if (p.dense_within > 0) {
        check.that(p.requests >= 1, "requests", p.requests, "at least 1")
            .pointer(p.block_table, 4, "block_table")
            .pointer(p.seq_lens, 4, "seq_lens")
            .pointer(p.query_starts, 4, "query_starts");
        if (p.requests > 1) check.stride(p.block_table_stride, "block_table_stride", 1);
    }
    const struct {
        const void* pointer;
        const char* name;
        bool used = true;
    } rows[] = {{p.q_latent, "q_latent"}, {p.q_rope, "q_rope", p.rope_dim > 0}, {p.out, "out"}};
    for (const auto& r : rows)
        check.that(!r.used || (r.pointer && is_aligned(r.pointer, 16)), r.name, address(r.pointer),
                   "a device pointer aligned to 16 bytes");
    const struct {
        const void* pointer;
        const char* name;
    } optional[] = {{p.sinks, "sinks"}, {p.lse, "lse"}};
    for (const auto& o : optional)
        check.that(is_aligned(o.pointer, 4), o.name, address(o.pointer),
                   "null, or a device pointer aligned to 4 bytes");
    // The stride of tokens may be anything if there is only one token, and the stride of heads if
    // there is only one head.
    const struct {
        int64_t stride;
        const char* name;
        int64_t min;
        bool used;
    } strides[] = {
        {p.q_latent_token_stride, "q_latent_token_stride", 0, p.tokens > 1},
        {p.q_latent_head_stride, "q_latent_head_stride", 0, p.heads > 1},
        {p.q_rope_token_stride, "q_rope_token_stride", 0, p.rope_dim > 0 && p.tokens > 1},
        {p.q_rope_head_stride, "q_rope_head_stride", 0, p.rope_dim > 0 && p.heads > 1},
        {p.out_token_stride, "out_token_stride", kLatent, p.tokens > 1},
        {p.out_head_stride, "out_head_stride", kLatent, p.heads > 1},
    };
    for (const auto& s : strides) {
        if (!s.used) continue;
        check.that(s.stride % 8 == 0, s.name, s.stride, "a multiple of 16 bytes")
            .stride(s.stride, s.name, s.min);
    }
    check
        .that(!p.lse || p.heads == 1 || p.lse_head_stride >= p.tokens, "lse_head_stride",
              p.lse_head_stride, "at least tokens")
        // Also refuses NaN.
        .that(p.softmax_scale > 0.f && p.softmax_scale < INFINITY, "softmax_scale",
              truncated(p.softmax_scale), "a finite number above 0")
        .that(p.cache_format != MLA_CACHE_FP8 ||
                  (p.cache_scale >= 0x1p-60f && p.cache_scale <= 0x1p60f),
              "cache_scale", truncated(p.cache_scale), "2^-60 to 2^60");
    return check.status();
}

int64_t width(const MlaSparseParams& p) { return int64_t(p.width) + p.second.width; }

Source source(const MlaListedCache& c) {
    Source s = {};
    // If a cache has no lists, its other fields are not read.
    if (c.width == 0) return s;
    s.cache = static_cast<const char*>(c.cache);
    s.lists = c.lists;
    s.counts = c.counts;
    s.list_stride = c.list_stride;
    s.width = c.width;
    s.page_stride = c.cache_page_stride;
    s.slot_stride = c.cache_slot_stride;
    // No entry names a slot past 2^31.
    s.slots = uint32_t(std::min(c.pages * c.page_size, int64_t(1) << 31));
    s.page_size = uint32_t(c.page_size);
    s.pages_adjoin = c.pages == 1 ||
                     (c.page_size == 1 ? c.cache_page_stride == c.cache_slot_stride
                                       : c.cache_page_stride == c.page_size * c.cache_slot_stride);
    return s;
}

KernelParams kernel_params(const MlaSparseParams& p) {
    KernelParams k = {};
    k.sources[0] = source(first(p));
    k.sources[1] = source(p.second);
    const MlaListedCache caches[] = {first(p), p.second};
    for (int i = 0; i < kSources; ++i) {
        const MlaListedCache& c = caches[i];
        if (c.width == 0) continue;
        k.split |= is_split(p, c);
        k.rope[i] = {static_cast<const char*>(c.cache_rope), c.cache_rope_page_stride,
                     c.cache_rope_slot_stride};
    }
    k.dense_within = p.dense_within;
    if (p.dense_within > 0) {
        k.block_table = p.block_table;
        k.seq_lens = p.seq_lens;
        k.query_starts = p.query_starts;
        k.block_table_stride = p.block_table_stride;
        k.requests = p.requests;
    }
    k.q_latent = p.q_latent;
    k.q_rope = p.q_rope;
    k.sinks = p.sinks;
    k.out = p.out;
    k.lse = p.lse;
    k.q_latent_token_stride = p.q_latent_token_stride;
    k.q_latent_head_stride = p.q_latent_head_stride;
    k.q_rope_token_stride = p.q_rope_token_stride;
    k.q_rope_head_stride = p.q_rope_head_stride;
    k.out_token_stride = p.out_token_stride;
    k.out_head_stride = p.out_head_stride;
    k.lse_head_stride = p.lse_head_stride;
    k.row_bytes = int(k.split ? row_of(p).rope_offset : row_of(p).bytes);
    // Maximum size of the rows that are read as evict-first. Dense decode has a bound, too.
    k.read_once = p.tokens * width(p) * row_of(p).bytes <= int64_t(192) << 20;
    k.tokens = p.tokens;
    k.heads = p.heads;
    k.width = int(width(p));
    const float cache_scale = p.cache_format == MLA_CACHE_FP8 ? p.cache_scale : 1.f;
    k.scale_log2 = p.softmax_scale * cache_scale * 1.44269504088896340736f;
    k.out_scale = cache_scale;
    return k;
}

template <typename T, int rope>
cudaError_t launch_format(Format format, const Launch& l, const KernelParams& k) {
    switch (format) {
        case Format::same: return launch_rows<T, SameRows<T, rope>>(l, k);
        case Format::e4m3: return launch_rows<T, E4m3Rows<rope>>(l, k);
        case Format::ds_mla: return launch_rows<T, DsMlaRows<rope>>(l, k);
        case Format::per_token: return launch_rows<T, PerTokenRows<rope>>(l, k);
    }
    return cudaErrorInvalidValue;
}

template <typename T>
cudaError_t launch_dtype(const MlaSparseParams& p, const Launch& l, const KernelParams& k) {
    return p.rope_dim > 0 ? launch_format<T, 64>(format_of(p), l, k)
                          : launch_format<T, 0>(format_of(p), l, k);
}

}  // namespace
}  // namespace mla::sm90::sparse

using namespace mla;
using namespace mla::sm90::sparse;

extern "C" MlaStatus mla_sparse_sm90(const MlaSparseParams* params, void* stream) {
    if (!params) return refuse("params", 0, "a pointer");
    MlaSparseParams p = *params;
    if (p.rope_dim == 0) p.cache_rope = p.second.cache_rope = nullptr;
    p = with_rope(p);
    p.second = with_rope(p.second, latent_bytes(p.cache_format, p.latent_dim));
    MlaStatus s = check_shape(p);
    if (s.code != MLA_OK) return s;
    DeviceFacts facts;
    s = remembered_sm90_facts(facts);
    if (s.code != MLA_OK) return s;
    if (p.tokens == 0) return ok();
    s = check(p);
    if (s.code != MLA_OK) return s;
    const KernelParams k = kernel_params(p);
    const Launch l = {facts.multiprocessors, facts.device, static_cast<cudaStream_t>(stream)};
    return cuda_status("cudaLaunchKernelEx", p.q_dtype == MLA_DTYPE_BF16
                                                 ? launch_dtype<__nv_bfloat16>(p, l, k)
                                                 : launch_dtype<__half>(p, l, k));
}

extern "C" MlaStatus mla_sparse_sm90_splits(const MlaSparseParams* params, const int32_t* clusters,
                                            int32_t* splits, int32_t* tile_heads) {
    if (!params) return refuse("params", 0, "a pointer");
    if (!clusters) return refuse("clusters", 0, "a pointer");
    if (!splits) return refuse("splits", 0, "a pointer");
    if (!tile_heads) return refuse("tile_heads", 0, "a pointer");
    const MlaStatus s = check_shape(*params);
    if (s.code != MLA_OK) return s;
    const SplitPlan own = split_plan(params->tokens, params->heads, int(width(*params)),
                                     format_of(*params) != Format::same,
                                     [&](int blocks) { return clusters[blocks - 1]; });
    *splits = own.launches.last().splits;
    *tile_heads = own.tile_heads;
    return ok();
}
