// The layout of a CTA's shared memory.
//
// The query tiles of N rows by 64 values come first: eight of latent values, and one of rotary ones
// if there are any. Two tiles of probabilities, of N rows by 64 keys, follow, and then the ring of
// stages. After an item's last MMA, all of this memory is idle. While a cluster merges, it holds
// partial results.
#pragma once

#include "../../../common/named_barrier.cuh"
#include "../../../common/pipeline.cuh"
#include "list_end.cuh"
#include "rows.cuh"

namespace mla::sm90::sparse {

// The named barriers of a CTA, and their numbers of threads.
enum class BarrierId : int {
    scores = 1,         // a warpgroup of the scores
    second_scores = 2,  // the other one, with up to 16 heads
    all_scores = 3,     // both
    output = 4,         // the output warpgroups
};
using ScoresBarrier = NamedBarrier<BarrierId::scores, 128>;
using SecondScoresBarrier = NamedBarrier<BarrierId::second_scores, 128>;
using OutputBarrier = NamedBarrier<BarrierId::output, kOutputThreads>;

// Limit of a CTA's shared memory on sm_90: 227 KiB.
constexpr int kSharedLimit = 232448;
// Number of warps that walk the lists and load rows.
constexpr int kLoadWarps = 4;
// Maximum number of KV tiles that are published ahead of those worked on.
constexpr int kPublishedTiles = 4;
// Stages of a full KV tile; each is filled by one of the loading warps.
constexpr int kTileStages = kTileKeys / kStageKeys;
static_assert(kTileStages == kLoadWarps, "a loading warp fills one stage of a tile");
// Number of KV tiles whose probabilities are kept at a time.
constexpr int kProbabilityTiles = 2;

template <int N, class Rows>
struct Layout {
    static constexpr int kRows = N;
    // Number of score warpgroups. Two of them work in pingpong. With more rows there are no
    // registers for a second one.
    static constexpr int kScoreGroups = N <= 16 ? 2 : 1;
    static constexpr int kScoreThreads = 128 * kScoreGroups;
    static constexpr int kQueryTileBytes = N * 128;
    static constexpr int kQueryBytes = (kLatent + Rows::kRope) / 64 * kQueryTileBytes;
    static constexpr int kProbabilityBytes = N * kTileKeys * 2;
    static constexpr int kProbabilityOffset = kQueryBytes;
    static constexpr int kRingOffset = kQueryBytes + kProbabilityTiles * kProbabilityBytes;
    static constexpr int kStageBytes = kStageKeys * Rows::kPitch;
    // Maximum size of `Control`, which has barriers for each stage.
    static constexpr int kControlBytes = 3856 + 64 * N;
    static constexpr int kMaxStages = (kSharedLimit - kRingOffset - kControlBytes) / kStageBytes;
    static constexpr int kStages = kMaxStages < 20 ? kMaxStages : 20;
    // When a loading warp is at tile t, the output has freed every stage of tile t -
    // kPublishedTiles (ListWalk::publish_tile). The warp's own stage of tile t is at most
    // kTileStages * kPublishedTiles stages later. At most one earlier use of that stage can
    // therefore be open still: the one for whose end the warp waits.
    static_assert(2 * kStages >= kTileStages * kPublishedTiles,
                  "parity cannot tell uses of a stage apart");
    // A scores warp waits only for the stage of its own keys, so it does not wait for every use of
    // a stage. A wait by parity is right only if the use before is complete. If the ring holds more
    // than a tile, that use belongs to an earlier tile. It is then complete, since the warp has
    // synchronised with its group in every earlier tile (sync_group_or).
    static_assert(kStages > kTileStages,
                  "a scores warp could pass a stage's wait one use too early");

    // The CTA's partial result while a cluster merges: [N][kPartialPitch] f32.
    // The pitch keeps neighbouring heads in different banks.
    static constexpr int kPartialPitch = kLatent + 4;

    // True if the work that is done once per item is made short: entries are read ahead, and a
    // cluster's CTAs send each other their results (Exchange in combine.cuh). With more rows, the
    // loop over tiles has no registers for this, and sending takes longer than reading.
    static constexpr bool kShort = N <= 32;

    // True if the loading warps read a list's end before they walk the list. Otherwise they read it
    // when the list's first rows are on their way. They then need not wait for the end, but the
    // walk needs one more register.
    static constexpr bool kEndFirst = N == 64;

    // Maximum number of entries of a list that wait for their tile.
    static constexpr int kPending = 2 * kTileKeys;

    struct Control {
        uint64_t full[kStages], empty[kStages];
        uint64_t tile_full[kPublishedTiles], tile_empty[kPublishedTiles];
        uint64_t scores_full[kProbabilityTiles], scores_empty[kProbabilityTiles];
        uint64_t stats_full, stats_empty;
        // One group of the scores arrives here for the other one.
        uint64_t maxima_published[kProbabilityTiles];
        // Number of keys of each tile; 0 behind an item's last tile.
        int keys[kPublishedTiles];
        // Valid entries that a loading warp has found, and that no tile has taken yet.
        uint32_t pending[kLoadWarps][kPending];
        ListEnds ends;
        // The scores publish these for the output, together with the probabilities. `any_factor` is
        // true if any row's sums have to be multiplied, and `factor` has the factors.
        int any_factor[kProbabilityTiles];
        alignas(16) float factor[kProbabilityTiles][N];
        // The scale of each group of a key's latent values, divided by the key's largest scale,
        // times kRatioLift.
        alignas(16) __half ratio[Rows::kScales ? kProbabilityTiles : 1][4][kTileKeys];
        // For each row: the factor that brings its scores to units of log2; its reference maximum;
        // the factor for earlier sums after the last rise of that maximum. Each warp of the scores
        // passes on a maximum or sum of each row in `of_warp`, and its largest scale in
        // `scale_of_warp`.
        alignas(16) float query_scale[N], reference[N], raised_by[N];
        alignas(16) float of_warp[4 * kScoreGroups][N];
        float scale_of_warp[4 * kScoreGroups];
        // Results of a finished item: the maximum (in units of log2), the sum, and the factor of
        // the output. If an item has splits, the factor does not yet include the division by the
        // sum.
        alignas(16) float maximum[N], sum[N], inverse[N];
        // Factor of the keys' scales, see Scores.
        float unit;
        // Complete when the data that the CTAs of a cluster send each other has come: `merged` for
        // values, `merged_stats` for maxima, sums and factors.
        uint64_t merged, merged_stats;
    };

    static constexpr int kControlOffset = kRingOffset + kStages * kStageBytes;
    static constexpr int kBytes = kControlOffset + int(sizeof(Control));
    static_assert(kRingOffset % 1024 == 0, "a swizzled tile starts on 1024 bytes");
    static_assert(N * kPartialPitch * 4 <= kControlOffset, "a partial output has room");
    static_assert(kBytes <= kSharedLimit, "the CTA does not fit an SM");
};

// Returns the number of keys of a tile to all lanes of a warp. Only the lane that releases the
// number's place reads it. If rows have a rotary part, the output of `wide/` reads it with all
// lanes: every thread of the output also releases rope panels, and the loading warps wait for these
// before they publish a later tile.
__device__ __forceinline__ int read_keys(const int& keys, int lane) {
    int own = 0;
    if (lane == 0) own = keys;
    return __shfl_sync(~0u, own, 0);
}

}  // namespace mla::sm90::sparse
