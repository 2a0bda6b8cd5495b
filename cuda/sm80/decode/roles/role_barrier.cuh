// The barrier at which score warps and output warps hand over KV tiles, P and statistics: all warps
// synchronise there once per tile.
//
//   score warps:   scores of tile t + 1          | have left P of t + 1
//   output warps:  output of tile t, copies      | have read P of t and the tile, t + 2 has arrived
//
// P has two buffers, a tile's stage is free behind the barrier after its output, and no role is
// further than one tile ahead of the other.
#pragma once

#include "ptx/barrier.cuh"

namespace mla::sm80::decode {

template <class C>
struct RoleBarrier {
    // Called at each tile, when its P is complete; before the first tile, when that has arrived;
    // behind an item's last tile, when its rows' statistics are complete; and before another item's
    // first P is written, when output warps have read the statistics and the output that they had
    // stored in P's place.
    __device__ static void sync() { ptx::barrier_sync(kBarrier, C::kCtaThreads); }

  private:
    static constexpr int kBarrier = C::kOutputBarrier + 1;
};

}  // namespace mla::sm80::decode
