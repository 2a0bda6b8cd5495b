// Which tile of query rows a CTA has.
//
// Tiles are counted per request from its first rows. CTAs take the tiles of the highest number
// first, those of all requests that have so many, since these see the most keys; of each, all
// heads of a group, whose keys and values the L2 cache holds.
#pragma once

#include "params.cuh"

namespace mla::sm80::prefill {

struct Tile {
    int request, head;
    // Among the request's tiles.
    int number;
};

template <int kTileRows>
class Schedule {
  public:
    __device__ explicit Schedule(const KernelParams& p)
        : p_(p), own_tiles_(tiles_of(threadIdx.x & 31)) {}

    // The tile of that number in order; false if there is none. Called by whole warps.
    __device__ bool find(int block, Tile& tile) const {
        const int of_group = p_.tiles * p_.head_group;
        const int group = block / of_group, first_head = group * p_.head_group;
        const int heads = min(p_.head_group, p_.heads - first_head);
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

  private:
    __device__ int tiles_of(int request) const {
        if (request >= p_.requests) return 0;
        const int rows = p_.cu_query_lens[request + 1] - p_.cu_query_lens[request];
        return (rows + kTileRows - 1) / kTileRows;
    }

    // Tiles of that number and above, of all requests.
    __device__ int tiles_from(int number) const {
        int sum = max(own_tiles_ - number, 0);
        for (int request = (threadIdx.x & 31) + 32; request < p_.requests; request += 32)
            sum += max(tiles_of(request) - number, 0);
        return __reduce_add_sync(~0u, sum);
    }

    // Of the requests that have a tile of that number, the one after `before` others.
    __device__ int request_of(int number, int before) const {
        const int lane = threadIdx.x & 31;
        for (int first = 0;; first += 32) {
            const bool has = (first == 0 ? own_tiles_ : tiles_of(first + lane)) > number;
            const unsigned having = __ballot_sync(~0u, has);
            const int count = __popc(having);
            if (before < count) {
                const bool found = has && __popc(having & ((1u << lane) - 1)) == before;
                return first + __ffs(__ballot_sync(~0u, found)) - 1;
            }
            before -= count;
        }
    }

    const KernelParams& p_;
    // Of the request whose number is this lane's.
    const int own_tiles_;
};

}  // namespace mla::sm80::prefill
