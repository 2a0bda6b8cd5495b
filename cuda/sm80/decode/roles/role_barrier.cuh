// The barrier at which score warps and output warps hand over KV tiles, P and statistics: all warps
// synchronise there once per tile.
//
//   score warps:   scores of tile t + 1          | have left P of t + 1
//   output warps:  output of tile t, copies      | have read P of t and the tile, t + 2 has arrived
//
// So P has two buffers, a tile's stage is free behind the barrier after its output, and no role is
// further than one tile ahead of the other.
#pragma once

#include "ptx/barrier.cuh"

namespace mla::sm80::decode {

template <class C>
struct RoleBarrier {
    // Called before the first tile, which has arrived; at each tile, whose P is there, and behind
    // an item's last one its rows' statistics; and before P of another item's first tile, when
    // output warps have read what they left in P's place, and the statistics.
    __device__ static void sync() { ptx::barrier_sync(kBarrier, C::kCtaThreads); }

  private:
    static constexpr int kBarrier = C::kOutputBarrier + 1;
};

}  // namespace mla::sm80::decode
