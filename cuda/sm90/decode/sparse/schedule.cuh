// How a launch divides its work. An item is a tile of heads of one query token.
// Without splits a persistent grid of thread blocks takes the items in turns;
// with splits each item has a cluster of its own, whose blocks share the list
// and merge over distributed shared memory.
//
// Everything follows from what the host knows, and nothing from what lists
// hold: so a captured launch is right for any lists, and results do not depend
// on which block computes what.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.cuh"

namespace mla::sm90::sparse {

// Blocks of a cluster, at most. More than eight need the device's consent.
constexpr int kMaxSplits = 16;

// Sizes of clusters that are tried: all that every device takes, and the largest.
inline bool is_split(int splits) { return splits <= 8 || splits == kMaxSplits; }

struct Division {
    int splits = 1;
    int blocks = 1;
};

// Heads of a tile, at most.
constexpr int kMostRows = 64;

// Query rows of a kernel for tiles of so many heads: an instruction's N.
inline int rows_of(int heads) { return heads <= 16 ? 16 : heads <= 32 ? 32 : 64; }

// `resident(splits)` says how many clusters of so many blocks the device runs
// at the same time.
template <typename Resident>
Division divide(int64_t items, int width, const Resident& resident) {
    // In KV tiles: what starting and finishing an item takes, and merging.
    constexpr int64_t fixed = 2, merging = 2;
    Division best;
    int64_t least = INT64_MAX;
    for (int splits = 1; splits <= kMaxSplits; ++splits) {
        if (!is_split(splits)) continue;
        // A split without a whole tile is not worth a block.
        if (splits > 1 && width < splits * kTileKeys) break;
        const int64_t clusters = resident(splits);
        if (clusters < 1) continue;
        const int64_t tiles = std::max((width + splits * kTileKeys - 1) / (splits * kTileKeys), 1);
        const int64_t waves = (items + clusters - 1) / clusters;
        const int64_t cost = waves * (tiles + fixed + (splits > 1 ? merging : 0));
        if (cost < least) {
            least = cost;
            best.splits = splits;
            best.blocks = int(splits > 1 ? items * splits : std::min(items, clusters));
        }
    }
    return best;
}

}  // namespace mla::sm90::sparse
