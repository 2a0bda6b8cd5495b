// The loading warps: they walk the lists, and copy rows of the cache to the
// ring.
#pragma once

#include "../../../ptx/sm90.cuh"
#include "layout.cuh"

namespace mla::sm90::sparse {

// A tile of heads of a query token, as far as loads and stores need it.
struct Item {
    int token, first_head, heads;

    __device__ Item(const KernelParams& p, int index) {
        token = unsigned(index) / unsigned(p.head_tiles);
        first_head = (index - token * p.head_tiles) * p.tile_heads;
        heads = min(p.tile_heads, p.heads - first_head);
    }

    // Where a head's latent and rotary query values lie.
    __device__ const char* latent(const KernelParams& p, int head) const {
        return static_cast<const char*>(p.q_latent) +
               (token * p.q_latent_token_stride + (first_head + head) * p.q_latent_head_stride) * 2;
    }
    __device__ const char* rope(const KernelParams& p, int head) const {
        return static_cast<const char*>(p.q_rope) +
               (token * p.q_rope_token_stride + (first_head + head) * p.q_rope_head_stride) * 2;
    }
};

// The items of a block. Read where it is needed: kept, it would cost registers
// in every role.
struct Items {
    __device__ static int first() { return int(ptx::clusterid()); }
    __device__ static int step() { return int(ptx::nclusterid()); }
    // This block's split of each item, and how many there are.
    __device__ static int split() { return int(ptx::cluster_ctarank()); }
    __device__ static int splits() { return int(ptx::cluster_nctarank()); }
};

// One of the four warps that load. Each walks the whole list, compacts its
// valid entries, and copies the rows of one slot of each KV tile: the
// instruction that starts a copy takes a lane at a time, some 50 cycles each,
// which is too long for one warp.
template <class L, class Rows>
struct KeyLoader {
    const KernelParams& p;
    typename L::Small& s;
    uint32_t ring_base;
    int warp, lane;
    Ring<L::kSlots> ring = {};
    Turn<kAnnounced> tile = {};
    ptx::CachePolicy policy = ptx::createpolicy_evict_first();

    __device__ void run() {
#pragma unroll 1
        for (int i = Items::first(); i < p.items;) {
            load(Item(p, i).token, Items::split(), Items::splits());
            i += Items::step();
            if (i < p.items) prefetch_queries(Item(p, i));
        }
    }

    // Brings the queries of the next item into L2.
    __device__ void prefetch_queries(const Item& item) const {
        constexpr int lines = (kLatent + kRope) * 2 / 128;
#pragma unroll 1
        for (int i = warp * 32 + lane; i < item.heads * lines; i += 128) {
            const int head = unsigned(i) / lines, line = i - head * lines;
            ptx::prefetch_global_l2(line < lines - 1 ? item.latent(p, head) + line * 128
                                                     : item.rope(p, head));
        }
    }

    // One split of a token's list.
    __device__ void load(int token, int split, int splits) {
        const int width = p.counts ? max(0, min(p.counts[token], p.width)) : p.width;
        const int* list = p.lists + token * p.list_stride + lane;
        const int step = splits * kListGroup;
        const auto read = [&](int from) { return from + lane < width ? list[from] : -1; };
        constexpr int batch = 4;
        int from = split * kListGroup;
        int next[batch];
        const auto read_batch = [&](int first) {
#pragma unroll
            for (int i = 0; i < batch; ++i) next[i] = read(first + i * step);
        };
        read_batch(from);
        // Valid entries in `pending`: how many were taken before, and how many
        // there are.
        uint32_t taken = 0;
        int there = 0;
#pragma unroll 1
        while (from < width) {
            const int entries[batch] = {next[0], next[1], next[2], next[3]};
            // The next groups are under way while these are compacted.
            read_batch(from + batch * step);
#pragma unroll 1
            for (int i = 0; i < batch; ++i) {
                const int entry =
                    i < 2 ? (i == 0 ? entries[0] : entries[1]) : (i == 2 ? entries[2] : entries[3]);
                from += step;
                const bool valid = uint32_t(entry) < p.cache_slots;
                const uint32_t all = __ballot_sync(~0u, valid);
                const int before = __popc(all & ((1u << lane) - 1));
                if (valid) s.pending[warp][(taken + there + before) % (2 * kTileKeys)] = entry;
                there += __popc(all);
                __syncwarp();
                // Whole tiles; what is left at the end, too.
                const int least = from < width ? kTileKeys : 1;
#pragma unroll 1
                while (there >= least) {
                    const int keys = min(there, kTileKeys);
                    copy(taken, keys);
                    taken += keys;
                    there -= keys;
                }
            }
        }
        announce(0);
    }

    // Tells the others of a tile with so many keys; the first warp does, for all.
    __device__ void announce(int keys) {
        if (warp == 0) {
            ptx::mbarrier_wait(ptx::shared_address(&s.announced_empty[tile.place()]),
                               tile.phase() ^ 1);
            if (lane == 0) {
                s.keys[tile.place()] = keys;
                ptx::mbarrier_arrive(ptx::shared_address(&s.announced[tile.place()]));
            }
            ++tile.uses;
            __syncwarp();
        }
    }

    // Copies this warp's slot of a tile. Where the slot has fewer keys than room,
    // the last row is copied again: what is multiplied by a probability of zero
    // has to be finite.
    __device__ void copy(uint32_t taken, int keys) {
        announce(keys);
        const int first = warp * kSlotKeys;
        if (first < keys) {
            Ring<L::kSlots> own = ring;
            own.advance(warp);
            const uint32_t full = ptx::shared_address(&s.full[own.slot]);
            const int key = min(first + (lane & (kSlotKeys - 1)), keys - 1);
            const uint32_t slot = s.pending[warp][(taken + key) % (2 * kTileKeys)];
            const uint32_t page = p.pages_adjoin ? 0 : slot / p.page_size;
            const char* row = p.cache + page * p.cache_page_stride +
                              (slot - page * p.page_size) * p.cache_slot_stride;
            ptx::mbarrier_wait(ptx::shared_address(&s.empty[own.slot]), own.phase ^ 1);
            if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, kSlotKeys * Rows::kBytes);
            __syncwarp();
            const uint32_t to = ring_base + own.slot * L::kSlotBytes + lane * Rows::kPitch;
            if (lane < kSlotKeys && p.read_once)
                ptx::cp_async_bulk(to, row, Rows::kBytes, full, policy);
            else if (lane < kSlotKeys)
                ptx::cp_async_bulk(to, row, Rows::kBytes, full);
        }
        ring.advance((keys + kSlotKeys - 1) / kSlotKeys);
        __syncwarp();
    }
};

}  // namespace mla::sm90::sparse
