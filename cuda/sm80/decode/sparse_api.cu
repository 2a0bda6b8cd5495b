// The C interface of sparse attention. Every query token is a request of one token, and its list of
// slots takes the place of a block table.

#include "sm80/device_limits.cuh"
#include "sm80/mla_sm80.h"
#include "variants.cuh"

namespace mla::sm80::decode {
namespace {

Kind kind_of(const MlaSparseParams& p) {
    return {p.q_dtype == MLA_DTYPE_BF16, p.latent_dim, cache_format(p.cache_format)};
}

// The scheduler counts the KV tiles of all tiles of rows in 31 bits, whatever the lengths are.
bool within_capacity(const MlaSparseParams& p) {
    return int64_t(p.tokens) * ceil_div(p.heads, 16) * (p.width / 16 + 4) <= INT32_MAX;
}

MlaStatus check_shape(const MlaSparseParams& p) {
    const bool bf16 = p.q_dtype == MLA_DTYPE_BF16, f16 = p.q_dtype == MLA_DTYPE_F16;
    const bool plain = p.cache_format == (bf16 ? MLA_CACHE_BF16 : MLA_CACHE_F16);
    Check check;
    check.that(p.tokens >= 0 && p.tokens < 1 << 24, "tokens", p.tokens, "less than 2^24")
        .that(p.heads >= 1 && p.heads <= 128, "heads", p.heads, "1..=128")
        .that(p.width >= 0 && p.width <= 8192, "width", p.width, "0..=8192")
        .that(p.second.width == 0, "second.width", p.second.width, "0")
        .that(p.dense_within == 0, "dense_within", p.dense_within, "0")
        .that(p.latent_dim == 512, "latent_dim", p.latent_dim, "512")
        .that(p.rope_dim == 64 || p.rope_dim == 0, "rope_dim", p.rope_dim, "64 or 0")
        .that(bf16 || f16, "q_dtype", p.q_dtype, "MLA_DTYPE_BF16 (0) or MLA_DTYPE_F16 (1)")
        .that(plain || p.cache_format == MLA_CACHE_FP8 || is_scaled(p), "cache_format",
              p.cache_format, kAcceptedFormats);
    if (is_scaled(p)) check.that(p.rope_dim == 64, "rope_dim", p.rope_dim, "64");
    if (!check.failed())
        check.that(within_capacity(p), "tokens", p.tokens,
                   "less than 2^31 tiles of 16 entries over all tokens and tiles of 16 heads");
    return check.status();
}

MlaStatus check(const MlaSparseParams& p, const void* workspace, size_t bytes, size_t needed) {
    const int64_t key = key_bytes(p), latent = latent_bytes(p.cache_format, p.latent_dim);
    const bool split = is_split(p);
    const int64_t row = split ? latent : latent + key;
    Check check;
    check.that(p.page_size >= 1, "page_size", p.page_size, "at least 1")
        .that(p.pages >= 1 && p.pages <= INT32_MAX, "pages", p.pages, "1..=2147483647");
    const struct {
        const void* pointer;
        const char* name;
        bool used = true;
    } rows[] = {{p.q_latent, "q_latent"},
                {p.q_rope, "q_rope", p.rope_dim > 0},
                {p.cache, "cache"},
                {p.out, "out"}};
    for (const auto& r : rows)
        check.that(!r.used || (r.pointer && is_aligned(r.pointer, 16)), r.name, address(r.pointer),
                   "a device pointer aligned to 16 bytes");
    if (p.width > 0) check.pointer(p.lists, 4, "lists");
    const struct {
        const void* pointer;
        const char* name;
    } optional[] = {{p.counts, "counts"}, {p.sinks, "sinks"}, {p.lse, "lse"}};
    for (const auto& o : optional)
        check.that(is_aligned(o.pointer, 4), o.name, address(o.pointer),
                   "null, or a device pointer aligned to 4 bytes");
    // A stride may be anything if its axis has only one element.
    const struct {
        int64_t stride;
        const char* name;
        int64_t min, quantum;
        bool used;
    } strides[] = {
        {p.q_latent_token_stride, "q_latent_token_stride", 0, 8, p.tokens > 1},
        {p.q_latent_head_stride, "q_latent_head_stride", 0, 8, p.heads > 1},
        {p.q_rope_token_stride, "q_rope_token_stride", 0, 8, p.rope_dim > 0 && p.tokens > 1},
        {p.q_rope_head_stride, "q_rope_head_stride", 0, 8, p.rope_dim > 0 && p.heads > 1},
        {p.out_token_stride, "out_token_stride", p.latent_dim, 8, p.tokens > 1},
        {p.out_head_stride, "out_head_stride", p.latent_dim, 8, p.heads > 1},
        {p.cache_page_stride, "cache_page_stride", row, 16, p.pages > 1},
        {p.cache_slot_stride, "cache_slot_stride", row, 16, p.page_size > 1},
        {p.cache_rope_page_stride, "cache_rope_page_stride", key, 16, split && p.pages > 1},
        {p.cache_rope_slot_stride, "cache_rope_slot_stride", key, 16, split && p.page_size > 1},
        {p.list_stride, "list_stride", 0, 1, p.tokens > 1},
    };
    for (const auto& s : strides) {
        if (!s.used) continue;
        check.that(s.stride % s.quantum == 0, s.name, s.stride, "a multiple of 16 bytes")
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
              "cache_scale", truncated(p.cache_scale), "2^-60 to 2^60")
        .that(!split || (!is_scaled(p) && is_aligned(p.cache_rope, 16)), "cache_rope",
              address(p.cache_rope), accepted_rope(p))
        .that(workspace && is_aligned(workspace, 256), "workspace", address(workspace),
              "a device pointer aligned to 256 bytes")
        .that(bytes >= needed, "workspace_bytes", int64_t(bytes),
              "at least what mla_sparse_sm80_workspace says");
    return check.status();
}

KernelParams kernel_params(const MlaSparseParams& p, void* workspace) {
    KernelParams k = {};
    k.q_latent = p.q_latent;
    k.q_rope = p.q_rope;
    k.cache = static_cast<const char*>(p.cache);
    k.cache_rope = static_cast<const char*>(p.cache_rope);
    k.split = is_split(p);
    k.out = p.out;
    k.lse = p.lse;
    k.block_table = p.lists;
    k.kv_lens = p.counts;
    k.sinks = p.sinks;
    k.set_workspace(workspace);
    k.q_latent_token_stride = p.q_latent_token_stride;
    k.q_latent_head_stride = p.q_latent_head_stride;
    k.q_rope_token_stride = p.q_rope_token_stride;
    k.q_rope_head_stride = p.q_rope_head_stride;
    k.out_token_stride = p.out_token_stride;
    k.out_head_stride = p.out_head_stride;
    k.lse_head_stride = p.lse_head_stride;
    k.cache_page_stride = p.cache_page_stride;
    k.cache_slot_stride = p.cache_slot_stride;
    k.cache_rope_page_stride = p.cache_rope_page_stride;
    k.cache_rope_slot_stride = p.cache_rope_slot_stride;
    k.block_table_stride = p.list_stride;
    k.slots = p.pages * p.page_size;
    k.requests = p.tokens;
    k.heads = p.heads;
    k.query_len = 1;
    k.max_kv_len = p.width;
    k.page_size = p.page_size;
    k.page_shift = shift_of(p.page_size);
    k.rope_dim = p.rope_dim;
    k.sparse = true;
    const float cache_scale = p.cache_format == MLA_CACHE_FP8 ? p.cache_scale : 1.f;
    k.scale_log2 = p.softmax_scale * cache_scale * kLog2E;
    k.out_scale = cache_scale;
    return k;
}

// First steps of every entry point: checks the shape and takes the device's limits.
MlaStatus begin(const MlaSparseParams& p, const MlaDeviceLimits* limits, Limits& device) {
    const MlaStatus s = check_shape(p);
    return s.code == MLA_OK ? device_limits(limits, device) : s;
}

}  // namespace
}  // namespace mla::sm80::decode

using namespace mla;
using namespace mla::sm80;
using namespace mla::sm80::decode;

extern "C" MlaStatus mla_sparse_sm80_workspace(const MlaSparseParams* params,
                                               const MlaDeviceLimits* limits, size_t* bytes) {
    if (!params) return refuse("params", 0, "a pointer");
    if (!bytes) return refuse("bytes", 0, "a pointer");
    Limits device;
    const MlaStatus s = begin(*params, limits, device);
    if (s.code != MLA_OK) return s;
    *bytes = 0;
    return max_workspace(kind_of(*params), device, params->heads, params->rope_dim, *bytes);
}

extern "C" MlaStatus mla_sparse_sm80(const MlaSparseParams* params, const MlaDeviceLimits* limits,
                                     void* workspace, size_t workspace_bytes, void* stream) {
    if (!params) return refuse("params", 0, "a pointer");
    const MlaSparseParams p = with_rope(*params);
    Limits device;
    MlaStatus s = begin(p, limits, device);
    if (s.code != MLA_OK || p.tokens == 0) return s;
    const Shape shape = {p.heads, p.rope_dim, int(p.tokens), p.width, is_split(p)};
    const Variant variant = variant_for(kind_of(p), device, shape);
    Fit f;
    s = variant.fit(device, shape, f);
    if (s.code != MLA_OK) return s;
    s = check(p, workspace, workspace_bytes, f.workspace_bytes);
    if (s.code != MLA_OK) return s;
    KernelParams k = kernel_params(p, workspace);
    return variant.launch(device, shape, k, static_cast<cudaStream_t>(stream));
}
