// The formats of cache rows, and the order in which a warp makes operands of them.
//
// A row has the same layout in shared memory as in the cache. Its pitch is 4 words more than a
// multiple of all banks, so loads of latents have no bank conflict. Both GEMMs take the cache as
// operand A from registers: S^T = K Q^T and O^T = V^T P^T. Lanes are numbered 4 g + q.
//
//   keys     a warp has the 16 rows of one stage of the ring: row i of its operand is row
//            key_row(i) of the stage, and both GEMMs and the probabilities keep this order;
//   values   a warp has 64 latent values. Accumulator rows g and g + 8 of its tile t, 0..3, are
//            the latent values latent(t, 0) and latent(t, 1).
//
// e4m3 becomes f16, which holds every value of e4m3 exactly. A lane reads eight bytes of a row at a
// time. Values are therefore summed in another order than the row's, and the queries have the same
// order.
#pragma once

#include "params.cuh"
#include "ptx/sm90.cuh"
#include "ptx/wgmma.cuh"

namespace mla::sm90::sparse {

// The smallest pitch that a row of so many bytes fits.
constexpr int pitch_of(int bytes) { return (bytes + 111) / 128 * 128 + 16; }

// A latent, its scales if it has some, and a rotary key of `rope` values, 64 or none. The scale of
// fp8_per_token comes last, other scales come before the rotary key.
//
// Rows of the queries' own dtype, T.
template <typename T, int rope>
struct SameRows {
    using Operand = T;
    static constexpr int kRope = rope;
    static constexpr int kBytes = (kLatent + kRope) * 2;
    // True if rotary keys may lie in a tensor of their own. A latent then has kLatentBytes bytes.
    static constexpr bool kSplits = kRope > 0;
    static constexpr int kLatentBytes = kLatent * 2;
    static constexpr int kPitch = pitch_of(kBytes);
    // True if latent values have scales of their own.
    static constexpr bool kScales = false;
    // True if queries are converted to f16 and scaled. The order of their words depends on this,
    // too.
    static constexpr bool kConverts = false;

    __device__ static int key_row(int i) { return i; }
    __device__ static int latent(int t, int half, int g) { return 16 * t + 8 * half + g; }
};

// The properties that rows of e4m3 have in common.
template <int rope>
struct QuantisedRows {
    using Operand = __half;
    static constexpr int kRope = rope;
    static constexpr bool kConverts = true;

    // The row of the stage that is row i of the operand. One load reads four of eight consecutive
    // rows of the operand: either neighbours or every other one. In this order, the four rows begin
    // in banks that are eight apart, so the load has no bank conflict.
    __device__ static int key_row(int i) {
        return (i >> 3) + ((i ^ i >> 2) & 1) * 4 + (i & 2) + (i & 4) * 2;
    }
    __device__ static int latent(int t, int half, int g) { return 8 * g + 2 * t + half; }
};

// Rows of e4m3, with one scale for the whole cache.
template <int rope>
struct E4m3Rows : QuantisedRows<rope> {
    static constexpr int kBytes = kLatent + rope;
    static constexpr bool kSplits = rope > 0;
    static constexpr int kLatentBytes = kLatent;
    static constexpr int kPitch = pitch_of(kBytes);
    static constexpr bool kScales = false;
};

// The properties that rows of e4m3 with scales have in common. Rotary values are of bf16.
template <int rope>
struct ScaledRows : QuantisedRows<rope> {
    static constexpr bool kSplits = false;
    static constexpr int kLatentBytes = 528;
    static constexpr bool kScales = true;
    static constexpr int kGroups = 4, kGroupValues = kLatent / kGroups;
    static constexpr int kBytes = kLatent + 16 + 2 * rope;
    static constexpr int kPitch = pitch_of(kBytes);
};

// fp8_ds_mla: 512 bytes, four f32 scales, the rotary values.
template <int rope>
struct DsMlaRows : ScaledRows<rope> {
    static constexpr int kScalesOffset = 512, kScaleStride = 4, kRopeOffset = 528;
};

// fp8_per_token: 512 bytes, the rotary values, one f32 scale, which stands for those of all groups.
// 12 bytes behind it fill the row up.
template <int rope>
struct PerTokenRows : ScaledRows<rope> {
    static constexpr int kScalesOffset = 512 + 2 * rope, kScaleStride = 0, kRopeOffset = 512;
};

static_assert(E4m3Rows<64>::kPitch == 656 && DsMlaRows<64>::kPitch == 656 &&
              DsMlaRows<0>::kPitch == 528 && PerTokenRows<64>::kBytes == 656 &&
              SameRows<__half, 0>::kPitch == 1040);

}  // namespace mla::sm90::sparse
