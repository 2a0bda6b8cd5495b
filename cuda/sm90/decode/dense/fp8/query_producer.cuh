// With an e4m3 cache, the score warps fetch the queries (scores.cuh). This warp therefore has
// nothing to do after it has warmed up.
#pragma once

#include "../context.cuh"

namespace mla::sm90::decode {

template <class C>
struct Fp8QueryProducer {
    const Context<C>& c;

    __device__ void prefetch_descriptors(const TensorMaps&, int) const {}
    __device__ void run(const TensorMaps&) const {}
};

}  // namespace mla::sm90::decode
