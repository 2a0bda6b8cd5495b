// Which keys of which tile of query rows a CTA has.
//
// Tiles are counted per request from its first rows. CTAs take the tiles of the highest number
// first, those of all requests that have so many, since these see the most keys; of each, all
// heads of a group, whose keys and values the L2 cache holds.
//
// Where every tile's keys are divided by as many CTAs, these follow one another. Where that depends
// on the request (division.cuh), those that divide keys come first, request after request.
#pragma once

#include "config.cuh"
#include "division.cuh"

namespace mla::sm80::prefill {

struct Tile {
    int request, head;
    // Among the request's tiles.
    int number;
    // Of the CTAs that divide its keys: how many there are, which one this is, which counters they
    // have, where the first one's partial result lies, and how many cycles they wait for each other.
    int splits, split, counter, place;
    int64_t patience;
};

template <class C>
class Schedule {
  public:
    __device__ explicit Schedule(const KernelParams& p) : p_(p), own_(lengths_of<C>(p, lane())) {}

    // This CTA's tile; false if there is none. Called by whole warps.
    __device__ bool find(Tile& tile) {
        int block = blockIdx.x;
        tile.patience = p_.patience;
        if (p_.splits == 0) {
            rate_ = dividing_rate<C>(p_, own_);
            const int dividing = this->dividing();
            if (block < dividing) {
                find_divided(block, tile);
                // Who would wait for a CTA that has no place yet leaves the work to the last one.
                if (dividing > p_.slots)
                    tile.patience = 0;
                else
                    tile.patience += int64_t(1.f / rate_) * kCyclesOfKvTile;
                return true;
            }
            block -= dividing;
            if (own_.splits(rate_) > 1) own_.tiles = 0;
        }
        tile.splits = max(p_.splits, 1);
        tile.split = block % tile.splits;
        tile.counter = block / tile.splits;
        tile.place = block - tile.split;
        return find_alike(tile.counter, tile);
    }

  private:
    __device__ static int lane() { return threadIdx.x & 31; }

    // Of the tiles that are divided by as many CTAs all, the one of that number in order.
    __device__ bool find_alike(int block, Tile& tile) const {
        const int of_group = p_.tiles * p_.head_group;
        const int group = block / of_group, first_head = group * p_.head_group;
        const int heads = min(p_.head_group, p_.heads - first_head);
        if (heads <= 0) return false;
        const int within = block - group * of_group;
        const int index = within / heads;
        tile.head = first_head + within % heads;
        if (index >= tiles_from(0)) return false;
        // The highest number from which on there are more tiles than come before this one.
        int low = 0, high = p_.levels;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (tiles_from(middle) > index)
                low = middle;
            else
                high = middle;
        }
        tile.number = low;
        tile.request = request_of(low, index - tiles_from(low + 1));
        return true;
    }

    // CTAs that divide keys where that depends on the request.
    __device__ int dividing() const {
        int sum = own_.dividing(rate_);
        for (int request = lane() + 32; request < p_.requests; request += 32)
            sum += lengths_of<C>(p_, request).dividing(rate_);
        return __reduce_add_sync(~0u, sum) * p_.heads;
    }

    // Of those CTAs, the one of that number. Those that read the same keys follow one another.
    __device__ void find_divided(int block, Tile& tile) const {
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
            tile.splits = of_source(own.splits(rate_));
            tile.request = first + source;
            tile.split = (block - begin) / (tiles * p_.heads);
            const int of_request = (block - begin) % (tiles * p_.heads);
            tile.head = of_request / tiles;
            tile.number = of_request % tiles;
            tile.place = begin + of_request * tile.splits;
            // At least two CTAs have the same.
            tile.counter = tile.place / 2;
            return;
        }
    }

    // Of a request whose keys are not divided by CTAs of its own.
    __device__ int tiles_of(int request) const {
        const Lengths lengths = lengths_of<C>(p_, request);
        return p_.splits == 0 && lengths.splits(rate_) > 1 ? 0 : lengths.tiles;
    }

    // Tiles of that number and above, of all requests.
    __device__ int tiles_from(int number) const {
        int sum = max(own_.tiles - number, 0);
        for (int request = lane() + 32; request < p_.requests; request += 32)
            sum += max(tiles_of(request) - number, 0);
        return __reduce_add_sync(~0u, sum);
    }

    // Of the requests that have a tile of that number, the one after `before` others.
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
    // Of the request whose number is this lane's.
    Lengths own_;
    // Where it depends on the request: CTAs per KV tile.
    float rate_ = 0.f;
};

}  // namespace mla::sm80::prefill
