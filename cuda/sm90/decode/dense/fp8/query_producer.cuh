// Queries beside an e4m3 cache are fetched by the score warps (scores.cuh), so this warp has
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
