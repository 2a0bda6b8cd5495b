// Named barriers, emulated.
#pragma once

#include "sm80.cuh"

namespace mla::ptx {

inline void barrier_sync(int id, int threads) { bar_sync(id, threads); }
inline bool barrier_red_or(int id, int threads, bool own) { return bar_red_or(id, threads, own); }

}  // namespace mla::ptx
