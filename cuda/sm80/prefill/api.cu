// The C interface of this kernel. It checks every argument, chooses the instantiation, and launches
// it.

#include "launch.cuh"
#include "sm80/device_limits.cuh"
#include "sm80/mla_sm80.h"

namespace mla::sm80::prefill {
namespace {

struct Dims {
    int nope, rope, value;
    bool operator==(const Dims& o) const {
        return nope == o.nope && rope == o.rope && value == o.value;
    }
};

constexpr Dims kDims[] = {{128, 64, 128}, {192, 64, 256}, {192, 64, 128},
                          {64, 64, 128},  {256, 0, 256},  {64, 32, 64}};

bool has_dims(const MlaPrefillParams& p) {
    for (const Dims& d : kDims)
        if (d == Dims{p.nope_dim, p.rope_dim, p.value_dim}) return true;
    return false;
}

MlaStatus check_kernel(const MlaPrefillParams& p) {
    Check check;
    check
        .that(has_dims(p), "nope_dim", p.nope_dim,
              "with rope_dim and value_dim (128, 64, 128), (192, 64, 256), (192, 64, 128), "
              "(64, 64, 128), (256, 0, 256) or (64, 32, 64)")
        .that(p.dtype == MLA_DTYPE_BF16 || p.dtype == MLA_DTYPE_F16, "dtype", p.dtype,
              "MLA_DTYPE_BF16 (0) or MLA_DTYPE_F16 (1)");
    return check.status();
}

MlaStatus check(const MlaPrefillParams& p, size_t workspace) {
    Check check;
    check
        .that(is_aligned(p.workspace, 256), "workspace", address(p.workspace),
              "null, or a device pointer aligned to 256 bytes")
        .that(!p.workspace || p.workspace_bytes >= workspace, "workspace_bytes",
              int64_t(p.workspace_bytes), "at least what mla_prefill_sm80_workspace says");
    check.that(p.heads >= 1, "heads", p.heads, "at least 1")
        .that(p.requests >= 1, "requests", p.requests, "at least 1")
        .that(p.query_tokens >= 0, "query_tokens", p.query_tokens, "0 or more")
        .that(p.key_tokens >= 0, "key_tokens", p.key_tokens, "0 or more")
        .that(p.max_query_len >= 0 && int64_t(p.max_query_len) * p.requests >= p.query_tokens,
              "max_query_len", p.max_query_len, "at least query_tokens / requests")
        .that(p.max_key_len >= 0, "max_key_len", p.max_key_len, "0 or more");
    const bool keys = p.key_tokens > 0;
    const struct {
        const void* pointer;
        const char* name;
        bool needed;
    } rows[] = {{p.query, "query", true},
                {p.key_nope, "key_nope", keys},
                {p.key_rope, "key_rope", keys && p.rope_dim > 0},
                {p.value, "value", keys},
                {p.out, "out", true}};
    for (const auto& r : rows)
        check.that((r.pointer || !r.needed) && is_aligned(r.pointer, 16), r.name,
                   address(r.pointer), "a device pointer aligned to 16 bytes");
    check.pointer(p.cu_query_lens, 4, "cu_query_lens")
        .pointer(p.cu_key_lens, 4, "cu_key_lens")
        .that(is_aligned(p.lse, 4), "lse", address(p.lse),
              "null, or a device pointer aligned to 4 bytes")
        .that(!p.lse || p.lse_head_stride >= p.query_tokens || p.heads == 1, "lse_head_stride",
              p.lse_head_stride, "at least query_tokens");
    const struct {
        int64_t stride;
        const char* name;
    } strides[] = {{p.query_token_stride, "query_token_stride"},
                   {p.query_head_stride, "query_head_stride"},
                   {p.key_nope_token_stride, "key_nope_token_stride"},
                   {p.key_nope_head_stride, "key_nope_head_stride"},
                   {p.key_rope_token_stride, "key_rope_token_stride"},
                   {p.key_rope_head_stride, "key_rope_head_stride"},
                   {p.value_token_stride, "value_token_stride"},
                   {p.value_head_stride, "value_head_stride"},
                   {p.out_token_stride, "out_token_stride"},
                   {p.out_head_stride, "out_head_stride"}};
    for (const auto& s : strides)
        check.that(s.stride >= 0 && s.stride % 8 == 0 && s.stride < int64_t(1) << 48, s.name,
                   s.stride, "0 or more and below 2^48, a multiple of 8 elements");
    // Also refuses NaN.
    check.that(p.softmax_scale > 0.f && p.softmax_scale < INFINITY, "softmax_scale",
               truncated(p.softmax_scale), "a finite number above 0");
    return check.status();
}

KernelParams kernel_params(const MlaPrefillParams& p) {
    KernelParams k = {};
    k.query = static_cast<const char*>(p.query);
    k.key_nope = static_cast<const char*>(p.key_nope);
    k.key_rope = static_cast<const char*>(p.key_rope);
    k.value = static_cast<const char*>(p.value);
    k.out = p.out;
    k.lse = p.lse;
    k.cu_query_lens = p.cu_query_lens;
    k.cu_key_lens = p.cu_key_lens;
    k.query_token_stride = p.query_token_stride * 2;
    k.query_head_stride = p.query_head_stride * 2;
    k.key_nope_token_stride = p.key_nope_token_stride * 2;
    k.key_nope_head_stride = p.key_nope_head_stride * 2;
    k.key_rope_token_stride = p.key_rope_token_stride * 2;
    k.key_rope_head_stride = p.key_rope_head_stride * 2;
    k.value_token_stride = p.value_token_stride * 2;
    k.value_head_stride = p.value_head_stride * 2;
    k.out_token_stride = p.out_token_stride * 2;
    k.out_head_stride = p.out_head_stride * 2;
    k.lse_head_stride = p.lse_head_stride;
    // With counters, keys are divided by the lengths of all requests.
    if (p.workspace && !p.batch_invariant) {
        k.counters = static_cast<int32_t*>(p.workspace);
        k.partials =
            reinterpret_cast<float*>(static_cast<char*>(p.workspace) + MLA_PREFILL_COUNTER_BYTES);
    }
    k.patience = kDefaultPatience;
    k.requests = p.requests;
    k.heads = p.heads;
    k.nope_dim = p.nope_dim;
    k.causal = p.causal != 0;
    k.scale_log2 = p.softmax_scale * 1.44269504088896340736f;
    return k;
}

template <typename T>
Variant variant_for(const MlaPrefillParams& p) {
    switch (p.nope_dim + p.rope_dim) {
        case 192: return variant_of<T, 192, 128>();
        case 256: return p.value_dim == 128 ? variant_of<T, 256, 128>() : variant_of<T, 256, 256>();
        case 128: return variant_of<T, 128, 128>();
        default: return variant_of<T, 96, 64>();
    }
}

Variant variant_for(const MlaPrefillParams& p, bool bf16) {
    return bf16 ? variant_for<__nv_bfloat16>(p) : variant_for<__half>(p);
}

}  // namespace
}  // namespace mla::sm80::prefill

using namespace mla;
using namespace mla::sm80;
using namespace mla::sm80::prefill;

extern "C" MlaStatus mla_prefill_sm80(const MlaPrefillParams* params, const MlaDeviceLimits* limits,
                                      void* stream) {
    if (!params) return refuse("params", 0, "a pointer");
    const MlaPrefillParams& p = *params;
    MlaStatus s = check_kernel(p);
    if (s.code != MLA_OK) return s;
    Limits device;
    s = device_limits(limits, device);
    if (s.code != MLA_OK) return s;
    const Variant variant = variant_for(p, p.dtype == MLA_DTYPE_BF16);
    s = check(p, variant.workspace_bytes(device));
    if (s.code != MLA_OK) return s;
    if (p.query_tokens == 0) return ok();
    KernelParams k = kernel_params(p);
    const Shape shape = {p.query_tokens, p.key_tokens,    p.requests,
                         p.heads,        p.max_query_len, p.max_key_len};
    return variant.launch(device, shape, k, static_cast<cudaStream_t>(stream));
}

extern "C" MlaStatus mla_prefill_sm80_workspace(const MlaPrefillParams* params,
                                                const MlaDeviceLimits* limits, size_t* bytes) {
    if (!params) return refuse("params", 0, "a pointer");
    if (!bytes) return refuse("bytes", 0, "a pointer");
    MlaStatus s = check_kernel(*params);
    if (s.code != MLA_OK) return s;
    Limits device;
    s = device_limits(limits, device);
    if (s.code == MLA_OK)
        *bytes = variant_for(*params, params->dtype == MLA_DTYPE_BF16).workspace_bytes(device);
    return s;
}

extern "C" MlaStatus mla_load_prefill_sm80(const MlaPrefillParams* params) {
    if (!params) return refuse("params", 0, "a pointer");
    MlaStatus s = check_kernel(*params);
    if (s.code != MLA_OK) return s;
    Limits device;
    s = device_limits(nullptr, device);
    if (s.code != MLA_OK) return s;
    return variant_for(*params, params->dtype == MLA_DTYPE_BF16).load(device);
}
