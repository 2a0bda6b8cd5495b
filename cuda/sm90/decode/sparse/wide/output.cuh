// The output warpgroups of tiles of more than 32 heads compute O = O + P V. Each has 256 of the 512
// latent values, in every other panel. Both therefore finish with a stage at the same time.
//
// Accumulators have heads for rows and latent values for columns. For e = 0 and 1, lane 4 g + q of
// warp w of the warpgroup has in acc[s][4 i + e] the latent value latent(s, i) + e of head 16 w +
// g. In acc[s][4 i + 2 + e] it has the same value of head 16 w + g + 8.
#pragma once

#include "../../../../common/quad.cuh"
#include "../../../../ptx/prefetch.cuh"
#include "../combine.cuh"
#include "scores.cuh"

namespace mla::sm90::sparse {

template <typename T, int rope_values>
struct WideOutput {
    using L = WideLayout<rope_values>;
    // Accumulators of the two stages of a KV tile.
    using Sums = float[2][64];

    const KernelParams& p;
    typename L::Control& s;
    uint32_t base;
    // The thread's number among those of both warpgroups, and the number of its warpgroup. The
    // compiler knows that the latter is the same in all lanes.
    int thread, group;
    PipelineState<L::kLatentStages> latent = {};
    PipelineState<L::kRopeStages> rope = {};
    PipelineCounter<kPublishedTiles> tile = {};

    __device__ int row() const { return (thread >> 5 & 3) * 16 + (thread >> 2 & 7); }
    __device__ int latent_of(int stage, int i) const {
        return stage * 256 + i / 8 * 128 + group * 64 + i % 8 * 8 + 2 * (thread & 3);
    }

    __device__ void run() {
        uint32_t done = 0;
#pragma unroll 1
        for (int i = TileScheduler::first(p); i < p.items; i += TileScheduler::step(), ++done) {
            // The output warps have nothing else to do yet.
            prefetch(i + TileScheduler::step());
            find_ends(p, s.ends, i, done, thread);
            Sums acc;
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int j = 0; j < 64; ++j) acc[half][j] = 0.f;
            bool first = true;
            int keys = wait_for_tile();
            if (keys > 0) wait_for_issue();
#pragma unroll 1
            while (keys > 0) {
                release_tile();
                keys = add_tile(acc, first);
                first = false;
            }
            release_tile();
            ptx::mbarrier_wait(ptx::shared_address(&s.stats_full), done & 1);
            const WorkItem item(p, i);
            if (TileScheduler::splits() == 1)
                write(acc, item);
            else
                merge(acc, item);
            ptx::mbarrier_arrive(ptx::shared_address(&s.stats_empty));
        }
    }

  private:
    // Prefetches an item's queries and the start of its list into L2. Queries are read once, so
    // they are evict-first. Rows of the cache should stay, because other CTAs read them, too.
    __device__ void prefetch(int index) const {
        if (index >= p.items) return;
        const WorkItem item(p, index);
        static_assert(2 * L::kRows <= kOutputThreads, "a thread for each part of a query");
        const int head = thread >> 1;
        if (head < item.heads) {
            const bool rope = thread & 1;
            if (L::kRope > 0 || !rope)
                ptx::cp_async_bulk_prefetch(rope ? item.rope(p, head) : item.latent(p, head),
                                            (rope ? L::kRope : kLatent) * 2,
                                            ptx::createpolicy_evict_first());
        }
        prefetch_list(p, item, thread);
    }
    // Waits for the next tile. Returns its number of keys, which is 0 behind the last tile.
    __device__ int wait_for_tile() const {
        ptx::mbarrier_wait(ptx::shared_address(&s.tile_full[tile.stage()]), tile.phase());
        const int& keys = s.keys[tile.stage()];
        if constexpr (L::kRope == 0) return read_keys(keys, thread & 31);
        return __shfl_sync(~0u, keys, 0);
    }
    __device__ void release_tile() {
        free(s.tile_empty[tile.stage()]);
        ++tile.count;
    }
    // Waits until the MMAs of the next tile's scores have been issued. Each tile is waited for,
    // even an item's first one, so that no phase of the barrier passes without a wait.
    __device__ void wait_for_issue() const {
        ptx::mbarrier_wait(ptx::shared_address(&s.scores_issued[rope.stage]), rope.phase);
    }
    // Called by whole warps, and one lane of each arrives.
    __device__ void free(uint64_t& bar) const {
        __syncwarp();
        if ((thread & 31) == 0) ptx::mbarrier_arrive(ptx::shared_address(&bar));
    }

    // Adds a tile, and returns the number of keys of the next one.
    __device__ int add_tile(Sums& acc, bool first) {
        const auto at = rope.warp_uniform();
        ptx::mbarrier_wait(ptx::shared_address(&s.scores_full[at.stage]), at.phase);
        if (!first && s.any_factor[at.stage][thread >> 5 & 3])
            rescale(acc, s.factor[at.stage][row()], s.factor[at.stage][row() + 8]);
        const uint32_t probabilities = base + L::kRopeOffset + at.stage * kPanelBytes;
        add_stage(acc[0], probabilities);
        const int keys = wait_for_tile();
        rope.advance(1);
        // The second half runs during the next tile's softmax.
        if (keys > 0) wait_for_issue();
        add_stage(acc[1], probabilities);
        // All threads arrive: each of them may have read factors.
        ptx::mbarrier_arrive(ptx::shared_address(&s.rope_empty[at.stage]));
        return keys;
    }

    __device__ void add_stage(float (&acc)[64], uint32_t probabilities) {
        using Mma = ptx::Wgmma<T, 128, ptx::Major::K, ptx::Major::M>;
        const auto at = latent.warp_uniform();
        const uint64_t a = ptx::wgmma_descriptor(probabilities);
        const uint64_t b = ptx::wgmma_descriptor(
            base + L::kRingOffset + at.stage * L::kStageBytes + group * kPanelBytes,
            2 * kPanelBytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) Mma::run(acc, a + 2 * k, b + 128 * k, 1);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<0>();
        free(s.latent_empty[at.stage]);
        latent.advance(1);
    }

    __device__ static void rescale(Sums& acc, float low, float high) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 64; i += 4) {
                acc[half][i] *= low;
                acc[half][i + 1] *= low;
                acc[half][i + 2] *= high;
                acc[half][i + 3] *= high;
            }
    }

    // Writes the output of an item that has no splits, 16 bytes at a time. The output is
    // evict-first, as the queries are.
    __device__ void write(const Sums& acc, const WorkItem& item) const {
        const int q = thread & 3;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int head = row() + 8 * half;
            const float by = s.inverse[head];
            T* to = output_row<T>(p, item, head) - 2 * q;
#pragma unroll
            for (int stage = 0; stage < 2; ++stage)
#pragma unroll
                for (int i = 0; i < 16; i += 4) {
                    uint32_t words[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const float* x = acc[stage] + 4 * (i + j) + 2 * half;
                        words[j] = ptx::cvt_rn_x2<T>(x[0] * by, x[1] * by);
                    }
                    transpose_quad(words, q);
                    if (head < item.heads)
                        __stcs(reinterpret_cast<uint4*>(to + latent_of(stage, i + q)),
                               make_uint4(words[0], words[1], words[2], words[3]));
                }
        }
    }

    __device__ void merge(const Sums& acc, const WorkItem& item) const {
        const Merge<T, L> merge{p, s, base, thread};
        merge.sync_output();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int head = row() + 8 * half;
            const float by = s.inverse[head];
#pragma unroll
            for (int stage = 0; stage < 2; ++stage)
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    const float* x = acc[stage] + 4 * i + 2 * half;
                    merge.put(head, latent_of(stage, i), make_float2(x[0] * by, x[1] * by));
                }
        }
        merge.run(item);
    }
};

}  // namespace mla::sm90::sparse
