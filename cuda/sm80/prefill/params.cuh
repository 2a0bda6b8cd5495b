// The kernel's parameters.
#pragma once

#include <cstdint>

namespace mla::sm80::prefill {

struct KernelParams {
    const char* query;     // [query_tokens, heads, nope + rope]
    const char* key_nope;  // [key_tokens, heads, nope]
    const char* key_rope;  // [key_tokens, heads, rope]; head stride 0 if all heads share it
    const char* value;     // [key_tokens, heads, value_dim]
    void* out;             // [query_tokens, heads, value_dim]
    float* lse;            // [heads, query_tokens], or null
    const int* cu_query_lens;
    const int* cu_key_lens;
    // Strides in bytes, except for the log-sum-exp's.
    int64_t query_token_stride, query_head_stride;
    int64_t key_nope_token_stride, key_nope_head_stride;
    int64_t key_rope_token_stride, key_rope_head_stride;
    int64_t value_token_stride, value_head_stride;
    int64_t out_token_stride, out_head_stride;
    int64_t lse_head_stride;
    int requests, heads;
    // Columns of a key that come from key_nope.
    int nope_dim;
    // Maximum number of query tiles, and number of heads whose tiles are done side by side.
    int tiles, head_group;
    int causal;
    // Number of CTAs that divide the keys of a tile, or 0 if that depends on the request. They
    // combine through `counters` and `partials`, and wait for each other for at most `patience`
    // cycles.
    int splits;
    int32_t* counters;  // [kMaxCounters] SplitCounters, zero before and after
    float* partials;    // [CTAs][kPartialFloats]
    int64_t patience;
    // softmax_scale * log2(e)
    float scale_log2;
    // Maximum number of query tiles of one request.
    int max_request_tiles;
    // Number of CTAs that run at the same time, and maximum number of CTAs that may divide keys if
    // `splits` is 0.
    int slots, max_split_ctas;
};

}  // namespace mla::sm80::prefill
