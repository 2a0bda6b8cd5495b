#include "../../../ptx/sm90.cuh"
#include "../launch.cuh"
#include "check.cuh"
#include "sm90/mla_sm90.h"

namespace mla::sm90::quantise {

static MlaStatus check(const MlaIndexQueriesParams& p) {
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

namespace {

__global__ void __launch_bounds__(kThreads)
    keys_kernel(const __grid_constant__ MlaIndexKeysParams p) {
    ptx::griddepcontrol_wait();
    write_keys(p, blockIdx.x);
}

__global__ void __launch_bounds__(kThreads)
    queries_kernel(const __grid_constant__ MlaIndexQueriesParams p) {
    const int lane = threadIdx.x % 32;
    const int64_t row = int64_t(blockIdx.x) * kRows + threadIdx.x / 32;
    if (row >= int64_t(p.tokens) * p.heads) return;
    const int64_t token = row / p.heads, head = row % p.heads;
    ptx::griddepcontrol_wait();
    // Not earlier: so the next kernel finds complete what was there before this one began.
    ptx::griddepcontrol_launch_dependents();
    Values v;
    v.load(p.queries, token * p.query_token_stride + head * p.query_head_stride, p.queries_dtype,
           lane);
    write_query(p, v, token, head, lane);
}

// Common to both: where a launch is possible at all.
template <typename Params, typename Kernel>
MlaStatus enqueue(const Params* params, const char* name, Kernel kernel, int64_t rows_each,
                  void* stream) {
    const Params& p = *params;
    MlaStatus s = check_tokens(p.tokens);
    if (s.code != MLA_OK || p.tokens == 0) return s;
    s = check(p);
    if (s.code != MLA_OK) return s;
    const dim3 ctas(unsigned(ceil_div(p.tokens * rows_each, kRows)));
    return indexer::launch_early(name, kernel, {ctas, kThreads}, stream, p);
}

}  // namespace
}  // namespace mla::sm90::quantise

using namespace mla;
using namespace mla::sm90::quantise;

extern "C" MlaStatus mla_index_keys_sm90(const MlaIndexKeysParams* params, void* stream) {
    if (!params) return refuse("params", 0, "a pointer");
    return enqueue(params, "index keys", &keys_kernel, 1, stream);
}

extern "C" MlaStatus mla_index_queries_sm90(const MlaIndexQueriesParams* params, void* stream) {
    if (!params) return refuse("params", 0, "a pointer");
    return enqueue(params, "index queries", &queries_kernel, params->heads, stream);
}
