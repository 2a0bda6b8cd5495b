// Synchronisation of the row groups of a CTA. Each row group computes its rows of the same KV
// tiles, and the row groups share the tiles' stages in shared memory.
//
// When a row group has multiplied the values of tile i, it passes the tile: it no longer reads tile
// i, and its copies of tiles i + 1 and i + 2 have arrived. The other row group waits for this
// before it copies another tile to the stage of tile i, and before it reads tile i + 2. Neither row
// group is then a whole tile ahead. One may compute its softmax while the other multiplies.
#pragma once

#include "config.cuh"
#include "ptx/sm80.cuh"
#include "thread_position.cuh"

namespace mla::sm80::decode {

template <class C>
class RowGroups {
    static_assert(C::kRowGroups <= 2);

  public:
    __device__ explicit RowGroups(const ThreadPosition& position) : position_(position) {}

    // Synchronises the warps of this row group.
    __device__ void sync() const { ptx::bar_sync(own_barrier(), C::kThreads / 2); }
    // Synchronises the warps of this row group. Returns true if `own` is true in any of their
    // threads.
    __device__ bool sync_or(bool own) const {
        return ptx::bar_red_or(own_barrier(), C::kThreads / 2, own);
    }

    // Passes a tile, without waiting. Each row group waits once for every tile that the other
    // passes.
    __device__ void pass(int tile) const {
        ptx::bar_arrive(passed(position_.row_group(), tile), C::kThreads);
    }
    __device__ void wait(int tile) const {
        ptx::bar_sync(passed(1 - position_.row_group(), tile), C::kThreads);
    }

  private:
    // Barrier 0 belongs to the CTA. A row group may pass a tile before the other has waited for the
    // tile before it, but no further.
    static constexpr int kFirst = 1;
    __device__ int own_barrier() const { return kFirst + position_.row_group(); }
    __device__ static int passed(int row_group, int tile) {
        return kFirst + 2 + row_group * 2 + (tile & 1);
    }

    const ThreadPosition& position_;
};

}  // namespace mla::sm80::decode
