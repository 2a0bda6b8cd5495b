// Division of a launch's work. An item is a tile of heads of one query token. Without splits a
// persistent grid of CTAs takes the items in turns; with splits each item has a cluster of its own,
// whose CTAs share the list and merge over distributed shared memory.
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

// Nearly always one launch. What is left when items have filled the device so many times goes apart
// if it is so little that whole lists would keep few SMs busy.
struct Divisions {
    Division all[2];
    int count = 1;
    const Division& last() const { return all[count - 1]; }
};

// Heads of a tile, at most.
constexpr int kMostRows = 64;

// Query rows of a kernel for tiles of so many heads: an instruction's N.
inline int rows_of(int heads) { return heads <= 16 ? 16 : heads <= 32 ? 32 : 64; }

// Times of a kernel on an H200, in tenths of a microsecond (docs/log/sparse.md).
struct Costs {
    // A KV tile, and starting and finishing an item that the CTAs of a cluster share.
    int64_t tile, item;

    // A cluster's merge reads the rows of all its CTAs.
    int64_t merge(int rows, int splits) const { return rows * splits / 16; }
    // Items that a CTA takes one behind the other begin while others end.
    int64_t next_item() const { return 2 * tile; }
};
// Costs of a launch that a persistent grid goes through, and of another launch behind it.
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

// Divides items `first` to `end - 1` of so many rows, and says at what cost. `resident(splits)`
// says how many clusters of so many CTAs the device runs at the same time.
template <typename Resident>
Division divide_alike(int64_t first, int64_t end, int width, int rows, const Costs& costs,
                      const Resident& resident, int64_t& least) {
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
        const int64_t tiles = tiles_of(width, splits) * costs.tile;
        const int64_t cost = splits == 1 ? kStartCost + waves * (tiles + costs.next_item())
                                         : waves * (tiles + costs.item + costs.merge(rows, splits));
        if (cost < least) {
            least = cost;
            best = {int(first), int(end), splits,
                    int(splits > 1 ? items * splits : std::min(items, clusters))};
        }
    }
    return best;
}

// The same, with what is left of whole waves by itself where that is better.
template <typename Resident>
Divisions divide(int64_t items, int width, int rows, const Costs& costs, const Resident& resident,
                 int64_t& cost) {
    Divisions alike;
    alike.all[0] = divide_alike(0, items, width, rows, costs, resident, cost);
    const int64_t at_once = resident(1), waves = items / std::max<int64_t>(at_once, 1);
    if (waves < 1 || items == waves * at_once) return alike;
    int64_t rest;
    const Division apart = divide_alike(waves * at_once, items, width, rows, costs, resident, rest);
    const int64_t whole =
        kStartCost + waves * (tiles_of(width, 1) * costs.tile + costs.next_item());
    if (whole + kLaunchCost + rest >= cost) return alike;
    cost = whole + kLaunchCost + rest;
    return {{{0, apart.first, 1, int(at_once)}, apart}, 2};
}

// The plan of a call: tiles of a token's heads, and the heads of each of them but the last.
struct Plan {
    int head_tiles = 1, tile_heads = 1;
    Divisions divisions;
};

// The cheapest plan. Tiles of few heads read the same rows several times; but with few tokens more
// CTAs take part then, and each has less to convert and to merge.
template <typename Resident>
Plan plan(int64_t tokens, int heads, int width, bool converts, const Resident& resident) {
    Plan best;
    int64_t least = INT64_MAX;
    for (int rows = kMostRows; rows >= 16; rows /= 2) {
        Plan own;
        // The smallest possible number of tiles, whose heads then are as even as possible.
        own.head_tiles = (heads + rows - 1) / rows;
        own.tile_heads = (heads + own.head_tiles - 1) / own.head_tiles;
        const int rows_there = rows_of(own.tile_heads);
        int64_t cost;
        own.divisions = divide(tokens * own.head_tiles, width, rows_there,
                               costs_of(rows_there, converts), resident, cost);
        if (cost < least) {
            least = cost;
            best = own;
        }
    }
    return best;
}

}  // namespace mla::sm90::sparse
