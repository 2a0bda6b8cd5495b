// The shared memory of a CTA that reads a cache of bf16 or f16.
//
//   [query panels][latent ring: stages of 2 or 4 panels][rope ring: stages of 1 panel][Control]
//
// Query panels have N rows by 64 values. Four or all of them lie here; the scores warpgroup holds
// the others. A KV tile is eight or four latent panels and one of the rotary part. Once the scores
// are computed, a rope panel is no longer needed: the probabilities of its KV tile are written over
// it. If rows have no rotary part, these panels are for probabilities alone.
//
// The latent panels of a KV tile lie in the ring in the order of their values, and alternate
// between the two output warpgroups. Both therefore finish a pair of panels at the same time, its
// stage is refilled as early as possible, and a copy reads contiguous bytes of each token.
#pragma once

#include "../shared_memory.cuh"

namespace mla::sm90::decode {

template <int N, bool by_rows, class Dims>
struct PlainLayout {
    static constexpr int kLatent = Dims::kLatent;
    static constexpr int kQueryPanelBytes = N * 128;
    // If the output is by rows, every other latent panel lies here. Reads of shared memory are thus
    // spread evenly over a KV tile. The first latent panel, every other one from there, and the
    // rope panel are held in registers.
    static constexpr int kQueryPanels = by_rows ? 4 : Dims::kPanels;
    // First value of the first panel here, and the distance from panel to panel, in values.
    static constexpr int kFirstQueryValue = by_rows ? 64 : 0, kQueryValues = by_rows ? 128 : 64;
    static constexpr int kQueryBytes = kQueryPanels * kQueryPanelBytes;
    // Panels of a stage, which are copied and waited for together.
    static constexpr int kStagePanels = by_rows ? 4 : 2;
    static constexpr int kLatentStageBytes = kStagePanels * kPanelBytes;
    // Number of stages: all that there is room for. KV tiles of latents of 256 are shorter, and the
    // rings have room for kShortTiles of them.
    static constexpr int kShortTiles = N == 64 ? 4 : 5;
    static constexpr int kLatentStages = kLatent == 256 ? 2 * kShortTiles
                                         : by_rows      ? 20 / kStagePanels
                                         : N == 64      ? 8
                                         : N == 32      ? 9
                                                        : 11;
    static constexpr int kRopeStages = kLatent == 256 ? kShortTiles : N == 64 && !by_rows ? 2 : 3;
    // Number of stages that copies may be in flight to at the same time: 64 KiB, or 48 KiB of
    // latents of 256, beside which more rotary keys are in flight. More of them make memory slower,
    // above all while it has to write lines back.
    static constexpr int kStagesInFlight = by_rows ? kLatentStages : kLatent == 256 ? 3 : 4;
    static constexpr int kRingBytes = kLatentStages * kLatentStageBytes + kRopeStages * kPanelBytes;
    // Number of rows of the scores. A warp has 16, though there may be fewer.
    static constexpr int kRows = N < 16 ? 16 : N;

    // The arguments of CommonControl are numbers of arrivals. Warps 0 and 1, the scores and the
    // output arrive for the queue. All score threads arrive for the stats. Their arrivals also
    // cover the zeros that they wrote behind the last token.
    struct Control : CommonControl<32 * (1 + 1 + 4 + 8), 128> {
        // A stage is full when TMA's bytes have come and the lane that expects them has arrived. If
        // it has held queries, only that lane arrives here, since their bytes come to a barrier of
        // their own. A stage is empty when a lane of each output warp has arrived, after its MMAs.
        // If it had held queries, it is empty when two lanes of each score warp have arrived.
        Barrier<1> latent_full[kLatentStages], rope_full[kRopeStages];
        Barrier<kOutputWarps> latent_empty[kLatentStages], rope_empty[kRopeStages];
        // A work item's queries. TMA, or the lanes of warp 1, arrive when the queries are there.
        // All threads of the scores arrive after the last MMAs.
        Barrier<0> query_full;
        Barrier<128> query_empty;
        // Held queries. The lane that copies the cache arrives at the first barrier when their
        // stages are empty. It does not arrive for the first held queries, whose stages are empty
        // from the start. The second barrier is like query_full. All score threads arrive at the
        // third when their reads have returned.
        Barrier<1> held_query_empty;
        Barrier<0> held_query_full;
        Barrier<128> held_query_taken;
        // Complete when the places behind a work item's last token have been cleared. This is
        // needed if the item ends within a KV tile and queries are not copied by TMA. All score
        // threads arrive, each for its own zeros.
        Barrier<128> tail_cleared;
        // These have a phase for each KV tile. When its probabilities and factors are there, the
        // lanes that write factors arrive. When all MMAs of its scores have been issued, lane 0 of
        // each score warp arrives (only for output by rows).
        Barrier<32> scores_full[kRopeStages];
        Barrier<4> scores_issued[kRopeStages];
        // The scores pass these to the output with the probabilities. `any_factor` has a flag for
        // each warp, which is set if a factor is not 1. `factor` has the factors of the
        // accumulators.
        alignas(16) int4 any_factor[kRopeStages];
        float factor[kRopeStages][kRows];
        // For each row of a finished work item: its maximum (in units of log2), its sum, and the
        // factor of its output.
        float maximum[kRows], sum[kRows], inverse[kRows];

        __device__ void init(const KernelParams& p) {
#pragma unroll
            for (int i = 0; i < kLatentStages; ++i) {
                latent_full[i].init();
                latent_empty[i].init();
            }
#pragma unroll
            for (int i = 0; i < kRopeStages; ++i) {
                rope_full[i].init();
                rope_empty[i].init();
                scores_full[i].init();
                if constexpr (by_rows) scores_issued[i].init();
                any_factor[i] = make_int4(0, 0, 0, 0);
            }
            const uint32_t query_writers = p.even_query ? 1 : 32;
            query_full.init(query_writers);
            if constexpr (by_rows) {
                held_query_full.init(query_writers);
                held_query_empty.init();
                held_query_taken.init();
                tail_cleared.init();
            }
            query_empty.init();
            this->init_common();
            ptx::fence_mbarrier_init();
        }
    };

    static constexpr int kRingOffset = kQueryBytes;
    static constexpr int kControlOffset = kRingOffset + kRingBytes;
    static constexpr int kBytes = kControlOffset + int(sizeof(Control));
    // At most 1024 bytes are lost to alignment. The runtime places dynamic shared memory on a
    // multiple of 1024 if nothing static comes before it.
    static_assert(kBytes <= kSharedLimit, "the CTA does not fit an SM");
};

}  // namespace mla::sm90::decode
