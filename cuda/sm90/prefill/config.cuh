// The compile-time description of a kernel: the sizes of a tile, and the layout of shared memory.
//
// TMA loads everything in panels of 64 columns: 128 bytes wide with 128-byte swizzle, as the tensor
// cores read them. A query or key row consists of its panels without rotary embedding, and of one
// panel that holds the rotary part. If that part is narrower than 64 columns, TMA fills the panel
// up with zeros, and the MMA stops before them.
#pragma once

#include <cstdint>

#include "../../common/named_barrier.cuh"

namespace mla::sm90::prefill {

// Query rows of a tile: one m64 MMA for each of two warpgroups.
constexpr int kConsumers = 2;
constexpr int kRows = 64;
constexpr int kQueries = kConsumers * kRows, kQueriesLog2 = 7;
static_assert(kQueries == 1 << kQueriesLog2);
constexpr int kThreads = 128 * (kConsumers + 1);
// The warps of the first warpgroup, by role.
constexpr int kKeyWarp = 0, kSetupWarp = 1, kQueryWarp = 2, kSchedulerWarp = 3;
constexpr int kPanel = 64;
constexpr int kStages = 2;
// Number of tiles that are published and not yet finished: one is being computed, the other is
// being loaded.
constexpr int kWorkStages = 2;
// A CTA claims its next tile when it loads this KV tile of the current one. A CTA that claims too
// early may be overtaken by others, and then ends after all of them. A CTA that claims too late
// does not know the tile when it could load it.
constexpr int kClaimKvTile = 3;
// Query rows of a warp; each warp stores its rows by itself.
constexpr int kWarpRows = 16;
constexpr int kConsumerWarps = kQueries / kWarpRows;
// Number of slots for partial results in the workspace, for each SM. Each split takes one.
constexpr int kSlotsPerSm = 3;
// Named barriers. `mma_order` and `combine` are for the warps of all consumers. At the start,
// `start` is for all warps but the scheduler, and `setup` for the scheduler and the warp that
// initialises the mbarriers. __syncthreads uses barrier 0.
enum class BarrierId : int {
    mma_order = 1,                     // one for each consumer
    combine = mma_order + kConsumers,  // for combining
    start,
    setup,
};
using StartBarrier = NamedBarrier<BarrierId::start, kThreads - 32>;
using SetupBarrier = NamedBarrier<BarrierId::setup, 2 * 32>;
using CombineBarrier = NamedBarrier<BarrierId::combine, 128 * kConsumers>;
// Order of the consumers at the tensor cores: one waits until the other has issued its MMAs.
struct MmaOrderBarrier {
    __device__ static void wait(int consumer) {
        ptx::bar_sync(int(BarrierId::mma_order) + consumer, 128 * kConsumers);
    }
    __device__ static void arrive_next(int consumer) {
        ptx::bar_arrive(int(BarrierId::mma_order) + (consumer + 1) % kConsumers, 128 * kConsumers);
    }
};
// Maximum number of splits of a query tile.
constexpr int kMaxSplits = 128;
// A chunk: keys of a KV tile that a warp masks or leaves out together. A thread holds scores of
// them octet by octet.
constexpr int kChunkOctets = 4, kChunkKeys = 8 * kChunkOctets;
// `splits_keys` is true if the keys of a query tile may be divided into splits. A kernel that never
// does so is shorter, and its consumers have registers to spare.
template <typename Element_, int nope_, int rope_, int value_, int keys_, bool splits_keys = true>
struct Config {
    using Element = Element_;
    using Unsplit = Config<Element_, nope_, rope_, value_, keys_, false>;
    static constexpr bool kSplitsKeys = splits_keys;
    // Registers of a thread. All threads start with 168: an SM's registers divided by kThreads,
    // rounded down to a multiple of 8. A kernel that splits keys has more state before the first
    // tile.
    static constexpr int kConsumerRegisters = splits_keys ? 224 : 232,
                         kProducerRegisters = splits_keys ? 56 : 40;
    static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * 168);
    static constexpr int kNope = nope_, kRope = rope_, kValue = value_;
    static constexpr int kKeys = keys_;
    static_assert(nope_ % kPanel == 0 && value_ % kPanel == 0 && rope_ % 16 == 0 &&
                  rope_ <= kPanel);

    static constexpr int kNopePanels = nope_ / kPanel;
    static constexpr int kQkPanels = kNopePanels + 1;
    static constexpr int kValuePanels = value_ / kPanel;
    // K steps of 16: over the width of a query, and over the keys of a KV tile.
    static constexpr int kQkSteps = (nope_ + rope_) / 16;
    static constexpr int kKeySteps = keys_ / 16;
    static constexpr int kChunks = keys_ / kChunkKeys;
    static_assert(keys_ % kChunkKeys == 0);

    static constexpr int kQueryPanelBytes = kRows * kPanel * 2;
    static constexpr int kKeyPanelBytes = keys_ * kPanel * 2;
    static constexpr int kQueryBytes = kQkPanels * kQueryPanelBytes;
    static constexpr int kKeyBytes = kQkPanels * kKeyPanelBytes;
    static constexpr int kValueBytes = kValuePanels * kKeyPanelBytes;
    static constexpr int kOutPanelBytes = kWarpRows * kPanel * 2;
};

// Work that the scheduler publishes. First come query tiles to compute, or splits of them, and then
// an end mark. If query tiles have splits, shares of their combine follow, and then another end
// mark.
struct alignas(16) WorkTile {
    // Slots of partial results in the workspace. The lower half is the first slot of this query
    // tile, and the upper half is this split's slot. Both are -1 without partial results. They
    // share one register, because registers are scarce.
    int slots;
    int head;
    int query;  // first query row of the tile within its request
    int query_start, query_len;
    // Number of keys from the split's first one to the request's last one, and the row behind the
    // request's last key. In a combine, key_len is the number of splits.
    int key_len, key_end;
    int kv_tiles;  // KV tiles to go through

    __device__ static int pack(int first_slot, int slot) {
        return slot << 16 | (first_slot & 0xffff);
    }
    __device__ int first_slot() const { return int16_t(slots); }
    __device__ int slot() const { return slots >> 16; }

    __device__ static WorkTile mark(bool is_end) {
        WorkTile work = {};
        work.slots = pack(-1, is_end ? -1 : 0);
        return work;
    }

    // Returns the same work, but without output rows to store.
    __device__ WorkTile without_rows() const {
        WorkTile work = *this;
        work.slots = pack(-1, -1);
        work.query_len = 0;
        return work;
    }

    // True for a tile to compute, for a share of a combine, and for the last mark, behind which no
    // work comes.
    __device__ bool computes() const { return kv_tiles > 0; }
    __device__ bool combines() const { return kv_tiles == 0 && first_slot() >= 0; }
    __device__ bool is_end() const { return kv_tiles == 0 && slot() < 0; }
};

// Names the rows of a warp by the first one's place in the batch. Their output has a NaN
// (repair.cuh).
struct ContaminatedRows {
    int token, head;
};
// Maximum number of entries that a warp notes.
constexpr int kMaxContaminated = 512;

template <typename Config>
struct Shared {
    alignas(1024) uint8_t query[kConsumers][Config::kQueryBytes];
    alignas(1024) uint8_t key[kStages][Config::kKeyBytes];
    alignas(1024) uint8_t value[kStages][Config::kValueBytes];
    alignas(1024) uint8_t out[kConsumers * kRows / kWarpRows][Config::kOutPanelBytes];
    alignas(8) uint64_t query_full[kConsumers], query_empty[kConsumers];
    alignas(8) uint64_t key_full[kStages], key_empty[kStages];
    alignas(8) uint64_t value_full[kStages], value_empty[kStages];
    alignas(8) uint64_t work_full[kWorkStages], work_empty[kWorkStages], work_wanted;
    alignas(8) uint64_t expected;  // one phase: `first` has been written
    alignas(8) uint64_t idle;      // never completes a phase; see hold()
    WorkTile work[kWorkStages];
    // The first tile as the host's numbers say it is. The producers load it before it is published.
    WorkTile first;
    int contaminated[kConsumerWarps];  // number of entries that each consumer warp has noted
};

}  // namespace mla::sm90::prefill
