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

#include <type_traits>

#include "params.cuh"
#include "ptx/sm90.cuh"
#include "ptx/wgmma.cuh"

namespace mla::sm90::sparse {

enum class Format { same, e4m3, ds_mla };

// Rows of the queries' own dtype, T.
template <typename T>
struct SameRows {
    using Operand = T;
    static constexpr int kBytes = (kLatent + kRope) * 2;
    // True if rotary keys may lie in a tensor of their own. A latent then has kLatentBytes bytes.
    static constexpr bool kSplits = true;
    static constexpr int kLatentBytes = kLatent * 2;
    static constexpr int kPitch = kBytes + 16;
    // True if latent values have scales of their own.
    static constexpr bool kScales = false;
    // True if queries are converted to f16 and scaled. The order of their words depends on this,
    // too.
    static constexpr bool kConverts = false;

    __device__ static int key_row(int i) { return i; }
    __device__ static int latent(int t, int half, int g) { return 16 * t + 8 * half + g; }
};

// The properties that rows of e4m3 have in common.
struct QuantisedRows {
    using Operand = __half;
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
struct E4m3Rows : QuantisedRows {
    static constexpr int kBytes = kLatent + kRope;
    static constexpr bool kSplits = true;
    static constexpr int kLatentBytes = kLatent;
    // This is also the pitch of rows with scales.
    static constexpr int kPitch = 656;
    static constexpr bool kScales = false;
};

// fp8_ds_mla: 512 bytes, four f32 scales, 64 rotary values of bf16.
struct DsMlaRows : QuantisedRows {
    static constexpr int kBytes = 656;
    static constexpr bool kSplits = false;
    static constexpr int kLatentBytes = 528;
    static constexpr int kPitch = 656;
    static constexpr bool kScales = true;
    static constexpr int kScalesOffset = 512, kRopeOffset = 528;
    static constexpr int kGroups = 4, kGroupValues = kLatent / kGroups;
};

template <typename T, Format format>
using Rows = std::conditional_t<format == Format::same, SameRows<T>,
                                std::conditional_t<format == Format::e4m3, E4m3Rows, DsMlaRows>>;

static_assert(SameRows<__half>::kPitch % 128 == 16 && DsMlaRows::kPitch % 128 == 16);

}  // namespace mla::sm90::sparse
