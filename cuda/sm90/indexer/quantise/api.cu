#include "../../../ptx/sm90.cuh"
#include "../launch.cuh"
#include "check.cuh"
#include "sm90/mla_sm90.h"

namespace mla::sm90::quantise {

namespace {

__global__ void __launch_bounds__(kThreads)
    keys_kernel(const __grid_constant__ MlaIndexKeysParams p) {
    ptx::griddepcontrol_wait();
    write_keys(p, blockIdx.x);
}

__global__ void __launch_bounds__(kThreads)
    queries_kernel(const __grid_constant__ MlaIndexQueriesParams p) {
    ptx::griddepcontrol_wait();
    // The next kernel is released only after the wait. When it starts, everything that was written
    // before this kernel began is therefore complete.
    ptx::griddepcontrol_launch_dependents();
    write_queries(p, blockIdx.x);
}

// Launches either kernel, if there are tokens and the parameters are accepted.
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
