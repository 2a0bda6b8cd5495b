// The lengths of a batch's requests.
#pragma once

#include "../../common/lanes.cuh"
#include "../../include/mla.h"
#include "config.cuh"
#include "params.cuh"

namespace mla::sm90::prefill {

// True if the host's numbers imply that all requests are as long as the bounds.
inline bool host_says_uniform(const MlaPrefillParams& p) {
    return p.max_key_len > 0 && int64_t(p.requests) * p.max_query_len == p.query_tokens &&
           int64_t(p.requests) * p.max_key_len == p.key_tokens;
}

struct Lengths {
    const int *cu_q, *cu_k;  // [requests + 1]
    int requests, heads;
    // Maximum number of query tiles of a request.
    int max_request_tiles;
    int max_query_len, max_key_len;
    int causal;

    __host__ __device__ explicit Lengths(const KernelParams& p)
        : cu_q(p.cu_q),
          cu_k(p.cu_k),
          requests(p.requests),
          heads(p.heads),
          max_request_tiles(p.max_request_tiles),
          max_query_len(p.max_query_len),
          max_key_len(p.max_key_len),
          causal(p.causal) {}

    // Maximum number of rows of a query tile.
    __host__ __device__ int rows() const {
        return max_query_len < kQueries ? max_query_len : kQueries;
    }

    // True if every request is as long as the bounds.
    __host__ __device__ bool are_uniform() const {
        bool same = true;
#pragma unroll 1
        for (int at = Lanes::own(); at <= requests; at += Lanes::kCount) {
            same = same && as_expected(at, cu_q[at], cu_k[at]);
        }
        return Lanes::all(same);
    }

    // True if `q` query and `k` key rows precede request `at` when all requests are as long as the
    // bounds.
    __host__ __device__ bool as_expected(int at, int q, int k) const {
        return q == at * max_query_len && k == at * max_key_len;
    }
};

}  // namespace mla::sm90::prefill
