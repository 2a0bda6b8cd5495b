// The barrier at which score warps and output warps hand over KV tiles, P and statistics. All warps
// synchronise there once per tile.
//
//   score warps:   scores of tile t + 1          | have stored P of t + 1
//   output warps:  output of tile t, copies      | have read P of t and the tile, t + 2 has arrived
//
// P has two buffers. A tile's stage is free after the barrier that follows its output. No role is
// more than one tile ahead of the other.
#pragma once

#include "ptx/barrier.cuh"

namespace mla::sm80::decode {

template <class C>
struct RoleBarrier {
    // Called for each tile, when its P is complete, and before the first tile, when that tile has
    // arrived. After an item's last tile, it is called when its rows' statistics are complete. It
    // is also called before another item's first P is written, when output warps have read the
    // statistics and the output that they had stored in P's place.
    __device__ static void sync() { ptx::barrier_sync(kBarrier, C::kCtaThreads); }

  private:
    static constexpr int kBarrier = C::kOutputBarrier + 1;
};

}  // namespace mla::sm80::decode
