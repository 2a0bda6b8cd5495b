// Brings queries into the form of operand B of the scores: K-major tiles of N rows by 64 values,
// swizzled, eight of latent values and one of rotary ones. If the keys are e4m3, queries are
// converted to f16, and scaled into its range.
#pragma once

#include "../../../common/swizzle.cuh"
#include "list_walk.cuh"

namespace mla::sm90::sparse {

// Called by all threads of the scores warpgroups; `thread` is the number of the caller. Each thread
// has units of 32 values of one row. No other thread touches these before the barrier that follows.
template <typename T, int N, class R>
struct Queries {
    using L = Layout<N, R>;

    const KernelParams& p;
    typename L::Control& s;
    uint32_t base;
    int thread;

    __device__ void load(const WorkItem& item) const {
        constexpr int of_row = L::kScoreThreads / N;
        const int row = thread / of_row, first = thread % of_row;
        const bool valid = row < item.heads;
        const char* latent = item.latent(p, valid ? row : 0);
        const char* rope = item.rope(p, valid ? row : 0);
#pragma unroll 1
        for (int unit = first; unit < kUnits; unit += of_row) {
            const char* from =
                unit < kLatentUnits ? latent + unit * 64 : rope + (unit - kLatentUnits) * 64;
#pragma unroll
            for (int c = 0; c < 4; ++c)
                ptx::cp_async_16(chunk_at(row, unit, c), from + c * 16, valid);
        }
        ptx::cp_async_wait_all();
        int shift = 0;
        if constexpr (R::kConverts) {
            if constexpr (kScaled) shift = shift_of(row, first);
            const float factor = __int_as_float((127 + shift) << 23);
#pragma unroll 1
            for (int unit = first; unit < kUnits; unit += of_row) convert(row, unit, factor);
        }
        if (first == 0) s.query_scale[row] = p.scale_log2 * __int_as_float((127 - shift) << 23);
        ptx::fence_proxy_async();
    }

  private:
    static constexpr int kLatentUnits = kLatent / 32, kUnits = kLatentUnits + R::kRope / 32;
    // True if queries of bf16 become f16. bf16 has exponents that f16 does not have.
    static constexpr bool kScaled = R::kConverts && !std::is_same_v<T, __half>;

    // Returns the exponent of the power of two that brings a row's largest value to 2^14 or more,
    // and below 2^15. Called by all threads of the row; `first` is the caller's number among them.
    __device__ int shift_of(int row, int first) const {
        constexpr int of_row = L::kScoreThreads / N;
        uint32_t top = 0;
#pragma unroll 1
        for (int unit = first; unit < kUnits; unit += of_row) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const uint4 v = ptx::ld_shared_v4(chunk_at(row, unit, c));
                top = larger(larger(larger(larger(top, v.x), v.y), v.z), v.w);
            }
        }
        top = max(top & 0xffff, top >> 16);
#pragma unroll
        for (int distance = 1; distance < of_row; distance *= 2)
            top = max(top, __shfl_xor_sync(~0u, top, distance));
        const int exponent = int(top >> 7);
        return exponent == 0 ? 0 : min(127 + 14 - exponent, 100);
    }

    __device__ uint32_t chunk_at(int row, int unit, int chunk) const {
        return base + (unit >> 1) * L::kQueryTileBytes + swizzled<128>(row, (unit & 1) * 4 + chunk);
    }
    // The larger one, as bits, of `top` and the magnitudes of two bf16 values, for each half of the
    // word.
    __device__ static uint32_t larger(uint32_t top, uint32_t two) {
        return __vmaxu2(top, two & 0x7fff7fff);
    }

    // Permutes a unit's words to the order of the keys' operands. A word has two values, a chunk
    // has four words, and a unit four chunks. The first words of the four chunks come first, then
    // their second words, and so on. Queries of bf16 are also multiplied by `factor` and converted
    // to f16. Rotary values of rows with scales keep their type and their order.
    __device__ void convert(int row, int unit, float factor) const {
        const bool is_rope = unit >= kLatentUnits && R::kScales;
        uint32_t in[4][4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const uint4 v = ptx::ld_shared_v4(chunk_at(row, unit, c));
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                in[c][i] = words[i];
                if constexpr (kScaled) {
                    const float x = __uint_as_float(words[i] << 16) * factor;
                    const float y = __uint_as_float(words[i] & 0xffff0000) * factor;
                    in[c][i] = is_rope ? ptx::cvt_rn_x2<T>(x, y) : ptx::cvt_rn_x2<__half>(x, y);
                }
            }
        }
#pragma unroll
        for (int c = 0; c < 4; ++c)
            ptx::st_shared_v4(chunk_at(row, unit, c),
                              is_rope ? make_uint4(in[c][0], in[c][1], in[c][2], in[c][3])
                                      : make_uint4(in[0][c], in[1][c], in[2][c], in[3][c]));
    }
};

}  // namespace mla::sm90::sparse
