// The shared memory of a CTA that reads a cache of e4m3. Values are converted after they have been
// read from here.
//
//   [nine query panels][two probability stages][ring: stages of a whole KV tile][Control]
//
// A stage holds a KV tile: four groups of 128 latent values of 64 tokens, then the rope values, and
// then the tokens' scales, if they have scales of their own.
#pragma once

#include "../shared_memory.cuh"

namespace mla::sm90::decode {

// Bytes of a row behind its latent: its rotary key, and the bytes that hold its scale.
//
// A cache with one scale, whose rotary keys are of e4m3, too.
struct TensorScale {
    static constexpr int kRopeBytes = R1Row::kRope, kScaleBytes = 0;
};

// A cache whose tokens have scales, and rotary keys of bf16. TMA copies no fewer than 16 bytes of a
// row. The scale is the first four of them.
struct TokenScales {
    static constexpr int kRopeBytes = 2 * R1Row::kRope, kScaleBytes = 16;
};

template <int N, class Scales = TensorScale>
struct Fp8Layout {
    static constexpr int kLatent = R1Row::kLatent;
    static constexpr int kRopeBytes = Scales::kRopeBytes, kScaleBytes = Scales::kScaleBytes;
    static constexpr bool kTokenScales = kScaleBytes > 0;
    static constexpr int kKvTileBytes = kTileTokens * (kLatent + kRopeBytes + kScaleBytes);
    static constexpr int kQueryPanels = 9;
    static constexpr int kQueryPanelBytes = N * 128;
    static constexpr int kQueryBytes = kQueryPanels * kQueryPanelBytes;
    static constexpr int kGroupBytes = kTileTokens * 128, kLatentBytes = kTileTokens * kLatent;
    static constexpr int kScalesOffset = kLatentBytes + kTileTokens * kRopeBytes;
    static constexpr int kLatentStageBytes = kKvTileBytes;
    static constexpr int kLatentStages = N == 64 ? 3 : N == 32 || kTokenScales ? 4 : 5;
    // Number of stages in flight. With 32 rows the MMAs bound the kernel, so tokens should arrive
    // early; otherwise memory is faster with few requests at a time.
    static constexpr int kStagesInFlight = N == 32 ? kLatentStages : 2;
    // Number of score warpgroups. Two of them work in pingpong. With 64 rows there are no registers
    // for a second one.
    static constexpr int kScoreGroups = N == 64 ? 1 : 2;
    // Each of the two score groups waits only for its own KV tiles. With an odd number of stages,
    // the previous use of a stage belongs to the other group, and must be complete before this
    // group waits for the next use. With five stages that use is KV tile i - 5. It is complete,
    // since this group has already waited for the maxima of tile i - 3, which the other group
    // published after it had waited for tile i - 5. Three stages would be too few.
    static_assert(kScoreGroups == 1 || kLatentStages % 2 == 0 || kLatentStages > 3,
                  "a group could pass a stage's wait one use too early");
    static constexpr int kProbabilityStages = 2, kProbabilityBytes = N * kTileTokens * 2;
    static constexpr int kRingBytes = kLatentStages * kLatentStageBytes;

    // Warp 0, the output and the scores read the queue. One thread per row writes stats.
    struct Control : CommonControl<32 * (1 + 8) + 128 * kScoreGroups, N> {
        // A KV tile. TMA fills it, and a lane of each output warp releases it as soon as the warp
        // has read it.
        Barrier<1> latent_full[kLatentStages];
        Barrier<kOutputWarps> latent_empty[kLatentStages];
        // A KV tile's probabilities. Four lanes of each warp of its group publish them; all threads
        // of the output release them.
        Barrier<16> scores_full[kProbabilityStages];
        Barrier<kOutputThreads> scores_empty[kProbabilityStages];
        // These have a phase for each work item. All threads of the first score group arrive at
        // queries_ready when the item's queries are there and the sums of the previous item have
        // been read. The second group waits for that. It arrives at sums_ready when its sums are
        // there, and it needs neither the queries nor the reference maxima any longer.
        Barrier<128> queries_ready, sums_ready;
        // These have a phase for each KV tile. All threads of the tile's group arrive when the
        // tile's new reference maxima are published. The other group waits for each phase. It then
        // knows the new maxima. It also knows that all threads have read those that it will change
        // next.
        Barrier<128> maxima_published[2];
        // Complete when a KV tile with masked tokens, or with room behind its last token, has been
        // cleared. All threads of its group arrive, each for its own zeros.
        Barrier<128> tail_cleared[kProbabilityStages];
        // The scores pass these to the output with the probabilities.
        int any_factor[kProbabilityStages];
        alignas(16) float factor[kProbabilityStages][N];
        // For each row of a finished work item: its maximum (in units of log2), its sum, and the
        // factor of its output.
        alignas(16) float maximum[N], sum[N], inverse[N];
        // Results of each warp of the scores: the maxima of a KV tile, and the sums of a work item.
        // They are separate, since one warp may have its sums while another still compares the
        // maxima of the last KV tile.
        alignas(16) float top_of_warp[4][N], sum_of_warp[4 * kScoreGroups][N];
        // The reference maximum of each row, and the factor for older sums after its last rise.
        float reference[N], raised_by[N];
        // The largest magnitude among the queries that each warp fetched, as bits of bf16.
        uint32_t query_top[4];

        __device__ void init(const KernelParams&) {
#pragma unroll
            for (int i = 0; i < kLatentStages; ++i) {
                latent_full[i].init();
                latent_empty[i].init();
            }
#pragma unroll
            for (int i = 0; i < kProbabilityStages; ++i) {
                scores_full[i].init();
                scores_empty[i].init();
                tail_cleared[i].init();
            }
            if constexpr (kScoreGroups == 2) {
                queries_ready.init();
                sums_ready.init();
                maxima_published[0].init();
                maxima_published[1].init();
            }
            this->init_common();
            ptx::fence_mbarrier_init();
        }
    };

    static constexpr int kProbabilityOffset = kQueryBytes;
    static constexpr int kRingOffset = kProbabilityOffset + kProbabilityStages * kProbabilityBytes;
    static constexpr int kControlOffset = kRingOffset + kRingBytes;
    static constexpr int kBytes = kControlOffset + int(sizeof(Control));
    static_assert(kRingOffset % 1024 == 0 && kLatentStageBytes % 1024 == 0,
                  "a swizzled tile starts on 1024 bytes");
    static_assert(kBytes <= kSharedLimit, "the CTA does not fit an SM");
};

}  // namespace mla::sm90::decode
