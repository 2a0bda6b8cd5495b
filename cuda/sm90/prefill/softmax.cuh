// The softmax of two query rows in the registers of a thread.
#pragma once

#include "../../ptx/sm90.cuh"
#include "config.cuh"

namespace mla::sm90::prefill {

// The two functions give a row's output factor and its log-sum-exp, from the sum of the row's
// weights. For a row that sees nothing they are 0 and minus infinity. For a row that sees a NaN
// they are NaN.
__device__ __forceinline__ float row_factor(float sum) {
    return sum == 0.f ? 0.f : ptx::rcp_approx(sum);
}
__device__ __forceinline__ float row_log_sum_exp(float reference, float sum) {
    constexpr float kLn2 = 0.693147180559945309f;
    return sum == 0.f ? -INFINITY : (reference + ptx::lg2_approx(sum)) * kLn2;
}

// A thread's state of its two query rows.
template <typename Config>
struct Rows {
    float out[Config::kValue / 2];
    uint32_t weights[Config::kKeySteps][4];
    // Lazy rescale: weights are 2^(score - reference), with scores in units of log2. The reference
    // is near the maximum score so far. It rises only when a weight, or a thread's sum of weights,
    // would exceed kRise. Weights up to kRise do no harm, and the output hardly ever needs a
    // correction.
    float reference[2], sum[2];
    // Factors for the output so far. They are applied before the next weights count. `corrected` is
    // false if they are 1 in all lanes.
    float correction[2];
    bool corrected;

    static constexpr float kRise = 256.f, kRiseLog2 = 8.f;
    // Sums of this size or more are not trusted. Their weights may have overflowed, and the
    // reciprocal of the sum would be flushed to 0.
    static constexpr float kLost = 1e30f;

    // Turns the scores of one KV tile into weights in place. Behind the first `chunks` chunks,
    // scores are not read, and weights are 0. If `first` is true, this is the query tile's first KV
    // tile, and earlier state is ignored.
    template <bool first>
    __device__ __forceinline__ void absorb(float (&scores)[Config::kKeys / 2], float scale_log2,
                                           int chunks) {
        // Handles both rows in parallel, with four maxima for each, to keep chains of dependent
        // instructions short. The first chunk sets all four.
        static_assert(kChunkOctets >= 4);
        float largest[2][4];
#pragma unroll
        for (int chunk = 0; chunk < Config::kChunks; chunk++) {
            if (chunk > 0 && chunk >= chunks) continue;
#pragma unroll
            for (int i = chunk * kChunkOctets; i < chunk * kChunkOctets + kChunkOctets; i++) {
#pragma unroll
                for (int row = 0; row < 2; row++) {
                    const float pair = fmaxf(scores[4 * i + 2 * row], scores[4 * i + 2 * row + 1]);
                    largest[row][i % 4] = i < 4 ? pair : fmaxf(largest[row][i % 4], pair);
                }
            }
        }
        float top[2], shift[2];
#pragma unroll
        for (int row = 0; row < 2; row++) {
            top[row] = fmaxf(fmaxf(largest[row][0], largest[row][1]),
                             fmaxf(largest[row][2], largest[row][3]));
        }
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
            for (int row = 0; row < 2; row++)
                top[row] = fmaxf(top[row], __shfl_xor_sync(~0u, top[row], distance));
        }
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const float before = first ? -INFINITY : reference[row];
            float now = fmaxf(before, top[row] * scale_log2);
            if (!first && now - before <= kRiseLog2) now = before;
            reference[row] = now;
            // A row that has seen nothing yet keeps the reference -inf. Subtracting it from itself
            // would give NaN.
            shift[row] = now == -INFINITY ? 0.f : now;
            if (!first) correction[row] = ptx::ex2_approx(before - shift[row]);
        }
        if (!first) corrected = __any_sync(~0u, correction[0] != 1.f || correction[1] != 1.f);
        float total[2] = {};
#pragma unroll
        for (int chunk = 0; chunk < Config::kChunks; chunk++) {
            if (chunk == 0 || chunk < chunks) {
#pragma unroll
                for (int row = 0; row < 2; row++) {
                    weigh(scores, chunk * kChunkOctets, chunk * kChunkOctets + kChunkOctets, row,
                          scale_log2, shift[row], total[row]);
                }
            } else {
#pragma unroll
                for (int i = 4 * chunk * kChunkOctets;
                     i < 4 * chunk * kChunkOctets + 4 * kChunkOctets; i++)
                    scores[i] = 0.f;
            }
        }
#pragma unroll
        for (int row = 0; row < 2; row++)
            sum[row] = first ? total[row] : sum[row] * correction[row] + total[row];
    }

    // Turns scores into weights like absorb(), but does not search for the maximum score. The sums
    // of the weights tell afterwards if the reference has to rise. Returns false if the sums are
    // too large for that, as they are for a row without a reference. The scores are then lost.
    __device__ __forceinline__ bool absorb_by_sum(float (&scores)[Config::kKeys / 2],
                                                  float scale_log2) {
        float total[2] = {};
#pragma unroll
        for (int row = 0; row < 2; row++)
            weigh(scores, 0, Config::kKeys / 8, row, scale_log2, reference[row], total[row]);
        corrected = __any_sync(~0u, !(total[0] <= kRise && total[1] <= kRise));
        if (corrected) {
            if (__any_sync(~0u, !(total[0] < kLost && total[1] < kLost))) return false;
#pragma unroll
            for (int row = 0; row < 2; row++) {
                float largest = fmaxf(total[row], __shfl_xor_sync(~0u, total[row], 1));
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
                const float before = reference[row];
                if (largest > kRise) reference[row] = before + log2f(largest);
                correction[row] = ptx::ex2_approx(before - reference[row]);
#pragma unroll
                for (int i = 0; i < Config::kKeys / 8; i++) {
                    scores[4 * i + 2 * row] *= correction[row];
                    scores[4 * i + 2 * row + 1] *= correction[row];
                }
                sum[row] *= correction[row];
                total[row] *= correction[row];
            }
        }
#pragma unroll
        for (int row = 0; row < 2; row++) sum[row] += total[row];
        return true;
    }

    // Turns a row's scores of the octets of keys from `begin` to `end` into weights and adds these
    // to `total`.
    __device__ __forceinline__ static void weigh(float (&scores)[Config::kKeys / 2], int begin,
                                                 int end, int row, float scale_log2, float shift,
                                                 float& total) {
#pragma unroll
        for (int i = begin; i < end; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float& score = scores[4 * i + 2 * row + j];
                score = ptx::ex2_approx(score * scale_log2 - shift);
                total += score;
            }
        }
    }

    // Rounds the weights into the layout of an MMA's A operand.
    __device__ __forceinline__ void round(const float (&scores)[Config::kKeys / 2]) {
#pragma unroll
        for (int step = 0; step < Config::kKeySteps; step++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                weights[step][i] = ptx::cvt_rn_x2<typename Config::Element>(
                    scores[8 * step + 2 * i], scores[8 * step + 2 * i + 1]);
            }
        }
    }

    __device__ __forceinline__ void rescale() {
        if (!corrected) return;
#pragma unroll
        for (int i = 0; i < Config::kValue / 2; i++) out[i] *= correction[i / 2 % 2];
    }
};

}  // namespace mla::sm90::prefill
