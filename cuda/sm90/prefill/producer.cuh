// The producer threads, which load tiles into shared memory.
#pragma once

#include <initializer_list>

#include "../../common/pipeline.cuh"
#include "../../ptx/sm90.cuh"
#include "config.cuh"
#include "params.cuh"

namespace mla::sm90::prefill {

// Two threads load the data of the published tiles. One loads query rows, whose buffers become free
// late and are needed soon. The other loads keys and values in the order of their use.
template <typename Config>
struct Producer {
    const KernelParams& p;
    const Maps& maps;
    Shared<Config>& shared;

    __device__ WorkTile published(PipelineState<kWorkStages> at) const {
        ptx::mbarrier_wait(ptx::shared_address(&shared.work_full[at.stage]), at.phase);
        return shared.work[at.stage];
    }

    // True if the first tile is loaded before it is published. The wait for the second tile then
    // covers the first one, too.
    __device__ bool expects() const {
        if (!p.uniform) return false;
        ptx::mbarrier_wait(ptx::shared_address(&shared.expected), 0);
        return shared.first.computes();
    }

    // Calls `load` with each published tile and the number of tiles before it.
    template <typename Load>
    __device__ void for_each_tile(Load load) const {
#pragma unroll 1
        for (int number = 0;; number++) {
            const PipelineState<kWorkStages> at(number);
            int tile = number;
            // Hides the number from the compiler, which would write separate code for the first
            // tile. Code that runs for the first time waits for its instructions. The kernel that
            // splits keys has no registers to spare for this.
            if constexpr (!Config::kSplitsKeys) asm volatile("" : "+r"(tile));
            const WorkTile work = tile == 0 && expects() ? shared.first : published(at);
            if (work.is_end()) break;
            if (work.computes()) load(work, number);
            ptx::mbarrier_arrive(ptx::shared_address(&shared.work_empty[at.stage]));
        }
    }

    __device__ static void copy(const CUtensorMap& map, const void* to, uint64_t& full, int column,
                                int head, int row, int end) {
        ptx::cp_async_bulk_tensor(&map, ptx::shared_address(to), ptx::shared_address(&full), column,
                                  head, row, end);
    }

    // Prefetches tensor maps, because they are in device memory. Called before the start barrier.
    __device__ static void prefetch(std::initializer_list<const CUtensorMap*> tensors) {
        for (const CUtensorMap* map : tensors) ptx::prefetch_tensormap(map);
    }

    __device__ void load_queries() const {
        for_each_tile([&](const WorkTile& work, int number) {
            for (int consumer = 0; consumer < kConsumers; consumer++) {
                ptx::mbarrier_wait(ptx::shared_address(&shared.query_empty[consumer]),
                                   (number & 1) ^ 1);
                // The consumers swap halves with each tile.
                load_query(work, consumer, consumer ^ (number & 1));
            }
        });
    }

    __device__ void load_query(const WorkTile& work, int consumer, int half) const {
        // No box may lie wholly behind the request's last row, because TMA faulted on such boxes. A
        // box therefore begins at the last row at the latest. The output rows of what it has
        // instead are not stored.
        const int query = min(work.query + half * kRows, work.query_len - 1);
        const int row = query + p.max_query_len - work.query_len,
                  end = work.query_start + work.query_len;
        uint64_t& full = shared.query_full[consumer];
        ptx::mbarrier_arrive_expect_tx(ptx::shared_address(&full), Config::kQueryBytes);
        for (int panel = 0; panel < Config::kQkPanels; panel++) {
            const bool rope = panel == Config::kNopePanels;
            copy(rope ? maps.query_rope : maps.query,
                 shared.query[consumer] + panel * Config::kQueryPanelBytes, full,
                 rope ? 0 : panel * kPanel, work.head, row, end);
        }
    }

    __device__ void load_keys_and_values() const {
        PipelineState<kStages> key, value;
        for_each_tile([&](const WorkTile& work, int) {
            const int last = work.kv_tiles - 1;
#pragma unroll 1
            for (int kv_tile = last; kv_tile >= 0; kv_tile--) {
                load_key(work, kv_tile, key);
                if (kv_tile == min(last, kClaimKvTile))
                    ptx::mbarrier_arrive(ptx::shared_address(&shared.work_wanted));
                if (kv_tile < last) load_value(work, kv_tile + 1, value);
            }
            load_value(work, 0, value);
        });
    }

    __device__ void load_key(const WorkTile& work, int kv_tile, PipelineState<kStages>& at) const {
        const int row = kv_tile * Config::kKeys + p.max_key_len - work.key_len;
        ptx::mbarrier_wait(ptx::shared_address(&shared.key_empty[at.stage]), at.phase ^ 1);
        uint64_t& full = shared.key_full[at.stage];
        ptx::mbarrier_arrive_expect_tx(ptx::shared_address(&full), Config::kKeyBytes);
        for (int panel = 0; panel < Config::kQkPanels; panel++) {
            const bool rope = panel == Config::kNopePanels;
            copy(rope ? maps.key_rope : maps.key,
                 shared.key[at.stage] + panel * Config::kKeyPanelBytes, full,
                 rope ? 0 : panel * kPanel, rope && p.key_rope_head_stride == 0 ? 0 : work.head,
                 row, work.key_end);
        }
        at.advance();
    }

    __device__ void load_value(const WorkTile& work, int kv_tile,
                               PipelineState<kStages>& at) const {
        const int row = kv_tile * Config::kKeys + p.max_key_len - work.key_len;
        ptx::mbarrier_wait(ptx::shared_address(&shared.value_empty[at.stage]), at.phase ^ 1);
        uint64_t& full = shared.value_full[at.stage];
        ptx::mbarrier_arrive_expect_tx(ptx::shared_address(&full), Config::kValueBytes);
        for (int panel = 0; panel < Config::kValuePanels; panel++) {
            copy(maps.value, shared.value[at.stage] + panel * Config::kKeyPanelBytes, full,
                 panel * kPanel, work.head, row, work.key_end);
        }
        at.advance();
    }
};

}  // namespace mla::sm90::prefill
