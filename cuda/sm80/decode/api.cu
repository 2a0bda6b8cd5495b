// The C interface of this kernel. It checks every argument, chooses the instantiation, and launches
// it.

#include "sm80/device_limits.cuh"
#include "sm80/mla_sm80.h"
#include "variants.cuh"

namespace mla::sm80::decode {
namespace {

static_assert(kCounterBytes == MLA_DECODE_SM80_COUNTER_BYTES,
              "mla_sm80.h states the counters' length");

// Bytes of one element of the cache.
int element_of(const MlaDecodeParams& p) {
    return cache_format(p.cache_format) == CacheFormat::plain ? 2 : 1;
}

Kind kind_of(const MlaDecodeParams& p) {
    return {p.q_dtype == MLA_DTYPE_BF16, p.latent_dim, cache_format(p.cache_format)};
}

Shape shape_of(const MlaDecodeParams& p) {
    return {p.query_len * p.heads, p.rope_dim, p.requests, int64_t(p.max_pages) * p.page_size,
            is_split(p),           p.batch_invariant != 0};
}

MlaStatus check_shape(const MlaDecodeParams& p) {
    const bool bf16 = p.q_dtype == MLA_DTYPE_BF16, f16 = p.q_dtype == MLA_DTYPE_F16;
    const bool plain = p.cache_format == (bf16 ? MLA_CACHE_BF16 : MLA_CACHE_F16);
    const bool scaled = is_scaled(p);
    Check check;
    check.that(p.heads >= 1 && p.heads <= 128, "heads", p.heads, "1..=128")
        .that(p.query_len >= 1 && p.query_len <= 16, "query_len", p.query_len, "1..=16")
        .that(p.requests >= 1 && p.requests <= 65535, "requests", p.requests, "1..=65535")
        .that(p.latent_dim == 512 || p.latent_dim == 256, "latent_dim", p.latent_dim, "512 or 256");
    if (p.latent_dim == 512)
        check.that(p.rope_dim == 64 || p.rope_dim == 0, "rope_dim", p.rope_dim, "64 or 0");
    else
        check.that(p.rope_dim == 64 || p.rope_dim == 32, "rope_dim", p.rope_dim, "64 or 32");
    check.that(bf16 || f16, "q_dtype", p.q_dtype, "MLA_DTYPE_BF16 (0) or MLA_DTYPE_F16 (1)")
        .that(plain || p.cache_format == MLA_CACHE_FP8 || scaled, "cache_format", p.cache_format,
              kAcceptedFormats);
    if (scaled)
        check.that(p.latent_dim == 512, "latent_dim", p.latent_dim, "512")
            .that(p.rope_dim == 64, "rope_dim", p.rope_dim, "64");
    return check.status();
}

// The scheduler counts the KV tiles of all tiles of rows in 31 bits, whatever the lengths are.
void check_capacity(Check& check, const MlaDecodeParams& p) {
    const int64_t tokens = int64_t(p.max_pages) * p.page_size;
    const int64_t tiles = ceil_div(p.query_len * p.heads, 16);
    // The constant cost of up to four KV tiles, once or for each of a tile's own splits.
    const int64_t constant = p.batch_invariant ? 4 * OwnSplits::kMax : 4;
    check.that(
        tokens <= INT32_MAX - 64 &&
            int64_t(p.requests) * tiles * (tokens / 16 + constant) <= INT32_MAX,
        "max_pages", p.max_pages,
        "less than 2^31 tokens per request, and less than 2^31 tiles of 16 tokens over all "
        "requests "
        "and tiles of 16 query rows");
}

void check_batch(Check& check, const MlaDecodeParams& p) {
    check
        .that(p.tokens >= 0 && p.tokens <= int64_t(p.requests) * p.query_len, "tokens", p.tokens,
              "at most requests * query_len")
        .that(p.cu_q_lens || p.tokens == p.requests * p.query_len, "tokens", p.tokens,
              "requests * query_len, since cu_q_lens is null")
        .that(p.page_size >= 16 && p.page_size % 16 == 0, "page_size", p.page_size,
              "a positive multiple of 16")
        .that(p.pages >= 1 && p.pages <= INT32_MAX, "pages", p.pages, "1..=2147483647")
        .that(p.max_pages >= 1, "max_pages", p.max_pages, "at least 1");
    if (!check.failed()) check_capacity(check, p);
    check.that(p.block_table_stride >= p.max_pages || p.requests == 1, "block_table_stride",
               p.block_table_stride, "at least max_pages");
}

void check_pointers(Check& check, const MlaDecodeParams& p) {
    const struct {
        const void* pointer;
        const char* name;
        int64_t bytes;
    } pointers[] = {{p.q_latent, "q_latent", 16}, {p.cache, "cache", 16},
                    {p.out, "out", 16},           {p.block_table, "block_table", 4},
                    {p.kv_lens, "kv_lens", 4},    {p.workspace, "workspace", 256}};
    for (const auto& x : pointers)
        check.that(x.pointer && is_aligned(x.pointer, x.bytes), x.name, address(x.pointer),
                   x.bytes == 16    ? "a device pointer aligned to 16 bytes"
                   : x.bytes == 256 ? "a device pointer aligned to 256 bytes"
                                    : "a device pointer aligned to 4 bytes");
    check
        .that(p.rope_dim == 0 || (p.q_rope && is_aligned(p.q_rope, 16)), "q_rope",
              address(p.q_rope), "a device pointer aligned to 16 bytes")
        .that(!is_split(p) || (!is_scaled(p) && is_aligned(p.cache_rope, 16)), "cache_rope",
              address(p.cache_rope), accepted_rope(p))
        .that(is_aligned(p.cu_q_lens, 4), "cu_q_lens", address(p.cu_q_lens),
              "null, or a device pointer aligned to 4 bytes")
        .that(is_aligned(p.lse, 4), "lse", address(p.lse),
              "null, or a device pointer aligned to 4 bytes")
        .that(!p.lse || p.lse_head_stride >= p.tokens || p.heads == 1, "lse_head_stride",
              p.lse_head_stride, "at least tokens");
}

void check_strides(Check& check, const MlaDecodeParams& p) {
    const struct {
        int64_t stride;
        const char* name;
    } strides[] = {{p.q_latent_token_stride, "q_latent_token_stride"},
                   {p.q_latent_head_stride, "q_latent_head_stride"},
                   {p.q_rope_token_stride, "q_rope_token_stride"},
                   {p.q_rope_head_stride, "q_rope_head_stride"},
                   {p.out_token_stride, "out_token_stride"},
                   {p.out_head_stride, "out_head_stride"}};
    for (const auto& s : strides)
        check.that(s.stride >= 0 && s.stride % 8 == 0, s.name, s.stride,
                   "0 or more, a multiple of 16 bytes, in elements");
    const int64_t element = element_of(p);
    const int64_t key = key_bytes(p), latent = latent_bytes(p.cache_format, p.latent_dim);
    const struct {
        int64_t slot, page, bytes;
        const char *slot_name, *page_name;
    } tensors[] = {{p.cache_slot_stride, p.cache_page_stride, is_split(p) ? latent : latent + key,
                    "cache_slot_stride", "cache_page_stride"},
                   {p.cache_rope_slot_stride, p.cache_rope_page_stride, key,
                    "cache_rope_slot_stride", "cache_rope_page_stride"}};
    for (const auto& t : tensors) {
        if (t.bytes == 0) continue;
        for (const auto& [stride, name] :
             {std::pair{t.slot, t.slot_name}, std::pair{t.page, t.page_name}})
            check.that(stride >= t.bytes / element && stride % (16 / element) == 0, name, stride,
                       "at least a row, a multiple of 16 bytes, in elements");
        check
            .that(t.slot < (int64_t(1) << 27) / element, t.slot_name, t.slot,
                  "less than 2^27 bytes, in elements")
            .that(t.page < int64_t(1) << 48, t.page_name, t.page, "less than 2^48");
    }
}

MlaStatus check(const MlaDecodeParams& p, size_t workspace) {
    Check check;
    check_batch(check, p);
    check_pointers(check, p);
    check_strides(check, p);
    check
        .that(p.cache_format != MLA_CACHE_FP8 ||
                  (p.cache_scale >= 0x1p-60f && p.cache_scale <= 0x1p60f),
              "cache_scale", truncated(p.cache_scale), "2^-60 to 2^60")
        // Also refuses NaN.
        .that(p.softmax_scale > 0.f && p.softmax_scale < INFINITY, "softmax_scale",
              truncated(p.softmax_scale), "a finite number above 0")
        .that(p.workspace_bytes >= workspace, "workspace_bytes", int64_t(p.workspace_bytes),
              "at least what mla_decode_sm80_workspace says");
    return check.status();
}

KernelParams kernel_params(const MlaDecodeParams& p) {
    const int element = element_of(p);
    KernelParams k = {};
    k.q_latent = p.q_latent;
    k.q_rope = p.q_rope;
    k.cache = static_cast<const char*>(p.cache);
    k.cache_rope = static_cast<const char*>(p.cache_rope);
    k.split = is_split(p);
    k.out = p.out;
    k.lse = p.lse;
    k.block_table = p.block_table;
    k.kv_lens = p.kv_lens;
    k.cu_q_lens = p.cu_q_lens;
    k.set_workspace(p.workspace);
    k.q_latent_token_stride = p.q_latent_token_stride;
    k.q_latent_head_stride = p.q_latent_head_stride;
    k.q_rope_token_stride = p.q_rope_token_stride;
    k.q_rope_head_stride = p.q_rope_head_stride;
    k.out_token_stride = p.out_token_stride;
    k.out_head_stride = p.out_head_stride;
    k.lse_head_stride = p.lse_head_stride;
    k.cache_page_stride = p.cache_page_stride * element;
    k.cache_slot_stride = p.cache_slot_stride * element;
    k.cache_rope_page_stride = p.cache_rope_page_stride * element;
    k.cache_rope_slot_stride = p.cache_rope_slot_stride * element;
    k.block_table_stride = p.block_table_stride;
    k.slots = p.pages * p.page_size;
    k.requests = p.requests;
    k.heads = p.heads;
    k.query_len = p.query_len;
    k.max_kv_len = INT32_MAX;
    k.page_size = p.page_size;
    k.page_shift = shift_of(p.page_size);
    k.rope_dim = p.rope_dim;
    k.causal = p.causal != 0;
    const float cache_scale = p.cache_format == MLA_CACHE_FP8 ? p.cache_scale : 1.f;
    k.scale_log2 = p.softmax_scale * cache_scale * kLog2E;
    k.out_scale = cache_scale;
    k.patience = p.split_patience;
    return k;
}

}  // namespace
}  // namespace mla::sm80::decode

using namespace mla;
using namespace mla::sm80;
using namespace mla::sm80::decode;

extern "C" MlaStatus mla_decode_sm80_workspace(const MlaDecodeParams* params,
                                               const MlaDeviceLimits* limits, size_t* bytes) {
    if (!params) return refuse("params", 0, "a pointer");
    if (!bytes) return refuse("bytes", 0, "a pointer");
    MlaStatus s = check_shape(*params);
    if (s.code != MLA_OK) return s;
    Check capacity;
    if (params->max_pages > 0) check_capacity(capacity, *params);
    if (capacity.failed()) return capacity.status();
    Limits device;
    s = device_limits(limits, device);
    if (s.code != MLA_OK) return s;
    // Shorter requests may get an instantiation with more CTAs. Batch-invariant ones do not.
    *bytes = 0;
    const bool own = params->batch_invariant;
    const int64_t most = int64_t(params->max_pages) * params->page_size,
                  longest = !own ? 1 : most > 0 ? most : INT32_MAX;
    for (int query_len = own ? params->query_len : 1; query_len <= params->query_len; ++query_len) {
        const int rows = query_len * params->heads;
        s = max_workspace(kind_of(*params), device, rows, params->rope_dim, *bytes, own, longest);
        if (s.code != MLA_OK) return s;
    }
    return ok();
}

extern "C" MlaStatus mla_decode_sm80(const MlaDecodeParams* params, const MlaDeviceLimits* limits,
                                     void* stream) {
    if (!params) return refuse("params", 0, "a pointer");
    const MlaDecodeParams p = with_rope(*params);
    MlaStatus s = check_shape(p);
    if (s.code != MLA_OK) return s;
    Limits device;
    s = device_limits(limits, device);
    if (s.code != MLA_OK) return s;
    const Shape shape = shape_of(p);
    const Variant variant = variant_for(kind_of(p), device, shape);
    Fit f;
    s = variant.fit(device, shape, f);
    if (s.code != MLA_OK) return s;
    s = check(p, f.workspace_bytes);
    if (s.code != MLA_OK) return s;
    if (p.tokens == 0) return ok();
    KernelParams k = kernel_params(p);
    return variant.launch(device, shape, k, static_cast<cudaStream_t>(stream));
}
