// Host version of cuda/ptx/special.cuh.
#pragma once

#include "sm80.cuh"

namespace mla::ptx {

inline int tid_x() { return threadIdx.x; }

}  // namespace mla::ptx
