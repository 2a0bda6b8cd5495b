// The sums of the output warpgroups, which are in registers. Each warpgroup has N query rows by
// half of the latent values. There are two forms.
//
//   transposed   O^T = O^T + V^T P^T: latent values are on M and query rows on N, so few rows need
//                no padding.
//   by rows      O = O + P V: 64 query rows are on M and 128 latent values on N. An instruction
//                reads 6 KiB of shared memory. In the other form it reads 4 KiB, but does half
//                the work.
//
// A KV tile is added in steps. Each step is a group of MMAs, and needs its own stages of the ring.
#pragma once

#include "../../../ptx/sm80.cuh"
#include "../../../ptx/wgmma.cuh"
#include "combine.cuh"

namespace mla::sm90::decode {

// Distance in panels from one panel of an output warpgroup to its next one.
constexpr int kSameOutput = 2;

__device__ __forceinline__ float larger_finite(float top, float x) {
    return x < INFINITY ? fmaxf(top, x) : top;
}

template <typename T, int N, int latent>
struct TransposedSums {
    static constexpr int kSteps = latent / 128;

    float acc[kSteps][N / 2];

    // Clears the sums. If the first MMA overwrote them instead, the compiler would keep these
    // registers while earlier results are combined.
    __device__ void clear() {
#pragma unroll
        for (int t = 0; t < kSteps; ++t)
#pragma unroll
            for (int i = 0; i < N / 2; ++i) acc[t][i] = 0.f;
    }

    // Multiplies the sums by the factor of each row. In every eight rows, a lane has the two rows 2
    // quad and 2 quad + 1. `any` has a number for each 16 rows, which is not 0 if one of their
    // factors is not 1.
    __device__ void rescale(const float* factor, const int4& any, int thread) {
        if (any.x | any.y | any.z | any.w) rescale(factor, thread & 3);
    }
    __device__ void rescale(const float* factor, int quad) {
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            const float2 f = *reinterpret_cast<const float2*>(&factor[8 * j + 2 * quad]);
#pragma unroll
            for (int t = 0; t < kSteps; ++t) {
                acc[t][4 * j] *= f.x;
                acc[t][4 * j + 1] *= f.y;
                acc[t][4 * j + 2] *= f.x;
                acc[t][4 * j + 3] *= f.y;
            }
        }
    }

    // Adds the step's latent values of a KV tile.
    __device__ void add(int step, uint32_t probabilities, uint32_t tile) {
        const uint64_t a = ptx::wgmma_descriptor(tile), b = ptx::wgmma_descriptor(probabilities);
#pragma unroll
        for (int k = 0; k < 4; ++k)
            ptx::Wgmma<T, N, ptx::Major::M>::run(acc[step], a + 128 * k, b + 2 * k, 1);
    }

    // The largest finite magnitude in this thread's part of a partial result. In a row that also
    // has values that are not finite, finite values may become infinite.
    __device__ float largest(const float* inverse, int thread) const {
        float top = 0.f;
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            const float2 f = *reinterpret_cast<const float2*>(&inverse[8 * j + 2 * (thread & 3)]);
            float x = 0.f, y = 0.f;
#pragma unroll
            for (int t = 0; t < kSteps; ++t) {
                x = fmaxf(fmaxf(x, fabsf(acc[t][4 * j])), fabsf(acc[t][4 * j + 2]));
                y = fmaxf(fmaxf(y, fabsf(acc[t][4 * j + 1])), fabsf(acc[t][4 * j + 3]));
            }
            top = larger_finite(larger_finite(top, x * f.x), y * f.y);
        }
        return top;
    }

    // Packs this thread's share of a partial result as f16, multiplied by `scale`, into vectors
    // that lie at first_vector(thread) + vector(i) (combine.cuh).
    static constexpr int kVectors = N / 8 * PartialResult<N, latent>::kGroupVectors;
    __device__ static int first_vector(int thread) { return thread; }
    __device__ static constexpr int vector(int i) { return i * kOutputThreads; }
    __device__ void pack(uint4 (&packed)[kVectors], const float* inverse, float scale, int thread) {
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            const float2 f = *reinterpret_cast<const float2*>(&inverse[8 * j + 2 * (thread & 3)]);
            const float x = f.x * scale, y = f.y * scale;
#pragma unroll
            for (int t = 0; t < kSteps; t += 2) {
                const float *v = &acc[t][4 * j], *w = &acc[t + 1][4 * j];
                packed[kSteps / 2 * j + t / 2] =
                    make_uint4(ptx::cvt_rn_x2<__half>(v[0] * x, v[1] * y),
                               ptx::cvt_rn_x2<__half>(v[2] * x, v[3] * y),
                               ptx::cvt_rn_x2<__half>(w[0] * x, w[1] * y),
                               ptx::cvt_rn_x2<__half>(w[2] * x, w[3] * y));
            }
        }
    }

    __device__ void write(const OutputRows<T>& out, const float* inverse, int thread) const {
        const int lane = thread & 31;
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            const float2 f = *reinterpret_cast<const float2*>(&inverse[8 * j + 2 * (lane & 3)]);
            const int r = 8 * j + (lane >> 2);
            const bool valid = r < out.rows;
            T* row = out.row(r);
#pragma unroll
            for (int t = 0; t < kSteps; ++t)
                out.write(row, valid, thread, t,
                          make_float4(acc[t][4 * j] * f.x, acc[t][4 * j + 1] * f.y,
                                      acc[t][4 * j + 2] * f.x, acc[t][4 * j + 3] * f.y));
        }
    }
};

// Sums by rows, of 512 latent values.
template <typename T>
struct RowSums {
    static constexpr int kSteps = 2;

    float acc[2][64];

    __device__ void clear() {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < 64; ++i) acc[h][i] = 0.f;
    }

    // The first of this thread's two rows. The other one is eight rows after it.
    __device__ static int row_of(int thread) { return (thread >> 5 & 3) * 16 + (thread >> 2 & 7); }

    __device__ void rescale(const float* factor, const int4& any, int thread) {
        const int warp = thread >> 5 & 3;
        if (warp < 2 ? (warp == 0 ? any.x : any.y) : (warp == 2 ? any.z : any.w))
            scale(factor[row_of(thread)], factor[row_of(thread) + 8]);
    }
    __device__ void scale(float f0, float f1) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < 64; i += 4) {
                acc[h][i] *= f0;
                acc[h][i + 1] *= f0;
                acc[h][i + 2] *= f1;
                acc[h][i + 3] *= f1;
            }
    }

    __device__ void add(int step, uint32_t probabilities, uint32_t tile) {
        using Mma = ptx::Wgmma<T, 128, ptx::Major::K, ptx::Major::M>;
        const uint64_t a = ptx::wgmma_descriptor(probabilities),
                       b = ptx::wgmma_descriptor(tile, kSameOutput * kPanelBytes);
#pragma unroll
        for (int k = 0; k < 4; ++k) Mma::run(acc[step], a + 2 * k, b + 128 * k, 1);
    }

    __device__ float largest(const float* inverse, int thread) const {
        float x = 0.f, y = 0.f;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < 64; i += 4) {
                x = fmaxf(fmaxf(x, fabsf(acc[h][i])), fabsf(acc[h][i + 1]));
                y = fmaxf(fmaxf(y, fabsf(acc[h][i + 2])), fabsf(acc[h][i + 3]));
            }
        return larger_finite(larger_finite(0.f, x * inverse[row_of(thread)]),
                             y * inverse[row_of(thread) + 8]);
    }

    static constexpr int kVectors = 8 * PartialResult<64, 512>::kGroupVectors;
    __device__ static int first_vector(int thread) {
        return (thread >> 5 & 3) * CombineLayout<64, RowFragments>::kGroupVectors +
               (thread >> 7) * 32 + (thread & 31);
    }
    __device__ static constexpr int vector(int i) { return i / 4 * kOutputThreads + i % 4 * 64; }
    __device__ void pack(uint4 (&packed)[kVectors], const float* inverse, float factor,
                         int thread) {
        const float x = inverse[row_of(thread)] * factor, y = inverse[row_of(thread) + 8] * factor;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const float* v = &acc[i / 8][8 * (i % 8)];
            packed[i] = make_uint4(ptx::cvt_rn_x2<__half>(v[0] * x, v[2] * y),
                                   ptx::cvt_rn_x2<__half>(v[1] * x, v[3] * y),
                                   ptx::cvt_rn_x2<__half>(v[4] * x, v[6] * y),
                                   ptx::cvt_rn_x2<__half>(v[5] * x, v[7] * y));
        }
    }

    // Writes the half of the output that step `h` has added to.
    __device__ __forceinline__ void write_half(int h, const OutputRows<T>& out,
                                               const float* inverse, int thread) const {
        const int first = (thread >> 7) * 64 + 2 * (thread & 3);
#pragma unroll
        for (int eighth = 0; eighth < 2; ++eighth) {
            const int r = row_of(thread) + 8 * eighth;
            const float f = inverse[r];
            if (r < out.rows) {
                T* row = out.row(r) + first;
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    *reinterpret_cast<uint32_t*>(row + h * 256 + i / 8 * 128 + i % 8 * 8) =
                        ptx::cvt_rn_x2<T>(acc[h][4 * i + 2 * eighth] * f,
                                          acc[h][4 * i + 1 + 2 * eighth] * f);
            }
        }
    }
};

}  // namespace mla::sm90::decode
