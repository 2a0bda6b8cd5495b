// Split plan, made on the host. An item is a tile of heads of one query token. Without splits, a
// persistent grid of CTAs takes the items in turns. With splits, each item has a cluster of its
// own. The cluster's CTAs share the lists, and merge over distributed shared memory.
//
// The division depends only on numbers that the host knows, not on the contents of lists. A
// captured launch is therefore right for any lists, and results do not depend on which CTA computes
// what.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.cuh"

namespace mla::sm90::sparse {

// Maximum number of CTAs of a cluster. More than eight need the device's consent.
constexpr int kMaxSplits = 16;

// True for the sizes of clusters that are tried: all sizes that every device takes, and the
// largest.
inline bool is_split(int splits) { return splits <= 8 || splits == kMaxSplits; }

// A launch of items `first` to `end - 1`. The CTAs of a cluster of `splits` CTAs share each item.
struct LaunchPlan {
    int first = 0, end = 0;
    int splits = 1;
    int blocks = 0;
};

// There is nearly always one launch. The items that are left after whole waves may be few. With a
// CTA each they would keep few SMs busy, so they get a launch of their own, in which the CTAs of a
// cluster share an item.
struct LaunchPlans {
    LaunchPlan all[2];
    int count = 1;
    const LaunchPlan& last() const { return all[count - 1]; }
};

// Maximum number of heads of a tile.
constexpr int kMaxRows = 64;

// Query rows of a kernel for tiles of `heads` heads: an instruction's N.
inline int rows_of(int heads) { return heads <= 16 ? 16 : heads <= 32 ? 32 : 64; }

// Times of a kernel on an H200, in tenths of a microsecond (docs/log/sparse.md).
struct Costs {
    // Time of a KV tile, and time to start and finish an item that the CTAs of a cluster share.
    int64_t tile, item;

    // A cluster's merge reads the rows of all its CTAs.
    int64_t merge(int rows, int splits) const { return rows * splits / 16; }
    // If a CTA takes several items, each begins while another ends.
    int64_t next_item() const { return 2 * tile; }
};
// Time to start a persistent grid, and time of another launch before the rest.
constexpr int64_t kStartCost = 40, kLaunchCost = 50;

inline Costs costs_of(int rows, bool converts) {
    const Costs converting[] = {{16, 70}, {21, 75}, {27, 105}},
                same[] = {{14, 70}, {17, 75}, {21, 95}};
    const int at = rows == 16 ? 0 : rows == 32 ? 1 : 2;
    return converts ? converting[at] : same[at];
}

// KV tiles of a split.
inline int64_t tiles_of(int width, int splits) {
    return std::max((width + splits * kTileKeys - 1) / (splits * kTileKeys), 1);
}

// Plans the launch of items `first` to `end - 1`, each of `rows` rows, and returns its cost in
// `min_cost`. `active(splits)`: number of clusters of `splits` CTAs that the device runs at the
// same time.
template <typename ActiveClusters>
LaunchPlan plan_launch(int64_t first, int64_t end, int width, int rows, const Costs& costs,
                       const ActiveClusters& active, int64_t& min_cost) {
    const int64_t items = end - first;
    LaunchPlan best;
    min_cost = INT64_MAX;
    for (int splits = 1; splits <= kMaxSplits; ++splits) {
        if (!is_split(splits)) continue;
        // A split without a whole tile is not worth a CTA.
        if (splits > 1 && width < splits * kTileKeys) break;
        const int64_t clusters = active(splits);
        if (clusters < 1) continue;
        const int64_t waves = (items + clusters - 1) / clusters;
        const int64_t tiles = tiles_of(width, splits) * costs.tile;
        const int64_t cost = splits == 1 ? kStartCost + waves * (tiles + costs.next_item())
                                         : waves * (tiles + costs.item + costs.merge(rows, splits));
        if (cost < min_cost) {
            min_cost = cost;
            best = {int(first), int(end), splits,
                    int(splits > 1 ? items * splits : std::min(items, clusters))};
        }
    }
    return best;
}

// Plans one launch, or two if that is faster. The second one has the items that do not fill a wave.
template <typename ActiveClusters>
LaunchPlans plan_launches(int64_t items, int width, int rows, const Costs& costs,
                          const ActiveClusters& active, int64_t& cost) {
    LaunchPlans one_launch;
    one_launch.all[0] = plan_launch(0, items, width, rows, costs, active, cost);
    const int64_t at_once = active(1), waves = items / std::max<int64_t>(at_once, 1);
    if (waves < 1 || items == waves * at_once) return one_launch;
    int64_t rest;
    const LaunchPlan apart = plan_launch(waves * at_once, items, width, rows, costs, active, rest);
    const int64_t whole =
        kStartCost + waves * (tiles_of(width, 1) * costs.tile + costs.next_item());
    if (whole + kLaunchCost + rest >= cost) return one_launch;
    cost = whole + kLaunchCost + rest;
    return {{{0, apart.first, 1, int(at_once)}, apart}, 2};
}

// The plan of a call: number of tiles of a token's heads, and heads in each of them but the last.
struct SplitPlan {
    int head_tiles = 1, tile_heads = 1;
    LaunchPlans launches;
};

// Finds the cheapest plan. If tiles have few heads, they read the same rows several times. But if
// tokens are few, more CTAs then take part, and each has less to convert and to merge.
template <typename ActiveClusters>
SplitPlan split_plan(int64_t tokens, int heads, int width, bool converts,
                     const ActiveClusters& active) {
    SplitPlan best;
    int64_t min_cost = INT64_MAX;
    for (int rows = kMaxRows; rows >= 16; rows /= 2) {
        SplitPlan own;
        // The number of tiles is the smallest possible one, and their heads are then as even as
        // possible.
        own.head_tiles = (heads + rows - 1) / rows;
        own.tile_heads = (heads + own.head_tiles - 1) / own.head_tiles;
        const int rows_there = rows_of(own.tile_heads);
        int64_t cost;
        own.launches = plan_launches(tokens * own.head_tiles, width, rows_there,
                                     costs_of(rows_there, converts), active, cost);
        if (cost < min_cost) {
            min_cost = cost;
            best = own;
        }
    }
    return best;
}

}  // namespace mla::sm90::sparse
