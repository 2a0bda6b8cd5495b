// How score warps and output warps hand over KV tiles, P and statistics: by named barriers at which
// one role arrives and the other one waits.
//
// What one role says of a tile, the other one waits for once, and no role is two tiles ahead of
// what the other one has waited for. So two barriers in turn are enough of each kind.
#pragma once

#include "ptx/sm80.cuh"

namespace mla::sm80::decode {

template <class C>
struct Handover {
    // The copies of a tile have arrived: output warps say so.
    __device__ static void tile_arrived(int tile) { arrive(kTile + (tile & 1)); }
    __device__ static void wait_for_tile(int tile) { wait(kTile + (tile & 1)); }

    // P of a tile, and the factors that go with it: score warps say so. When an output warp has
    // waited for it, all output warps have read the tile before it.
    __device__ static void p_ready(int tile) { arrive(kReady + (tile & 1)); }
    __device__ static void wait_for_p(int tile) { wait(kReady + (tile & 1)); }

    // P of a tile has been read, its place is free: output warps say so.
    __device__ static void p_read(int tile) { arrive(kRead + (tile & 1)); }
    __device__ static void wait_until_p_is_read(int tile) { wait(kRead + (tile & 1)); }

    // Maxima and sums of an item's rows, likewise.
    __device__ static void statistics_ready() { arrive(kStatistics); }
    __device__ static void wait_for_statistics() { wait(kStatistics); }
    __device__ static void statistics_read() { arrive(kStatistics + 1); }
    __device__ static void wait_until_statistics_are_read() { wait(kStatistics + 1); }

  private:
    static constexpr int kTile = C::kOutputBarrier + 1, kReady = kTile + 2, kRead = kReady + 2,
                         kStatistics = kRead + 2;
    __device__ static void arrive(int barrier) { ptx::bar_arrive(barrier, C::kCtaThreads); }
    __device__ static void wait(int barrier) { ptx::bar_sync(barrier, C::kCtaThreads); }
};

}  // namespace mla::sm80::decode
