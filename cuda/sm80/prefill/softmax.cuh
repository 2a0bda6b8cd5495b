// Softmax: turns scores into P.
#pragma once

#include "config.cuh"
#include "sm80/row_state.cuh"

namespace mla::sm80::prefill {

// The softmax of a warp's rows: lane l has rows l / 4 and 8 + l / 4 of each 16.
template <class C>
class Softmax {
  public:
    // Takes scores into account. In a few tiles, a row's reference has to rise to them (lazy
    // rescale). Then calls `rescale(tile, low, high)` with the factors for earlier sums of 16 rows:
    // one for each of the lane's two rows.
    template <class Rescale>
    __device__ void raise(const float (&s)[C::kWarpTiles][C::kKeys / 8][4], float scale,
                          const Rescale& rescale) {
        float top[C::kWarpTiles][2];
        bool exceeds = false;
#pragma unroll
        for (int tile = 0; tile < C::kWarpTiles; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float& x = top[tile][half];
                x = -INFINITY;
#pragma unroll
                for (int block = 0; block < C::kKeys / 8; ++block)
                    x = fmaxf(x, fmaxf(s[tile][block][half * 2], s[tile][block][half * 2 + 1]));
                x *= scale;
                exceeds |= exceeds_lazily(rows_[tile][half].maximum, x);
            }
        if (!__any_sync(~0u, exceeds)) return;
#pragma unroll
        for (int tile = 0; tile < C::kWarpTiles; ++tile) {
            float factor[2];
#pragma unroll
            for (int half = 0; half < 2; ++half)
                factor[half] = rows_[tile][half].raise(quad_maximum(top[tile][half]));
            rescale(tile, factor[0], factor[1]);
        }
    }

    // Two numbers of P: word `word` of the fragment of 16 rows and 16 keys, whose scores are in
    // `s`.
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
