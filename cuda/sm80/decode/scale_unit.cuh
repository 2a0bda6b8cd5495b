// The unit of a group's scales. It brings P times a scale into the range of f16.
//
// V's bytes become f16 as they are, so P carries their scales. Scales are any f32, but f16 loses
// bits below 2^-14. A product p * s is therefore rounded as p * s * unit, and O is kept in the same
// unit. Each group of columns has a unit of its own, because another group's scales may be larger
// by any factor. The unit is adjusted to the largest scale of the group's tokens. It is a power of
// two, so it adds no rounding.
//
// P is up to 2^7 (2^15 while its reference follows lazily), and s * unit up to 1, so no operand
// overflows. Operands of 2^-14 and more have f16's 11 bits. Smaller ones lose at most 2^-25.
// Relative to P of 2^7 with the group's largest scale, that is about 2^-32. If all tokens that
// matter to a row have scales of 2^-20 of the largest, its output still has 12 bits.
#pragma once

#include "ptx/sm80.cuh"

namespace mla::sm80::decode {

struct ScaleUnit {
    // Any scale that is not subnormal lowers the unit.
    float unit = 0x1p126f;

    // Finds the largest scale among the lanes whose numbers differ only in the bits from `kFirst`
    // to below `kEnd`. `top` is the largest scale of this lane. Returns the factor for earlier
    // sums. Called by whole warps.
    template <int kFirst, int kEnd>
    __device__ float adjust(float top) {
        if (!__any_sync(~0u, top * unit > 1.f)) return 1.f;
#pragma unroll
        for (int distance = kFirst; distance < kEnd; distance *= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
        const float before = unit;
        // Makes the largest scale less than 1/2. A somewhat larger scale then changes nothing.
        if (top * unit > 1.f)
            unit = __int_as_float(max(252 - (__float_as_int(top) >> 23), 1) << 23);
        return unit / before;
    }
};

}  // namespace mla::sm80::decode
