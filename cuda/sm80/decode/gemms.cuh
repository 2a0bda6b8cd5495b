// The two GEMMs of a KV tile, as one warp does them: S += Q K^T over its quarter of the columns,
// and O += P V for the same columns.
//
// For a plain cache, ldmatrix yields the operands. For bytes, ldmatrix moves pairs of bytes. A word
// then holds four neighbouring columns of a token (for K), or two columns of two tokens (for V).
// K's columns are taken in another order, which Q follows. V's even and odd columns become two
// operands.
#pragma once

#include <type_traits>

#include "config.cuh"
#include "ptx/sm80.cuh"
#include "thread_position.cuh"

namespace mla::sm80::decode {

// The fragments of 16 * kWarpTiles query rows by a quarter of the columns, the rotary ones last.
template <class C>
struct QueryFragments {
    uint32_t words[C::kWarpTiles][C::kSteps + 1][4];
    // The powers of two by which the scores of two rows are multiplied, if rows are converted to
    // f16. One register holds both, as the exponent fields of f32.
    static constexpr bool kConverted =
        C::kHalves && std::is_same_v<typename C::Element, __nv_bfloat16>;
    uint32_t exponents[C::kWarpTiles];

    // Factor of the scores of row lane / 4 (`half` 0) or 8 + lane / 4 (`half` 1) of 16.
    __device__ float rest(int tile, int half) const {
        if constexpr (kConverted)
            return __uint_as_float(exponents[tile] << (half ? 15 : 23) & 0x7f800000u);
        else
            return C::kScoreRest;
    }

    // `row_of(r)` returns the latent and rotary pointers of row r of the warp, or null without a
    // row.
    template <typename RowOf>
    __device__ void load(const RowOf& row_of, int column_group, bool has_rope) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int tile = 0; tile < C::kWarpTiles; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const auto row = row_of(tile * 16 + half * 8 + lane / 4);
#pragma unroll
                for (int step = 0; step <= C::kSteps; ++step) {
                    const bool rope = step == C::kSteps;
                    const char* from = rope ? row.rope : row.latent;
                    const int column =
                        rope ? column_group * 16 : column_group * C::kColumns + step * 16;
                    const bool bytes =
                        rope ? C::kFormat == CacheFormat::e4m3 : C::kFormat != CacheFormat::plain;
                    uint2 pair = {0, 0};
                    if (from && (!rope || has_rope)) pair = load_step(from + column * 2, bytes);
                    words[tile][step][half] = pair.x;
                    words[tile][step][half + 2] = pair.y;
                }
                if constexpr (kConverted) convert(tile, half);
            }
    }

  private:
    // Converts a row of bf16 to f16 after scaling it so that its maximum magnitude is just below
    // 2^15. Bits that f16 cannot hold are then below 2^-39 of that maximum.
    __device__ void convert(int tile, int half) {
        uint32_t greatest = 0;
#pragma unroll
        for (int step = 0; step <= C::kSteps; ++step)
#pragma unroll
            for (int i = half; i < 4; i += 2) {
                const uint32_t word = words[tile][step][i];
                greatest = max(greatest, max(word & 0x7fff, word >> 16 & 0x7fff));
            }
        greatest = max(greatest, __shfl_xor_sync(~0u, greatest, 1));
        greatest = max(greatest, __shfl_xor_sync(~0u, greatest, 2));
        // Exponents are fields of f32.
        const uint32_t up = min(268 - (greatest >> 7), 253u);
        const float factor = __uint_as_float(up << 23);
        const uint32_t down = 254 - up + kE4m3HalfRestLog2;
        exponents[tile] = half ? exponents[tile] | down << 8 : down;
#pragma unroll
        for (int step = 0; step <= C::kSteps; ++step)
#pragma unroll
            for (int i = half; i < 4; i += 2) {
                uint32_t& word = words[tile][step][i];
                word = ptx::cvt_rn_x2<__half>(__uint_as_float(word << 16) * factor,
                                              __uint_as_float(word & 0xffff0000u) * factor);
            }
    }

    __device__ static uint32_t lifted(uint32_t pair) {
        using T = typename C::Element;
        if constexpr (!C::kGrouped || E4m3Fields<T>::kLift == 0)
            return pair;
        else
            return ptx::mul_rn_x2<T>(pair, E4m3Fields<T>::kLiftWord);
    }
    // Loads the four of 16 columns that belong to this lane.
    __device__ static uint2 load_step(const char* from, bool bytes) {
        const int quad = threadIdx.x & 3;
        if (!bytes) {
            const uint32_t* words = reinterpret_cast<const uint32_t*>(from);
            return {words[quad], words[quad + 4]};
        }
        const uint2 v = reinterpret_cast<const uint2*>(from)[quad];
        return {lifted((v.x & 0xffff) | (v.y << 16)), lifted((v.x >> 16) | (v.y & 0xffff0000))};
    }
};

// Partial scores of 16 tokens, from the columns of one warp.
template <class C>
struct Scores {
    float x[C::kWarpTiles][2][4];
};

template <class C>
class Gemms {
    using T = typename C::Operand;

  public:
    __device__ Gemms(const KernelParams& p, const ThreadPosition& position)
        : p_(p), position_(position) {}

    // Computes this warp's scores of tokens 16 * unit to 16 * unit + 15 of the stage.
    __device__ void scores(const QueryFragments<C>& q, uint32_t stage, int unit,
                           Scores<C>& s) const {
        // There are two sums if one would make a chain of few, long steps and registers suffice for
        // both.
        constexpr int kSums = C::kWarpTiles == 1 && !C::kHalves ? 2 : 1;
        const uint32_t from = stage + unit * 16 * p_.pitch;
        const int row = C::kBytes ? by_rows() : by_chunks();
        const uint32_t keys = from + row + column_bytes();
        float sums[kSums][C::kWarpTiles][2][4] = {};
        uint32_t nan[2] = {};
        // Each load yields 16 bytes of a cache row: one step of values, or two of bytes. It is in
        // flight while the data of the previous load is multiplied.
        constexpr int kLoads = C::kSteps / (C::kBytes ? 2 : 1);
        uint32_t words[2][4];
        // Grouped latent values have to be scaled before rotary ones are added.
        const bool has_rope = position_.column_group() * 16 < p_.rope_dim;
        if constexpr (!C::kGrouped) {
            // If this warp has no rotary values, these are zeros.
            uint32_t rope[4] = {};
            if (has_rope) load_rope(rope, from);
            ptx::ldmatrix_x4(words[0], keys);
            multiply_rope(sums[0], q, rope, nan);
        } else {
            ptx::ldmatrix_x4(words[0], keys);
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const uint32_t (&w)[4] = words[i % 2];
            if (i + 1 < kLoads) ptx::ldmatrix_x4(words[(i + 1) % 2], keys + (i + 1) * 32);
            if constexpr (C::kBytes) {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    multiply_bytes(sums[j / 2 % kSums], q, 2 * i + j / 2, j % 2, w[j], nan);
            } else {
                multiply_pair(sums[i % kSums], q, i, w);
            }
        }
        if constexpr (C::kGrouped) {
            scale_scores(sums, from);
            if (has_rope) {
                load_rope(words[0], from);
                multiply_rope(sums[0], q, words[0], nan);
            }
        }
#pragma unroll
        for (int tile = 0; tile < C::kWarpTiles; ++tile)
#pragma unroll
            for (int block = 0; block < 2; ++block)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    s.x[tile][block][i] = sums[0][tile][block][i];
                    if constexpr (kSums == 2) s.x[tile][block][i] += sums[1][tile][block][i];
                    if constexpr (C::kHalves) s.x[tile][block][i] *= q.rest(tile, i / 2);
                }
        if constexpr (C::kBytes && !kConvertsNan)
            if (__any_sync(~0u, ((nan[0] | nan[1]) & 0x80808080u) != 0)) spread_nan(s, nan);
    }

    // The factor by which P of one of the tile's tokens is multiplied for `column_group`: the
    // token's scale. A scale that is no finite number counts as 0. The token's scores are not
    // finite either, so P is NaN in rows that see it, and stays 0 in the others.
    __device__ float value_scale(const char* stage, int token, int column_group) const {
        const float scale = *reinterpret_cast<const float*>(
            stage + token * p_.pitch + C::kScaleOffset + column_group * C::kScaleStride);
        return fabsf(scale) < INFINITY ? scale : 0.f;
    }
    // The factors of two neighbouring tokens.
    __device__ float2 value_scales(const char* stage, int token, int column_group) const {
        return {value_scale(stage, token, column_group),
                value_scale(stage, token + 1, column_group)};
    }

    // Zeroes values that are not finite in this warp's columns. Each row group does a share of the
    // tokens. Rows that see such a token already have a score of NaN. In the other rows P is 0, and
    // 0 times NaN would be NaN. Grouped bytes that are NaN count as numbers in this product.
    __device__ void clear_nonfinite(char* stage, int row_group) const {
        if constexpr (!C::kGrouped) {
            constexpr int kChunks = C::kColumns * C::kLatentBytes / 16;
            const int lane = position_.lane();
            for (int i = row_group * 32 + lane; i < C::kTokens * kChunks; i += 32 * C::kRowGroups) {
                char* at = stage + i / kChunks * p_.pitch + column_bytes() + i % kChunks * 16;
                const uint4 v = *reinterpret_cast<const uint4*>(at);
                bool finite = true;
                for (uint32_t word : {v.x, v.y, v.z, v.w}) finite = finite && is_finite(word);
                if (!finite) *reinterpret_cast<uint4*>(at) = uint4{0, 0, 0, 0};
            }
            __syncwarp();
        }
    }

    // `p(tile, step)` returns the fragment of 16 rows by 16 tokens. `between(i)` is called after
    // the MMAs of each load, with its number.
    template <typename P, typename Between>
    __device__ void values(const P& p, uint32_t stage,
                           float (&o)[C::kWarpTiles][C::kColumns / 8][4],
                           const Between& between) const {
        const uint32_t first = stage + by_rows() + column_bytes();
#pragma unroll
        for (int unit = 0; unit < C::kTokens / 16; ++unit) {
            uint32_t a[C::kWarpTiles][4];
#pragma unroll
            for (int tile = 0; tile < C::kWarpTiles; ++tile) p(tile, unit, a[tile]);
            const uint32_t from = first + unit * 16 * p_.pitch;
            constexpr int kPairs = C::kColumns / (C::kBytes ? 32 : 16);
            uint32_t loaded[2][4];
            ptx::ldmatrix_x4_trans(loaded[0], from);
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) {
                const uint32_t (&words)[4] = loaded[pair % 2];
                if (pair + 1 < kPairs)
                    ptx::ldmatrix_x4_trans(loaded[(pair + 1) % 2], from + (pair + 1) * 32);
                if constexpr (C::kBytes) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint32_t low = words[2 * half], high = words[2 * half + 1];
                        uint32_t even[2], odd[2];
                        operands(low, even[0], odd[0]);
                        operands(high, even[1], odd[1]);
#pragma unroll
                        for (int tile = 0; tile < C::kWarpTiles; ++tile) {
                            ptx::mma_m16n8k16<T>(o[tile][pair * 4 + half * 2], a[tile], even[0],
                                                 even[1]);
                            ptx::mma_m16n8k16<T>(o[tile][pair * 4 + half * 2 + 1], a[tile], odd[0],
                                                 odd[1]);
                        }
                    }
                } else {
#pragma unroll
                    for (int tile = 0; tile < C::kWarpTiles; ++tile) {
                        ptx::mma_m16n8k16<T>(o[tile][pair * 2], a[tile], words[0], words[1]);
                        ptx::mma_m16n8k16<T>(o[tile][pair * 2 + 1], a[tile], words[2], words[3]);
                    }
                }
                between(unit * kPairs + pair);
            }
        }
    }

  private:
    // True if a byte that is NaN makes its scores NaN.
    static constexpr bool kConvertsNan = C::kHalves && kE4m3Instruction;

    __device__ static bool is_finite(uint32_t word) {
        if constexpr (C::kBytes) {
            uint32_t nan = 0;
            e4m3_note_nan(nan, word);
            return (nan & 0x80808080u) == 0;
        } else {
            constexpr uint32_t exponent = std::is_same_v<T, __half> ? 0x7c00 : 0x7f80;
            return (word & exponent) != exponent && (word >> 16 & exponent) != exponent;
        }
    }

    // Makes two operands of four bytes: one of the bytes at even places, and one of those at odd
    // places.
    __device__ static void operands(uint32_t word, uint32_t& even, uint32_t& odd) {
        if constexpr (C::kHalves) {
            e4m3_halves(word, even, odd);
        } else {
            even = e4m3_even<T>(word);
            odd = e4m3_odd<T>(word);
        }
    }

    __device__ static uint32_t half_of_bf16(uint32_t pair) {
        return ptx::cvt_rn_x2<__half>(__uint_as_float(pair << 16),
                                      __uint_as_float(pair & 0xffff0000u));
    }

    // The rotary values of 16 tokens: two words if they are bytes.
    __device__ void load_rope(uint32_t (&b)[4], uint32_t from) const {
        if constexpr (C::kFormat == CacheFormat::e4m3) {
            uint32_t words[2];
            ptx::ldmatrix_x2(words, from + (position_.lane() & 15) * p_.pitch + C::kRopeOffset +
                                        position_.column_group() * 16);
            b[0] = words[0];
            b[1] = words[1];
        } else {
            ptx::ldmatrix_x4(b,
                             from + by_chunks() + C::kRopeOffset + position_.column_group() * 32);
        }
    }

    __device__ static void multiply_rope(float (&sums)[C::kWarpTiles][2][4],
                                         const QueryFragments<C>& q, uint32_t (&b)[4],
                                         uint32_t (&nan)[2]) {
        if constexpr (C::kFormat == CacheFormat::e4m3) {
#pragma unroll
            for (int i = 0; i < 2; ++i) multiply_bytes(sums, q, C::kSteps, i, b[i], nan);
        } else {
            // The cache's rotary values are bf16 whatever the queries are.
            if constexpr (C::kGrouped && std::is_same_v<T, __half>)
                for (uint32_t& word : b) word = half_of_bf16(word);
            multiply_pair(sums, q, C::kSteps, b);
        }
    }

    // Multiplies two blocks of eight tokens by one step of columns.
    __device__ static void multiply_pair(float (&sums)[C::kWarpTiles][2][4],
                                         const QueryFragments<C>& q, int step,
                                         const uint32_t (&b)[4]) {
#pragma unroll
        for (int tile = 0; tile < C::kWarpTiles; ++tile) {
            ptx::mma_m16n8k16<T>(sums[tile][0], q.words[tile][step], b[0], b[1]);
            ptx::mma_m16n8k16<T>(sums[tile][1], q.words[tile][step], b[2], b[3]);
        }
    }

    // Multiplies a block of eight tokens, as bytes, by one step of columns.
    __device__ static void multiply_bytes(float (&sums)[C::kWarpTiles][2][4],
                                          const QueryFragments<C>& q, int step, int block,
                                          uint32_t word, uint32_t (&nan)[2]) {
        if constexpr (!kConvertsNan) e4m3_note_nan(nan[block], word);
        uint32_t b0, b1;
        operands(word, b0, b1);
#pragma unroll
        for (int tile = 0; tile < C::kWarpTiles; ++tile)
            ptx::mma_m16n8k16<T>(sums[tile][block], q.words[tile][step], b0, b1);
    }

    // Multiplies the latent part by the scales of this warp's group of columns.
    template <int kSums>
    __device__ void scale_scores(float (&sums)[kSums][C::kWarpTiles][2][4], uint32_t from) const {
        const int quad = threadIdx.x & 3;
#pragma unroll
        for (int block = 0; block < 2; ++block)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = block * 8 + quad * 2 + i;
                const float scale =
                    C::kScoreRest * ptx::ld_shared_f32(from + token * p_.pitch + C::kScaleOffset +
                                                       position_.column_group() * C::kScaleStride);
#pragma unroll
                for (int sum = 0; sum < kSums; ++sum)
#pragma unroll
                    for (int tile = 0; tile < C::kWarpTiles; ++tile) {
                        sums[sum][tile][block][i] *= scale;
                        sums[sum][tile][block][i + 2] *= scale;
                    }
            }
    }

    // Lane l has seen whether tokens l / 4 and 8 + l / 4 have a NaN. If so, their scores become
    // NaN.
    __device__ static void spread_nan(Scores<C>& s, const uint32_t (&nan)[2]) {
        const int quad = threadIdx.x & 3;
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            const unsigned seen = __ballot_sync(~0u, (nan[block] & 0x80808080u) != 0);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (seen >> (4 * (2 * quad + (i & 1))) & 0xf)
#pragma unroll
                    for (int tile = 0; tile < C::kWarpTiles; ++tile)
                        s.x[tile][block][i] = __int_as_float(0x7fffffff);
        }
    }

    // Offset of the row whose address this lane gives to ldmatrix. With by_rows, the matrices are
    // rows 0 to 7 and 8 to 15 of one chunk, and then of the next. With by_chunks, they are both
    // chunks of rows 0 to 7, and then of rows 8 to 15. The offset is computed wherever it is
    // needed, because registers are few.
    __device__ int by_rows() const {
        const int lane = position_.lane();
        return (lane & 15) * p_.pitch + (lane >> 4) * 16;
    }
    __device__ int by_chunks() const {
        const int lane = position_.lane();
        return ((lane & 7) + (lane >> 4) * 8) * p_.pitch + (lane >> 3 & 1) * 16;
    }
    __device__ int column_bytes() const {
        return position_.column_group() * C::kColumns * C::kLatentBytes;
    }

    const KernelParams& p_;
    const ThreadPosition& position_;
};

}  // namespace mla::sm80::decode
