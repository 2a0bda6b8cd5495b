// The loading warps' walk over the lists of a token.
#pragma once

#include "config.cuh"
#include "ptx/sm90.cuh"
#include "scheduler.cuh"

namespace mla::sm90::sparse {

// Prefetches into L2 the part of an item's list that is read first. Called by at least four
// threads; `thread` is the number of this one.
__device__ __forceinline__ void prefetch_list(const KernelParams& p, const WorkItem& item,
                                              int thread) {
    const Source& first = p.sources[0];
    if (thread < 4 &&
        (TileScheduler::split() + thread * TileScheduler::splits()) * kListGroup < first.width)
        ptx::prefetch_global_l2(first.lists + item.token * first.list_stride +
                                (TileScheduler::split() + thread * TileScheduler::splits()) *
                                    kListGroup);
}

// Prefetches the next item's queries and the first entries of its list into L2. Called by `threads`
// threads; `thread` is this one's number.
template <int rope>
__device__ __forceinline__ void prefetch_item(const KernelParams& p, int index, int thread,
                                              int threads) {
    if (index >= p.items) return;
    const WorkItem item(p, index);
    constexpr int latent_lines = kLatent * 2 / 128, lines = latent_lines + rope * 2 / 128;
#pragma unroll 1
    for (int i = thread; i < item.heads * lines; i += threads) {
        const int head = unsigned(i) / lines, line = i - head * lines;
        ptx::prefetch_global_l2(line < latent_lines ? item.latent(p, head) + line * 128
                                                    : item.rope(p, head));
    }
    prefetch_list(p, item, thread);
}

// Searches the ends of the next item's lists. Before the first item, also searches those of the
// first item itself. Called by the output's threads before the `n`-th item of this CTA; `thread` is
// the number of this one.
__device__ __forceinline__ void find_ends(const KernelParams& p, ListEnds& ends, int index,
                                          uint32_t n, int thread) {
#pragma unroll 1
    for (int ahead = n == 0 ? 0 : 1; ahead < 2; ++ahead) {
        const int item = index + ahead * TileScheduler::step();
        if (item < p.items)
            ends.find(p, WorkItem(p, item).token, n + ahead, TileScheduler::split(),
                      TileScheduler::splits(), __shfl_sync(~0u, thread >> 5, 0), thread & 31);
    }
}

// Entries of a list that a warp reads together. They are some groups of its split, and a lane has
// one entry of each group.
struct Entries {
    static constexpr int kGroups = 4;
    int of_group[kGroups];

    // The first entries of an item's first list. They are loaded as early as possible, when no
    // count is known yet, and are used when the walk begins. They are meaningless for a dense
    // request.
    __device__ __forceinline__ void read_first(const KernelParams& p, int item, int lane) {
        if (item >= p.items || p.dense_within > 0) return;
        const Source& source = p.sources[0];
        const int* list = source.lists + WorkItem(p, item).token * source.list_stride + lane;
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
            const int at = (TileScheduler::split() + i * TileScheduler::splits()) * kListGroup;
            of_group[i] = at + lane < source.width ? list[at] : -1;
        }
    }
};

// One of the loading warps. Each walks all lists, and compacts their valid entries. Together, the
// warps copy the rows of a KV tile.
template <class L>
struct ListWalk {
    const KernelParams& p;
    typename L::Control& s;
    int warp, lane;
    // Entries of the current list. If they are loaded ahead (Layout::kShort), these are later the
    // first entries of the next item's list.
    Entries first;
    PipelineCounter<kPublishedTiles> tile = {};
    // Number of items that are done.
    uint32_t done = 0;

    // Calls `copy(taken, keys)` for each KV tile of each item. The entries of the tile are
    // `entry(taken)` to `entry(taken + keys - 1)`.
    template <typename Copy>
    __device__ __forceinline__ void run(const Copy& copy) {
#pragma unroll 1
        for (int i = TileScheduler::first(p); i < p.items; i += TileScheduler::step()) {
            walk(i, copy);
            if constexpr (L::kShort) first.read_first(p, i + TileScheduler::step(), lane);
            publish_tile(0);
            s.ends.release(done++);
        }
    }

    // An entry of the current tile. Its highest bit is the number of the cache, and its other bits
    // are the slot.
    __device__ uint32_t entry(uint32_t index) const { return s.pending[warp][index % L::kPending]; }

    // The address of an entry's row.
    __device__ const char* row(uint32_t entry) const {
        const Source& from = p.sources[entry >> 31];
        const uint32_t slot = entry & 0x7fffffff;
        const uint32_t page = from.pages_adjoin ? 0 : slot / from.page_size;
        return from.cache + page * from.page_stride +
               (slot - page * from.page_size) * from.slot_stride;
    }

    // The address of an entry's rotary key.
    __device__ const char* rope(uint32_t entry) const {
        const RopeSource& from = p.rope[entry >> 31];
        const uint32_t slot = entry & 0x7fffffff, page_size = p.sources[entry >> 31].page_size;
        const uint32_t page = slot / page_size;
        return from.rope + page * from.page_stride + (slot - page * page_size) * from.slot_stride;
    }

  private:
    // The keys of a token of a dense request: the number of the request's first tokens that it
    // attends to, and their pages. `pages` is null for any other request.
    struct Dense {
        const int* pages = nullptr;
        int keys = 0;
    };
    __device__ Dense dense_request(int token) const {
        Dense dense;
        if (p.dense_within == 0) return dense;
        // Finds the last request that begins at or before this token, among `n` requests from
        // `first` on. Every lane looks at one of 32 requests.
        int first = 0, n = p.requests;
        while (n > 1) {
            const int step = (n + 31) / 32, at = lane * step;
            const bool begins = at < n && p.query_starts[first + at] <= token;
            const int last = (__popc(__ballot_sync(~0u, begins)) - 1) * step;
            first += last;
            n = min(step, n - last);
        }
        const int tokens = p.seq_lens[first];
        if (tokens > p.dense_within) return dense;
        dense.pages = p.block_table + first * p.block_table_stride;
        dense.keys = max(0, tokens - (p.query_starts[first + 1] - 1 - token));
        return dense;
    }

    __device__ static int slot_of(const Dense& dense, uint32_t page_size, uint32_t key) {
        if (key >= uint32_t(dense.keys)) return -1;
        const uint32_t page = key / page_size;
        // This is computed in 64 bits, so that a broken table gives no slot instead of a wrong one.
        const uint64_t slot =
            uint64_t(uint32_t(dense.pages[page])) * page_size + (key - page * page_size);
        return slot >> 31 ? -1 : int(slot);
    }

    // Walks this CTA's split of an item's lists.
    template <typename Copy>
    __device__ __forceinline__ void walk(int item, const Copy& copy) {
        const int token = WorkItem(p, item).token;
        // Number of valid entries that were taken from `pending`, and number of those that are
        // still there.
        uint32_t taken = 0;
        int there = 0;
        const auto take = [&](int keys) {
            publish_tile(keys);
            copy(taken, keys);
            __syncwarp();
            taken += keys;
            there -= keys;
        };
        const int step = TileScheduler::splits() * kListGroup;
        const Dense dense = dense_request(token);
#pragma unroll 1
        for (uint32_t k = 0; k < kSources; ++k) {
            const Source& source = p.sources[k];
            const bool is_dense = k == 0 && dense.pages;
            int width = is_dense        ? dense.keys
                        : source.counts ? max(0, min(source.counts[token], source.width))
                                        : source.width;
            const int* list = source.lists + token * source.list_stride + lane;
            constexpr int batch = Entries::kGroups;
            const int begin = TileScheduler::split() * kListGroup;
            int from = begin;
            Entries of_source;
            Entries& next = L::kShort ? first : of_source;
            const auto read_batch = [&](int first) {
                if (is_dense) {
#pragma unroll 1
                    for (int i = 0; i < batch; ++i) {
                        const int slot = slot_of(dense, source.page_size, first + i * step + lane);
                        if (i == 0) next.of_group[0] = slot;
                        if (i == 1) next.of_group[1] = slot;
                        if (i == 2) next.of_group[2] = slot;
                        if (i == 3) next.of_group[3] = slot;
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < batch; ++i) {
                        const int at = first + i * step;
                        next.of_group[i] = at + lane < width ? list[at] : -1;
                    }
                }
            };
            if (L::kShort && k == 0 && p.dense_within == 0) {
#pragma unroll
                for (int i = 0; i < batch; ++i)
                    if (from + i * step + lane >= width) next.of_group[i] = -1;
            } else {
                read_batch(from);
            }
            const auto look = [&] {
                if (!is_dense) width = min(width, s.ends.behind_last(done, k, lane));
            };
            if (L::kEndFirst && from + batch * step < width) look();
#pragma unroll 1
            while (from < width) {
                const Entries entries = next;
                // The next groups are being loaded while these are compacted.
                read_batch(from + batch * step);
                const uint32_t before_batch = taken + there;
#pragma unroll 1
                for (int i = 0; i < batch; i += 2) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int entry = i == 0 ? entries.of_group[j] : entries.of_group[2 + j];
                        const bool valid = uint32_t(entry) < source.slots;
                        const uint32_t all = __ballot_sync(~0u, valid);
                        const int before = __popc(all & ((1u << lane) - 1));
                        if (valid)
                            s.pending[warp][(taken + there + before) % L::kPending] =
                                uint32_t(entry) | k << 31;
                        there += __popc(all);
                    }
                    __syncwarp();
                    if (there >= kTileKeys) take(kTileKeys);
                }
                from += batch * step;
                // The end of the list should be known by now.
                if (!L::kEndFirst && from == begin + batch * step && from < width) look();
                // If a batch had no valid entries, the entries before this gap do not wait until
                // its end is found.
                if (there > 0 && (from >= width || taken + there == before_batch)) take(there);
            }
        }
    }

    // Publishes a tile of `keys` keys. All four warps arrive, and all four wait for tile_empty,
    // even those that copy nothing of the tile. A warp may therefore be kPublishedTiles tiles ahead
    // of the output, but no more. Each of its waits for a stage is then for one of two phases,
    // which parity tells apart (Layout::kStages). No phase of tile_empty ends without this warp, so
    // it cannot miss one.
    __device__ void publish_tile(int keys) {
        ptx::mbarrier_wait(ptx::shared_address(&s.tile_empty[tile.stage()]), tile.phase() ^ 1);
        if (lane == 0) {
            if (warp == 0) s.keys[tile.stage()] = keys;
            ptx::mbarrier_arrive(ptx::shared_address(&s.tile_full[tile.stage()]));
        }
        ++tile.count;
        __syncwarp();
    }
};

}  // namespace mla::sm90::sparse
