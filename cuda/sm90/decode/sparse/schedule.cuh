// How a launch divides its work. An item is a tile of heads of one query token.
// Without splits a persistent grid of CTAs takes the items in turns;
// with splits each item has a cluster of its own, whose CTAs share the list
// and merge over distributed shared memory.
//
// Everything follows from what the host knows, and nothing from what lists
// hold: so a captured launch is right for any lists, and results do not depend
// on which CTA computes what.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.cuh"

namespace mla::sm90::sparse {

// CTAs of a cluster, at most. More than eight need the device's consent.
constexpr int kMaxSplits = 16;

// Sizes of clusters that are tried: all that every device takes, and the largest.
inline bool is_split(int splits) { return splits <= 8 || splits == kMaxSplits; }

// A launch: items `first` to `end - 1`, each of them shared by the CTAs of a cluster of `splits`.
struct Division {
    int first = 0, end = 0;
    int splits = 1;
    int blocks = 0;
};

// Nearly always one launch. What is left when items have filled the device so many times goes apart if
// it is so little that whole lists would keep few SMs busy.
struct Divisions {
    Division all[2];
    int count = 1;
    const Division& last() const { return all[count - 1]; }
};

// Heads of a tile, at most.
constexpr int kMostRows = 64;

// Query rows of a kernel for tiles of so many heads: an instruction's N.
inline int rows_of(int heads) { return heads <= 16 ? 16 : heads <= 32 ? 32 : 64; }

// What something takes, in KV tiles: starting and finishing an item, merging, and another launch.
constexpr int64_t kItemCost = 2, kMergeCost = 2, kLaunchCost = 3;

// KV tiles of a split.
inline int64_t tiles_of(int width, int splits) {
    return std::max((width + splits * kTileKeys - 1) / (splits * kTileKeys), 1);
}

// Divides items `first` to `end - 1`, and says at what cost. `resident(splits)` says how many clusters of
// so many CTAs the device runs at the same time.
template <typename Resident>
Division divide_alike(int64_t first, int64_t end, int width, const Resident& resident,
                      int64_t& least) {
    const int64_t items = end - first;
    Division best;
    least = INT64_MAX;
    for (int splits = 1; splits <= kMaxSplits; ++splits) {
        if (!is_split(splits)) continue;
        // A split without a whole tile is not worth a CTA.
        if (splits > 1 && width < splits * kTileKeys) break;
        const int64_t clusters = resident(splits);
        if (clusters < 1) continue;
        const int64_t waves = (items + clusters - 1) / clusters;
        const int64_t merging = splits > 1 ? kMergeCost : 0;
        const int64_t cost = waves * (tiles_of(width, splits) + kItemCost + merging);
        if (cost < least) {
            least = cost;
            best = {int(first), int(end), splits,
                    int(splits > 1 ? items * splits : std::min(items, clusters))};
        }
    }
    return best;
}

template <typename Resident>
Divisions divide(int64_t items, int width, const Resident& resident) {
    Divisions alike;
    int64_t cost, rest;
    alike.all[0] = divide_alike(0, items, width, resident, cost);
    const int64_t at_once = resident(1), waves = items / std::max<int64_t>(at_once, 1);
    if (waves < 1 || items == waves * at_once) return alike;
    const Division apart = divide_alike(waves * at_once, items, width, resident, rest);
    if (waves * (tiles_of(width, 1) + kItemCost) + kLaunchCost + rest >= cost) return alike;
    return {{{0, apart.first, 1, int(at_once)}, apart}, 2};
}

}  // namespace mla::sm90::sparse
