// Named barriers, emulated.
#pragma once

#include "sm80.cuh"

namespace mla::ptx {

inline void barrier_sync(int id, int threads) { bar_sync(id, threads); }
inline void barrier_sync_all() { __syncthreads(); }

}  // namespace mla::ptx
