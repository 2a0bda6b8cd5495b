// Tile scheduler: the query tile of each CTA, and its split of the keys.
//
// The tiles of a request are numbered from its first rows on. Heads are done in groups, whose keys
// and values the L2 cache holds. Within a group, CTAs take tiles by number, the highest number
// first, since those tiles see the most keys. The tiles of one number follow one another, request
// by request. For each of them, all heads of the group follow one another.
//
// If each tile's keys are divided among the same number of CTAs, a tile's CTAs follow one another.
// If that number depends on the request (split_plan.cuh), the CTAs of divided keys come first,
// request after request.
#pragma once

#include "config.cuh"
#include "split_plan.cuh"

namespace mla::sm80::prefill {

struct WorkItem {
    int request, head;
    // Number among the request's tiles.
    int number;
    // The CTAs that divide the tile's keys: their number, this CTA's index among them, the index of
    // their counters, and the slot of the first one's partial result. `patience` is the number of
    // cycles that they wait for each other.
    int splits, split, counter, first_slot;
    int64_t patience;
};

template <class C>
class TileScheduler {
  public:
    __device__ explicit TileScheduler(const KernelParams& p)
        : p_(p), own_(lengths_of<C>(p, lane())) {}

    // Finds this CTA's tile; returns false if there is none. Called by whole warps.
    __device__ bool find(WorkItem& item) {
        int block = blockIdx.x;
        item.patience = p_.patience;
        if (p_.splits == 0) {
            rate_ = dividing_rate<C>(p_, own_);
            const int dividing = this->dividing();
            if (block < dividing) {
                find_split(block, item);
                // No CTA waits for one that is not running yet: the last one combines everything.
                if (dividing > p_.slots)
                    item.patience = 0;
                else
                    item.patience += int64_t(1.f / rate_) * kCyclesOfKvTile;
                return true;
            }
            block -= dividing;
            if (own_.splits(rate_) > 1) own_.tiles = 0;
        }
        item.splits = max(p_.splits, 1);
        item.split = block % item.splits;
        item.counter = block / item.splits;
        item.first_slot = block - item.split;
        return find_uniform(item.counter, item);
    }

  private:
    __device__ static int lane() { return threadIdx.x & 31; }

    // Finds tile number `block` in the order of those tiles that are all divided by the same number
    // of CTAs.
    __device__ bool find_uniform(int block, WorkItem& item) const {
        const int of_group = p_.tiles * p_.head_group;
        const int group = block / of_group, first_head = group * p_.head_group;
        const int heads = min(p_.head_group, p_.heads - first_head);
        if (heads <= 0) return false;
        const int within = block - group * of_group;
        const int index = within / heads;
        item.head = first_head + within % heads;
        if (index >= tiles_from(0)) return false;
        // Finds the highest number such that more tiles have it, or a higher one, than come before
        // this tile.
        int low = 0, high = p_.max_request_tiles;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (tiles_from(middle) > index)
                low = middle;
            else
                high = middle;
        }
        item.number = low;
        item.request = request_of(low, index - tiles_from(low + 1));
        return true;
    }

    // Number of CTAs that divide keys, if the number of splits depends on the request.
    __device__ int dividing() const {
        int sum = own_.dividing(rate_);
        for (int request = lane() + 32; request < p_.requests; request += 32)
            sum += lengths_of<C>(p_, request).dividing(rate_);
        return __reduce_add_sync(~0u, sum) * p_.heads;
    }

    // Finds the tile of the CTA with number `block` among those CTAs. CTAs that read the same keys
    // follow one another.
    __device__ void find_split(int block, WorkItem& item) const {
        for (int first = 0, begin = 0;; first += 32) {
            const Lengths own = first == 0 ? own_ : lengths_of<C>(p_, first + lane());
            const int ctas = own.dividing(rate_) * p_.heads;
            int upto = ctas;
            for (int d = 1; d < 32; d *= 2) {
                const int before = __shfl_up_sync(~0u, upto, d);
                if (lane() >= d) upto += before;
            }
            const unsigned behind = __ballot_sync(~0u, begin + upto > block);
            const int source = behind == 0 ? 32 : __ffs(behind) - 1;
            begin += __reduce_add_sync(~0u, lane() < source ? ctas : 0);
            if (behind == 0) continue;
            const auto of_source = [&](int x) {
                return __reduce_add_sync(~0u, lane() == source ? x : 0);
            };
            const int tiles = of_source(own.tiles);
            item.splits = of_source(own.splits(rate_));
            item.request = first + source;
            item.split = (block - begin) / (tiles * p_.heads);
            const int of_request = (block - begin) % (tiles * p_.heads);
            item.head = of_request / tiles;
            item.number = of_request % tiles;
            item.first_slot = begin + of_request * item.splits;
            // Different for each tile, because a tile has at least two slots.
            item.counter = item.first_slot / 2;
            return;
        }
    }

    // Number of a request's tiles; 0 if its keys are divided by CTAs of its own.
    __device__ int tiles_of(int request) const {
        const Lengths lengths = lengths_of<C>(p_, request);
        return p_.splits == 0 && lengths.splits(rate_) > 1 ? 0 : lengths.tiles;
    }

    // Number of tiles with this number or a higher one, over all requests.
    __device__ int tiles_from(int number) const {
        int sum = max(own_.tiles - number, 0);
        for (int request = lane() + 32; request < p_.requests; request += 32)
            sum += max(tiles_of(request) - number, 0);
        return __reduce_add_sync(~0u, sum);
    }

    // The request that has a tile of this number, and comes after `before` other requests that have
    // one.
    __device__ int request_of(int number, int before) const {
        for (int first = 0;; first += 32) {
            const bool has = (first == 0 ? own_.tiles : tiles_of(first + lane())) > number;
            const unsigned having = __ballot_sync(~0u, has);
            const int count = __popc(having);
            if (before < count) {
                const bool found = has && __popc(having & ((1u << lane()) - 1)) == before;
                return first + __ffs(__ballot_sync(~0u, found)) - 1;
            }
            before -= count;
        }
    }

    const KernelParams& p_;
    // Lengths of the request whose number is this lane's.
    Lengths own_;
    // Number of CTAs per KV tile, if the number of splits depends on the request.
    float rate_ = 0.f;
};

}  // namespace mla::sm80::prefill
