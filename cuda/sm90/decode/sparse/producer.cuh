// The loading warps copy rows of the cache to the ring. The kernel in wide/ has others.
#pragma once

#include "list_walk.cuh"

namespace mla::sm90::sparse {

// One of the four warps. Each copies the rows of one stage of each KV tile. The instruction that
// starts a copy takes some 50 cycles for each lane, which is too long for one warp.
template <class L, class Rows>
struct Producer {
    ListWalk<L> walk;
    uint32_t ring_base;
    PipelineState<L::kStages> ring = {};
    ptx::CachePolicy policy = ptx::createpolicy_evict_first();

    __device__ void run() {
        walk.run([&](uint32_t taken, int keys) { copy(taken, keys); });
    }

    // Copies this warp's stage of a tile. If the stage has fewer keys than rows, the last key's row
    // is copied to the other rows, too. Their probability is zero, but zero times an old NaN would
    // be NaN.
    __device__ void copy(uint32_t taken, int keys) {
        const int first = walk.warp * kStageKeys, lane = walk.lane;
        if (first < keys) {
            PipelineState<L::kStages> own = ring;
            own.advance(walk.warp);
            const uint32_t full = ptx::shared_address(&walk.s.full[own.stage]);
            const int key = min(first + (lane & (kStageKeys - 1)), keys - 1);
            const char* row = walk.row(walk.entry(taken + key));
            ptx::mbarrier_wait(ptx::shared_address(&walk.s.empty[own.stage]), own.phase ^ 1);
            if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, kStageKeys * Rows::kBytes);
            __syncwarp();
            const uint32_t to = ring_base + own.stage * L::kStageBytes + lane * Rows::kPitch;
            const int bytes = Rows::kSplits ? walk.p.row_bytes : Rows::kBytes;
            if (lane < kStageKeys && walk.p.read_once)
                ptx::cp_async_bulk(to, row, bytes, full, policy);
            else if (lane < kStageKeys)
                ptx::cp_async_bulk(to, row, bytes, full);
            if (Rows::kSplits && walk.p.split && lane < kStageKeys)
                ptx::cp_async_bulk(to + Rows::kLatentBytes, walk.rope(walk.entry(taken + key)),
                                   Rows::kBytes - Rows::kLatentBytes, full);
        }
        ring.advance((keys + kStageKeys - 1) / kStageKeys);
    }
};

}  // namespace mla::sm90::sparse
