// From scores to P.
#pragma once

#include "config.cuh"
#include "sm80/row_state.cuh"

namespace mla::sm80::prefill {

// The softmax of a warp's rows: lane l has rows l / 4 and 8 + l / 4 of each 16.
template <class C>
class Softmax {
  public:
    // Takes scores into account; returns what earlier sums are to be multiplied by.
    __device__ void raise(const float (&s)[C::kWarpTiles][C::kKeys / 8][4], float scale,
                          float (&rescale)[C::kWarpTiles][2]) {
#pragma unroll
        for (int tile = 0; tile < C::kWarpTiles; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float top = -INFINITY;
#pragma unroll
                for (int block = 0; block < C::kKeys / 8; ++block)
                    top = fmaxf(top, fmaxf(s[tile][block][half * 2], s[tile][block][half * 2 + 1]));
                rescale[tile][half] = rows_[tile][half].raise(quad_maximum(top) * scale);
            }
    }

    // Two of P: word `word` of the fragment of 16 rows and keys, of which `s` are the scores.
    __device__ uint32_t probabilities(const float (&s)[C::kKeys / 8][4], int tile, int step,
                                      int word, float scale) {
        const float* x = &s[step * 2 + word / 2][word % 2 * 2];
        RowState& state = rows_[tile][word % 2];
        const float low = state.probability(x[0], scale), high = state.probability(x[1], scale);
        return ptx::cvt_rn_x2<typename C::Element>(low, high);
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
