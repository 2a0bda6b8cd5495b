// The context that the roles of a CTA share: its parameters, its shared memory, its position in
// the grid.
#pragma once

#include "../../../common/page_position.cuh"
#include "fragments.cuh"
#include "params.cuh"
#include "scheduler.cuh"
#include "shared_memory.cuh"

namespace mla::sm90::decode {

// The context of all roles of a CTA. C is a Config (config.cuh).
template <class C>
struct Context {
    using L = typename C::L;
    static constexpr int N = C::N;

    const KernelParams& p;
    uint32_t base;  // address of shared memory
    typename C::Control& s;
    // Number of this CTA within its group, and number of the group. The CTA's number selects its
    // rows of a query tile.
    int rank, group_id;

    // Number of CTAs of a group, and number of groups. If a config says kAnyGroup, the grid has a
    // row of CTAs for each group.
    static constexpr bool kAny = C::kGroupCtas == kAnyGroup;
    __device__ static int group_ctas() { return kAny ? int(gridDim.x) : C::kGroupCtas; }
    __device__ static int groups() {
        if constexpr (kAny)
            return gridDim.y;
        else
            return gridDim.x / C::kGroupCtas;
    }
    // This CTA's number, and the number of all CTAs.
    __device__ static uint32_t cta() {
        return kAny ? blockIdx.y * gridDim.x + blockIdx.x : blockIdx.x;
    }
    __device__ static uint32_t ctas() { return kAny ? gridDim.y * gridDim.x : gridDim.x; }
    // These compute `rank` and `group_id`.
    __device__ static int own_rank() {
        if constexpr (kAny)
            return blockIdx.x;
        else
            return int(blockIdx.x) % C::kGroupCtas;
    }
    __device__ static int own_group() {
        if constexpr (kAny)
            return blockIdx.y;
        else
            return int(blockIdx.x) / C::kGroupCtas;
    }
    // Order of a list with an entry for each CTA of the launch. Entry g * kGroupStep +
    // list_offset() is that of the CTA with this CTA's rank in group g. The step is known at
    // compile time, even if the number of CTAs of a group is not.
    static constexpr int kGroupStep = kAny ? 1 : C::kGroupCtas;
    __device__ int list_offset() const { return kAny ? rank * groups() : rank; }

    __device__ uint32_t latent_stage(int stage) const {
        return base + L::kRingOffset + stage * L::kLatentStageBytes;
    }
    __device__ uint32_t rope_stage(int stage) const {
        return latent_stage(L::kLatentStages) + stage * kPanelBytes;
    }

    // Publishes an item in the queue. An item that is not valid marks the end. Called by the
    // scheduler warp.
    __device__ void publish(PipelineCounter<kQueuedItems>& q, const WorkItem& item) const {
        s.item_empty[q.stage()].wait(q.phase() ^ 1);
        __syncwarp();
        if ((threadIdx.x & 31) == 0) {
            s.items[q.stage()] = item;
            s.item_full[q.stage()].arrive();
        }
        ++q.count;
    }
    // Returns a reader's next item of the queue, or null at the end. The reader releases each item
    // when it no longer needs it.
    __device__ const WorkItem* acquire(const PipelineCounter<kQueuedItems>& q) const {
        s.item_full[q.stage()].wait(q.phase());
        const WorkItem* item = &s.items[q.stage()];
        return !item->is_valid() ? nullptr : item;
    }
    // Called by every thread that acquired the item.
    __device__ void release(PipelineCounter<kQueuedItems>& q) const {
        s.item_empty[q.stage()].arrive();
        ++q.count;
    }

    __device__ int first_row(const WorkItem& item) const { return item.first_row + rank * N; }
    __device__ int rows(const WorkItem& item) const {
        return min(max(item.q_len * p.heads - first_row(item), 0), N);
    }

    // Number of tokens of a request that all of its query tokens see. Each later query token sees
    // one more.
    __device__ int seen_by_all(const WorkItem& item) const {
        return p.causal ? item.kv_len - item.q_len + 1 : item.kv_len;
    }

    // The page of a request that holds a token.
    __device__ int page_of(int token) const {
        return p.page_shift >= 0 ? token >> p.page_shift : unsigned(token) / unsigned(p.page_size);
    }

    // A small block table is copied to shared memory while the lengths are still in flight. The
    // copy goes to a stage of the ring that is not in use yet. All CTAs together prefetch a large
    // table into L2.
    __device__ bool table_is_small() const { return p.block_table_entries <= kPanelBytes / 4; }
    __device__ uint32_t table_copy() const { return latent_stage(L::kLatentStages - 1); }

    // L2 policy of the cache's reads. Data that is read once should not evict lines from L2, least
    // of all dirty ones, which would have to be written back. But a long batch is read faster if
    // it may have all of L2.
    __device__ ptx::CachePolicy cache_policy() const {
        return s.evict_first ? ptx::createpolicy_evict_first() : ptx::CachePolicy{};
    }

    __device__ OutputRows<typename C::T> output_rows(const WorkItem& item) const {
        return {static_cast<typename C::T*>(p.out),
                p.out_token_stride,
                p.out_head_stride,
                p.heads,
                p.inverse_heads,
                item.q_begin,
                first_row(item),
                rows(item)};
    }

    // The factor of the output of a row whose sum is `sum`. It is applied at the end.
    __device__ float inverse_of(float sum) const {
        return sum == 0.f ? 0.f : __fdividef(p.out_scale, sum);
    }
};

// Called by a warp that has read a stage.
template <uint32_t arrivals>
__device__ __forceinline__ void free_stage(const Barrier<arrivals>& empty, int lane) {
    if (lane == 0) empty.arrive();
}

}  // namespace mla::sm90::decode
