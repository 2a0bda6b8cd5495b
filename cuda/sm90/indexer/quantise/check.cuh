// Checks of the parameters of index keys and queries.
#pragma once

#include "../../../common/device.cuh"
#include "rows.cuh"

namespace mla::sm90::quantise {

inline bool is_dtype(int dtype) {
    return dtype == MLA_DTYPE_BF16 || dtype == MLA_DTYPE_F16 || dtype == MLA_DTYPE_F32;
}

constexpr const char* kDtypes = "MLA_DTYPE_BF16 (0), MLA_DTYPE_F16 (1) or MLA_DTYPE_F32 (3)";

inline void check_rotary(Check& check, const MlaIndexRotary& r) {
    if (!r.positions) return;
    check.pointer(r.positions, 8, "positions")
        .pointer(r.cos, 4, "cos")
        .pointer(r.sin, 4, "sin")
        .that(r.style == MLA_ROTARY_INTERLEAVED || r.style == MLA_ROTARY_HALVES, "style", r.style,
              "MLA_ROTARY_INTERLEAVED or MLA_ROTARY_HALVES")
        .that(r.positions_len >= 1, "positions_len", r.positions_len, "at least 1");
    if (r.positions_len > 1) check.stride(r.table_stride, "table_stride");
}

inline MlaStatus check(const MlaIndexKeysParams& p) {
    Check check;
    check.that(p.width == kWidth, "width", p.width, "128")
        .that(is_dtype(p.keys_dtype), "keys_dtype", p.keys_dtype, kDtypes)
        .that(is_dtype(p.norm_weight_dtype), "norm_weight_dtype", p.norm_weight_dtype, kDtypes)
        .that(is_dtype(p.norm_bias_dtype), "norm_bias_dtype", p.norm_bias_dtype, kDtypes)
        .that(p.epsilon >= 0.f && p.epsilon < INFINITY, "epsilon", truncated(p.epsilon),
              "a finite number, 0 or above")
        .that(p.page_size >= 1, "page_size", p.page_size, "at least 1")
        .that(p.pages >= 1 && p.pages <= INT32_MAX, "pages", p.pages, "1..=2147483647")
        .pointer(p.keys, p.keys_dtype == MLA_DTYPE_F32 ? 4 : 2, "keys")
        .pointer(p.norm_weight, p.norm_weight_dtype == MLA_DTYPE_F32 ? 4 : 2, "norm_weight")
        .pointer(p.norm_bias, p.norm_bias_dtype == MLA_DTYPE_F32 ? 4 : 2, "norm_bias")
        .pointer(p.slots, 8, "slots")
        .pointer(p.cache, 4, "cache");
    if (p.tokens > 1) check.stride(p.key_stride, "key_stride");
    if (p.pages > 1)
        check.that(p.page_stride % 4 == 0, "page_stride", p.page_stride, "a multiple of 4 bytes")
            .stride(p.page_stride, "page_stride", int64_t(p.page_size) * (kWidth + 4));
    check_rotary(check, p.rotary);
    return check.status();
}

inline MlaStatus check(const MlaIndexQueriesParams& p) {
    Check check;
    check.that(p.width == kWidth, "width", p.width, "128")
        .that(p.heads >= 1 && p.heads <= 1024, "heads", p.heads, "1..=1024")
        .that(is_dtype(p.queries_dtype), "queries_dtype", p.queries_dtype, kDtypes)
        .that(is_dtype(p.head_weights_dtype), "head_weights_dtype", p.head_weights_dtype, kDtypes)
        .pointer(p.queries, p.queries_dtype == MLA_DTYPE_F32 ? 4 : 2, "queries")
        .pointer(p.head_weights, p.head_weights_dtype == MLA_DTYPE_F32 ? 4 : 2, "head_weights")
        .pointer(p.values, 4, "values")
        .pointer(p.weights, 4, "weights");
    if (p.tokens > 1)
        check.stride(p.query_token_stride, "query_token_stride")
            .stride(p.head_weight_stride, "head_weight_stride");
    if (p.heads > 1) check.stride(p.query_head_stride, "query_head_stride");
    check_rotary(check, p.rotary);
    return check.status();
}

inline MlaStatus check_tokens(int tokens) {
    const MlaStatus s =
        Check().that(tokens >= 0 && tokens < 1 << 24, "tokens", tokens, "less than 2^24").status();
    DeviceFacts facts;
    return s.code == MLA_OK ? sm90_facts(facts) : s;
}

}  // namespace mla::sm90::quantise
