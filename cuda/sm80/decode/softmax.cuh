// The step from partial scores to P. Four warps have quarters of a row's score. The quarters are
// added in shared memory, masked, and turned into probabilities under a running maximum.
#pragma once

#include "gemms.cuh"
#include "scale_unit.cuh"
#include "sm80/row_state.cuh"
#include "thread_position.cuh"

namespace mla::sm80::decode {

// Mask of the tokens of a KV tile that a row attends to.
struct Mask {
    // The row attends to tokens below this number, counted from the request's first.
    int limit;
    // One bit per token of the tile.
    uint32_t valid;

    __device__ bool operator()(int first, int token) const {
        return first + token < limit && (valid >> token & 1);
    }
};

// Masks scores, and returns the maximum over this lane's tokens. For each block of eight tokens,
// this lane's two scores are `x[block][begin]` and the next one.
template <int kBlocks, int kWidth>
__device__ __forceinline__ float mask_scores(float (&x)[kBlocks][kWidth], int begin, bool masked,
                                             const Mask& mask, int first) {
    const int quad = threadIdx.x & 3;
    if (masked) {
        // Without this, the mask would be looked up in all tiles, and used in the last one only.
        __syncwarp();
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (!mask(first, block * 8 + quad * 2 + i)) x[block][begin + i] = -INFINITY;
    }
    float maximum = -INFINITY;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
        maximum = fmaxf(maximum, fmaxf(x[block][begin], x[block][begin + 1]));
    return maximum;
}

// Stores a row's maximum and sum without the lift that they had.
template <class C>
__device__ __forceinline__ void put_statistics(typename C::Statistics& statistics, int row,
                                               float maximum, float sum) {
    statistics.rows.maximum[row] = maximum + C::kLift;
    statistics.rows.sum[row] = sum * C::kUnlift;
}

// The unit of a softmax that has no scales, or whose operands can hold its scales.
struct NoUnit {};
template <class C>
using UnitOf = std::conditional_t<C::kScaleUnits, ScaleUnit, NoUnit>;

// Facts about a KV tile that a softmax needs.
struct TileFacts {
    // Its first token, counted from the request's first.
    int first;
    // False only if all rows attend to all of its tokens.
    bool masked;
    uint32_t valid;
    const char* stage;
};

// Every warp of a row group adds all of its rows' scores and keeps P as operands.
template <class C>
class RegisterSoftmax {
  public:
    __device__ RegisterSoftmax(char* shared, const ThreadPosition& position)
        : scores_(reinterpret_cast<float4*>(shared + C::kScoreOffset)),
          column_group_(position.column_group()) {}

    __device__ void begin_item() {
        rows_[0] = rows_[1] = RowState{};
        unit_ = {};
    }

    __device__ void put(int unit, const Scores<C>& s) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            const float* x = s.x[0][block];
            buffer()[(column_group_ * C::kBlocks + unit * 2 + block) * 32 + lane] =
                make_float4(x[0], x[1], x[2], x[3]);
        }
    }

    // Called after a barrier. `limit_of(r)` returns the number of tokens that row r of the warp
    // attends to. Returns true if the output of one of this lane's rows has to be rescaled.
    template <typename LimitOf>
    __device__ bool apply(const KernelParams& p, const Gemms<C>& gemms, const TileFacts& tile,
                          const LimitOf& limit_of) {
        const int lane = threadIdx.x & 31;
        float x[C::kBlocks][4];
#pragma unroll
        for (int block = 0; block < C::kBlocks; ++block) {
            float4 sum = buffer()[block * 32 + lane];
#pragma unroll
            for (int warp = 1; warp < kColumnGroups; ++warp) {
                const float4 other = buffer()[(warp * C::kBlocks + block) * 32 + lane];
                sum.x += other.x;
                sum.y += other.y;
                sum.z += other.z;
                sum.w += other.w;
            }
            x[block][0] = sum.x;
            x[block][1] = sum.y;
            x[block][2] = sum.z;
            x[block][3] = sum.w;
        }
        // The next tile's scores go to another place, because other warps may still read these.
        parity_ ^= 1;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Mask mask = {tile.masked ? limit_of(half * 8 + lane / 4) : 0, tile.valid};
            const float maximum =
                quad_maximum(mask_scores(x, half * 2, tile.masked, mask, tile.first));
            rescale_[half] = rows_[half].raise(maximum * p.scale_log2 - C::kLift);
#pragma unroll
            for (int block = 0; block < C::kBlocks; ++block)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    x[block][half * 2 + i] =
                        rows_[half].probability(x[block][half * 2 + i], p.scale_log2);
        }
        if constexpr (C::kGrouped) {
            float2 scales[C::kBlocks];
#pragma unroll
            for (int block = 0; block < C::kBlocks; ++block)
                scales[block] =
                    gemms.value_scales(tile.stage, block * 8 + (lane & 3) * 2, column_group_);
            if constexpr (C::kScaleUnits) adjust_unit(scales);
#pragma unroll
            for (int block = 0; block < C::kBlocks; ++block)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    x[block][i] *= i % 2 ? scales[block].y : scales[block].x;
        }
#pragma unroll
        for (int block = 0; block < C::kBlocks; ++block)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                p_[block / 2][block % 2 * 2 + half] =
                    ptx::cvt_rn_x2<typename C::Operand>(x[block][half * 2], x[block][half * 2 + 1]);
        return rescale_[0] != 1.f || rescale_[1] != 1.f;
    }

    // Factor by which O has to be multiplied after its last tile.
    __device__ float output_unit() const { return 1.f / unit_.unit; }

    // Factors for the output of rows lane / 4 and 8 + lane / 4.
    __device__ float2 rescale(int) const { return {rescale_[0], rescale_[1]}; }

    __device__ void operator()(int, int unit, uint32_t (&a)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = p_[unit][i];
    }

    // Stores the rows' maxima and sums for the CTA. A barrier has to follow.
    __device__ void finish(typename C::Statistics& statistics) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = quad_sum(rows_[half].sum);
            if (column_group_ == 0 && lane % 4 == 0)
                put_statistics<C>(statistics, half * 8 + lane / 4, rows_[half].maximum, sum);
        }
    }

  private:
    // Brings scales to the unit of the warp's columns.
    __device__ void adjust_unit(float2 (&scales)[C::kBlocks]) {
        float top = 0.f;
#pragma unroll
        for (const float2& scale : scales) top = fmaxf(top, fmaxf(fabsf(scale.x), fabsf(scale.y)));
        // Four lanes together have all tokens.
        const float by = unit_.template adjust<1, 4>(top);
        rescale_[0] *= by;
        rescale_[1] *= by;
#pragma unroll
        for (float2& scale : scales) scale = {scale.x * unit_.unit, scale.y * unit_.unit};
    }

    __device__ float4* buffer() const {
        return scores_ + parity_ * (kColumnGroups * C::kBlocks * 32);
    }

    float4* scores_;
    int column_group_, parity_ = 0;
    RowState rows_[2];
    UnitOf<C> unit_;
    float rescale_[2] = {1.f, 1.f};
    uint32_t p_[C::kTokens / 16][4];
};

// Each of the four warps of a row group adds and exponentiates a quarter of the group's 32 rows,
// and leaves P and the factors of O in shared memory.
template <class C>
class SharedSoftmax {
    static_assert(!C::kShared || C::kWarpTiles == 2);

  public:
    __device__ SharedSoftmax(char* shared, const ThreadPosition& position)
        : shared_(shared), position_(position) {}

    __device__ void begin_item() {
        row_ = RowState{};
        unit_ = {};
    }

    __device__ void put(int unit, const Scores<C>& s) {
        const int lane = position_.lane();
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            const float* x = s.x[quarter / 2][0] + quarter % 2 * 2;
            const float* y = s.x[quarter / 2][1] + quarter % 2 * 2;
            entry(quarter, column_group(), unit)[lane] = make_float4(x[0], x[1], y[0], y[1]);
        }
    }

    // Returns true if the output of one of this lane's rows has to be rescaled.
    template <typename LimitOf>
    __device__ bool apply(const KernelParams& p, const Gemms<C>& gemms, const TileFacts& tile,
                          const LimitOf& limit_of) {
        const int lane = position_.lane();
        const int row = column_group() * 8 + lane / 4;
        // The sums of the scores, in the order of the columns.
        float x[C::kBlocks][2];
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            float4 sum = entry(column_group(), 0, unit)[lane];
#pragma unroll
            for (int warp = 1; warp < kColumnGroups; ++warp) {
                const float4 other = entry(column_group(), warp, unit)[lane];
                sum.x += other.x;
                sum.y += other.y;
                sum.z += other.z;
                sum.w += other.w;
            }
            x[2 * unit][0] = sum.x;
            x[2 * unit][1] = sum.y;
            x[2 * unit + 1][0] = sum.z;
            x[2 * unit + 1][1] = sum.w;
        }
        const Mask mask = {tile.masked ? limit_of(row) : 0, tile.valid};
        const float maximum = quad_maximum(mask_scores(x, 0, tile.masked, mask, tile.first));
        const float factor = row_.raise(maximum * p.scale_log2 - C::kLift);
        if (lane % 4 == 0) rescales()[row] = factor;
        if constexpr (C::kScaleUnits) adjust_unit(gemms, tile.stage);
#pragma unroll
        for (int block = 0; block < C::kBlocks; ++block) {
            const float2 pair = {row_.probability(x[block][0], p.scale_log2),
                                 row_.probability(x[block][1], p.scale_log2)};
#pragma unroll
            for (int copy = 0; copy < C::kProbabilityCopies; ++copy) {
                float2 scaled = pair;
                if constexpr (C::kGrouped) {
                    const int token = block * 8 + lane % 4 * 2;
                    const float2 scale =
                        C::kScaleUnits ? *reinterpret_cast<const float2*>(scales(copy) + token)
                                       : gemms.value_scales(tile.stage, token, copy);
                    scaled = {pair.x * scale.x, pair.y * scale.y};
                }
                char* to = probabilities() + copy * (C::kRows * C::kProbabilityPitch) +
                           C::probability_offset(row, block) + lane % 4 * 4;
                *reinterpret_cast<uint32_t*>(to) =
                    ptx::cvt_rn_x2<typename C::Operand>(scaled.x, scaled.y);
            }
        }
        return factor != 1.f || (C::kScaleUnits && by_unit_ != 1.f);
    }

    // Factor by which O has to be multiplied after its last tile.
    __device__ float output_unit() const {
        return 1.f / __shfl_sync(~0u, unit_.unit, column_group());
    }

    __device__ float2 rescale(int tile) const {
        const float* from = rescales() + tile * 16 + position_.lane() / 4;
        if constexpr (C::kScaleUnits) return {from[0] * by_unit_, from[8] * by_unit_};
        return {from[0], from[8]};
    }

    __device__ void operator()(int tile, int unit, uint32_t (&a)[4]) const {
        const int lane = position_.lane();
        const int copy = C::kGrouped ? column_group() : 0;
        const char* from = probabilities() + copy * (C::kRows * C::kProbabilityPitch) +
                           C::probability_offset(tile * 16 + (lane & 15), unit * 2 + (lane >> 4));
        ptx::ldmatrix_x4(a, ptx::shared_address(from));
    }

    __device__ void finish(typename C::Statistics& statistics) {
        const int lane = position_.lane(), row = first_row() + column_group() * 8 + lane / 4;
        const float sum = quad_sum(row_.sum);
        if (lane % 4 == 0) put_statistics<C>(statistics, row, row_.maximum, sum);
    }

  private:
    // Units of 16 tokens in a KV tile.
    static constexpr int kUnits = C::kTokens / 16;

    // Stores the tile's scales for the warp, in the units of their groups. Lane l handles group l %
    // 4, of every eighth token.
    __device__ void adjust_unit(const Gemms<C>& gemms, const char* stage) {
        const int lane = position_.lane(), group = lane % 4;
        static_assert(kColumnGroups == 4);
        float own[C::kBlocks], top = 0.f;
#pragma unroll
        for (int block = 0; block < C::kBlocks; ++block) {
            own[block] = gemms.value_scale(stage, block * 8 + lane / 4, group);
            top = fmaxf(top, fabsf(own[block]));
        }
        by_unit_ = __shfl_sync(~0u, unit_.template adjust<4, 32>(top), column_group());
        // After this, all lanes have read the scales of the last tile.
        __syncwarp();
#pragma unroll
        for (int block = 0; block < C::kBlocks; ++block)
            scales(group)[block * 8 + lane / 4] = own[block] * unit_.unit;
        __syncwarp();
    }
    __device__ float* scales(int group) const {
        return reinterpret_cast<float*>(shared_ + C::kScalesOffset) +
               ((row_group() * kColumnGroups + column_group()) * kColumnGroups + group) *
                   C::kTokens;
    }

    __device__ int row_group() const { return position_.row_group(); }
    __device__ int column_group() const { return position_.column_group(); }
    __device__ int first_row() const { return row_group() * C::kWarpRows; }
    __device__ float4* entry(int to, int from, int unit) const {
        return reinterpret_cast<float4*>(shared_ + C::kScoreOffset) +
               (((row_group() * kColumnGroups + to) * kColumnGroups + from) * kUnits + unit) * 32;
    }
    __device__ char* probabilities() const {
        return shared_ + C::kProbabilityOffset + first_row() * C::kProbabilityPitch;
    }
    __device__ float* rescales() const {
        auto* statistics =
            reinterpret_cast<typename C::Statistics*>(shared_ + C::kStatisticsOffset);
        return statistics->rescale + first_row();
    }

    char* shared_;
    const ThreadPosition& position_;
    RowState row_;
    // The unit of group lane % 4. by_unit_ is the factor that the last tile's unit gives the output
    // of this warp's columns.
    UnitOf<C> unit_;
    float by_unit_ = 1.f;
};

}  // namespace mla::sm80::decode
