// Instructions that GPUs have from 8.9 on. The kernels are emulated as PTX for Ampere has them.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "sm80.cuh"

inline uint32_t __byte_perm(uint32_t, uint32_t, uint32_t) { std::abort(); }

namespace mla::ptx {

inline uint2 cvt_f16x4_e4m3x4(uint32_t) { std::abort(); }

}  // namespace mla::ptx
