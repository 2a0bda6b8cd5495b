// From scores to P.
#pragma once

#include "config.cuh"
#include "sm80/row_state.cuh"

namespace mla::sm80::prefill {

// The softmax of a warp's rows: lane l has rows l / 4 and 8 + l / 4 of each 16.
template <class C>
class Softmax {
  public:
    // Makes P of scores.
    __device__ void apply(const float (&s)[C::kWarpTiles][C::kKeys / 8][4], float scale,
                          float (&rescale)[C::kWarpTiles][2],
                          uint32_t (&p)[C::kWarpTiles][C::kKeys / 16][4]) {
#pragma unroll
        for (int tile = 0; tile < C::kWarpTiles; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float top = -INFINITY;
#pragma unroll
                for (int block = 0; block < C::kKeys / 8; ++block)
                    top = fmaxf(top, fmaxf(s[tile][block][half * 2], s[tile][block][half * 2 + 1]));
                RowState& state = rows_[tile][half];
                rescale[tile][half] = state.raise(quad_maximum(top) * scale);
#pragma unroll
                for (int block = 0; block < C::kKeys / 8; ++block) {
                    const float* x = &s[tile][block][half * 2];
                    const float low = state.probability(x[0], scale);
                    const float high = state.probability(x[1], scale);
                    p[tile][block / 2][block % 2 * 2 + half] =
                        ptx::cvt_rn_x2<typename C::Element>(low, high);
                }
            }
    }

    __device__ RowState row(int tile, int half) const {
        RowState state = rows_[tile][half];
        state.sum = quad_sum(state.sum);
        return state;
    }

  private:
    RowState rows_[C::kWarpTiles][2];
};

}  // namespace mla::sm80::prefill
