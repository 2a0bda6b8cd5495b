// The loading warps of all kernels but the one in wide/: they copy rows of the cache to the ring.
#pragma once

#include "list_walk.cuh"

namespace mla::sm90::sparse {

// One of the four warps. Each copies the rows of one slot of each KV tile: the
// instruction that starts a copy takes a lane at a time, some 50 cycles each,
// which is too long for one warp.
template <class L, class Rows>
struct KeyLoader {
    ListWalk<L> walk;
    uint32_t ring_base;
    Ring<L::kSlots> ring = {};
    ptx::CachePolicy policy = ptx::createpolicy_evict_first();

    __device__ void run() {
        walk.run([&](uint32_t taken, int keys) { copy(taken, keys); });
    }

    // Copies this warp's slot of a tile. Where the slot has fewer keys than room,
    // the last row is copied again: what is multiplied by a probability of zero
    // has to be finite.
    __device__ void copy(uint32_t taken, int keys) {
        const int first = walk.warp * kSlotKeys, lane = walk.lane;
        if (first < keys) {
            Ring<L::kSlots> own = ring;
            own.advance(walk.warp);
            const uint32_t full = ptx::shared_address(&walk.s.full[own.slot]);
            const int key = min(first + (lane & (kSlotKeys - 1)), keys - 1);
            const char* row = walk.row(walk.entry(taken + key));
            ptx::mbarrier_wait(ptx::shared_address(&walk.s.empty[own.slot]), own.phase ^ 1);
            if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, kSlotKeys * Rows::kBytes);
            __syncwarp();
            const uint32_t to = ring_base + own.slot * L::kSlotBytes + lane * Rows::kPitch;
            const int bytes = Rows::kSplits ? walk.p.row_bytes : Rows::kBytes;
            if (lane < kSlotKeys && walk.p.read_once)
                ptx::cp_async_bulk(to, row, bytes, full, policy);
            else if (lane < kSlotKeys)
                ptx::cp_async_bulk(to, row, bytes, full);
            if (Rows::kSplits && walk.p.split && lane < kSlotKeys)
                ptx::cp_async_bulk(to + Rows::kLatentBytes, walk.rope(walk.entry(taken + key)),
                                   Rows::kBytes - Rows::kLatentBytes, full);
        }
        ring.advance((keys + kSlotKeys - 1) / kSlotKeys);
    }
};

}  // namespace mla::sm90::sparse
