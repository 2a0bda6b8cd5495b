// The shared memory of a CTA that works on more than 32 heads.
//
//   [query panels][latent ring: stages of 4 panels][rope ring: stages of 1 panel][Control]
//
// A panel is 64 rows of 64 values of 16 bits, swizzled. Four of the query panels lie here, and the
// scores hold the others in registers. A KV tile is eight latent panels, which take two stages, and
// one panel of the rotary part. Once the scores are computed, the rope panel is no longer needed,
// and the tile's probabilities are written over it. If rows have no rotary part, these panels are
// for probabilities alone.
#pragma once

#include "../config.cuh"

namespace mla::sm90::sparse {

constexpr int kPanelBytes = 64 * 128;
constexpr int kStagePanels = 4;

template <int rope>
struct WideLayout {
    static constexpr int kRows = 64;
    static constexpr int kRope = rope;
    // Every other panel is held in registers. Reads of shared memory are thus spread evenly over a
    // KV tile.
    static constexpr int kQueryPanels = 4, kHeldPanels = (kLatent + rope) / 64 - kQueryPanels;
    static constexpr int kStageBytes = kStagePanels * kPanelBytes;
    static constexpr int kLatentStages = 5, kRopeStages = 3;
    // The output waits for a use of scores_issued before it frees the latent stages of the tile
    // before. The scores of the tile that uses the same barrier next need one of these, even if
    // they wait for no rope panel.
    static_assert(kLatentStages < 2 * kRopeStages, "the output could miss a phase");
    static constexpr int kRingOffset = kQueryPanels * kPanelBytes;
    static constexpr int kRopeOffset = kRingOffset + kLatentStages * kStageBytes;
    static constexpr int kControlOffset = kRopeOffset + kRopeStages * kPanelBytes;
    // The pitch keeps neighbouring heads in different banks when lanes access two neighbouring
    // values.
    static constexpr int kPartialPitch = kLatent + 8;

    // Layout (../config.cuh) explains these flags.
    static constexpr bool kEndFirst = false, kShort = false;

    // Maximum number of entries of a list that wait for their tile.
    static constexpr int kPending = 2 * kTileKeys;

    struct Control {
        // Every loading thread arrives when a stage is full; a lane of each output warp when it is
        // empty.
        uint64_t latent_full[kLatentStages], latent_empty[kLatentStages];
        // Every loading thread arrives when a stage is full, unless rows have no rotary part; every
        // output thread when it is empty.
        uint64_t rope_full[kRopeStages], rope_empty[kRopeStages];
        // A lane of each loading warp arrives, and then a lane of each warp of the scores and the
        // output.
        uint64_t tile_full[kPublishedTiles], tile_empty[kPublishedTiles];
        // These have a phase for each KV tile. When its probabilities and factors are there, the
        // lanes that write factors arrive. When the MMAs of its scores have been issued, one lane
        // of each score warp arrives.
        uint64_t scores_full[kRopeStages], scores_issued[kRopeStages];
        // An item's maxima and sums. The lanes that write them arrive, and then every output
        // thread.
        uint64_t stats_full, stats_empty;
        // Number of keys of each tile; 0 behind an item's last tile.
        int keys[kPublishedTiles];
        // Valid entries that a loading warp has found, and that no tile has taken yet.
        uint32_t pending[kLoadWarps][kPending];
        ListEnds ends;
        // True if a factor of a warp's 16 rows is not 1.
        alignas(16) int any_factor[kRopeStages][4];
        float factor[kRopeStages][kRows];
        float maximum[kRows], sum[kRows], inverse[kRows];
    };

    static constexpr int kBytes = kControlOffset + int(sizeof(Control));
    static_assert(kRows * kPartialPitch * 4 <= kControlOffset, "a partial output has room");
    static_assert(kBytes <= kSharedLimit, "the CTA does not fit an SM");
};

}  // namespace mla::sm90::sparse
