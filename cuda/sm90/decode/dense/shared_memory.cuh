// The part of a CTA's shared memory that is the same for all cache formats. It brings the work to
// the warps. The rest is the format's Layout (plain/layout.cuh, fp8/layout.cuh).
#pragma once

#include "../../../common/named_barrier.cuh"
#include "../../../common/pipeline.cuh"
#include "params.cuh"
#include "scheduler.cuh"

namespace mla::sm90::decode {

// A panel is 64 tokens, or query rows, by 64 values of 16 bits.
constexpr int kPanelBytes = kTileTokens * 64 * 2;
// Limit of a CTA's shared memory on sm_90: 227 KiB.
constexpr int kSharedLimit = 232448;
constexpr int kOutputThreads = 256, kOutputWarps = kOutputThreads / 32;

// The named barriers of a CTA, and their numbers of threads.
enum class BarrierId : int {
    start = 0,          // all warps but the one that warms up
    output = 1,         // the output warpgroups
    scores = 2,         // a warpgroup of the scores
    second_scores = 3,  // the other one, of an e4m3 cache
    warm_up = 4,        // the warp that warms up learns that the others have begun
};

using OutputBarrier = NamedBarrier<BarrierId::output, kOutputThreads>;
using ScoresBarrier = NamedBarrier<BarrierId::scores, 128>;
using SecondScoresBarrier = NamedBarrier<BarrierId::second_scores, 128>;
using WarmUpBarrier = NamedBarrier<BarrierId::warm_up, 64>;

// Length of the queue of work items.
constexpr int kQueuedItems = 4;

// The part of a work item that the warp needs that copies the cache.
struct Loading {
    int request, kv_tile_begin, kv_tile_end, kv_len;
};

// Query tiles that a CTA combines as a whole after its last work item, because all combiners fell
// back. They are the tile of its last item, the tile of its first item, or both. The CTA's own
// slice of the last item's tile is not meant here.
struct DeferredCombine {
    bool last, first;
    WorkItem first_item;
};

// `readers` threads release each item of the queue; `stats_writers` arrive for an item's stats.
template <uint32_t readers, uint32_t stats_writers>
struct CommonControl {
    int lens[kMaxRequests];
    // Length of each request of the batch that is planned to warm up.
    int warm_up_length;
    WorkItem items[kQueuedItems];
    Loading loading;
    // True if the cache is read as evict-first.
    bool evict_first;
    // Items in the queue. The scheduler's lane 0 publishes an item, and every reader releases it.
    Barrier<1> item_full[kQueuedItems];
    Barrier<readers> item_empty[kQueuedItems];
    // Each is completed once in a launch, by the lanes that copied the lengths or the block table.
    Barrier<32> lengths_full, table_full;
    // A work item's maxima and sums. The lanes that write them publish them, and all threads of the
    // output release them.
    Barrier<stats_writers> stats_full;
    Barrier<kOutputThreads> stats_empty;
    // The largest magnitude in each output warp's part of a partial result.
    alignas(16) float split_top[kOutputWarps];
    SplitRole split_role;
    DeferredCombine deferred;

    // Called by one thread, before the CTA's first barrier. Every address is a constant, because
    // addresses that may differ between lanes would be handled lane by lane.
    __device__ void init_common() {
#pragma unroll
        for (int i = 0; i < kQueuedItems; ++i) {
            item_full[i].init();
            item_empty[i].init();
        }
        deferred.last = deferred.first = false;
        lengths_full.init();
        table_full.init();
        stats_full.init();
        stats_empty.init();
    }
};

}  // namespace mla::sm90::decode
