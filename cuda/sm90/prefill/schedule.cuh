// In which order tiles are worked through.
//
// A tile is (request, head, level): level l is the l-th block of 128 query rows. Under causal attention its cost grows
// with the level, so tiles are handed out from the highest level of any request down to level 0: the longest come first
// and the last ones are short, whatever the mix of lengths, without sorting anything. A counter hands them out, because
// blocks run at different speeds.
//
// All heads at once would touch the keys of all heads between two tiles of one head. So heads are taken in groups, small
// enough that a group's keys stay in the L2 cache from level to level, or that several levels of a head run at the same
// time:
//
//     for group of heads: for level from high to low: for request with that level: for head in group
//
// Everything here is done by one warp, from the lengths on the device.
#pragma once

#include "params.cuh"
#include "tile.cuh"

namespace mla::sm90::prefill {

struct Schedule {
    const KernelParams& p;
    // level_end[i]: tiles of one head at the i + 1 highest levels.
    int* level_end;
    int lane;

    __device__ int tiles_of(int request) const {
        return request < p.requests ? (p.cu_q[request + 1] - p.cu_q[request] + kQueries - 1) / kQueries : 0;
    }

    // Fills level_end: first how many requests have exactly so many tiles, then from the top how many have at least as
    // many, then their running sum.
    __device__ void build() const {
#pragma unroll 1
        for (int i = lane; i < p.levels; i += 32) level_end[i] = 0;
        __syncwarp();
#pragma unroll 1
        for (int r = lane; r < p.requests; r += 32) {
            int tiles = tiles_of(r);
            if (tiles > 0) atomicAdd(&level_end[p.levels - min(tiles, p.levels)], 1);
        }
        __syncwarp();
        int requests = 0, sum = 0;
#pragma unroll 1
        for (int first = 0; first < p.levels; first += 32) {
            int i = first + lane;
            int at_least = requests + inclusive_sum(i < p.levels ? level_end[i] : 0);
            int end = sum + inclusive_sum(i < p.levels ? at_least : 0);
            if (i < p.levels) level_end[i] = end;
            requests = __shfl_sync(~0u, at_least, 31);
            sum = __shfl_sync(~0u, end, 31);
        }
        __syncwarp();
    }

    // The tile at `index`, all but its blocks; request -1 past the end.
    __device__ Work find(int index) const {
        Work work = {};
        work.request = -1;
        const int per_head = level_end[p.levels - 1];
        // Without tokens there is no tile, and nothing to divide by.
        if (per_head == 0 || index >= int64_t(per_head) * p.heads) return work;
        const int group = index / (per_head * p.group);
        const int first_head = group * p.group;
        const int heads = min(p.group, p.heads - first_head);
        const int within = index - group * (per_head * p.group);
        work.head = first_head + within % heads;
        const int position = within / heads;

        int low = 0, high = p.levels - 1;
        while (low < high) {
            int middle = (low + high) / 2;
            if (level_end[middle] > position) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        const int level = p.levels - 1 - low;
        int nth = position - (low == 0 ? 0 : level_end[low - 1]);
        for (int first = 0;; first += 32) {
            unsigned has = __ballot_sync(~0u, tiles_of(first + lane) > level);
            int count = __popc(has);
            if (nth < count) return describe(work, first + __fns(has, 0, nth + 1), level);
            nth -= count;
        }
    }

private:
    __device__ Work describe(Work work, int request, int level) const {
        work.request = request;
        work.query = level * kQueries;
        work.query_start = p.cu_q[work.request];
        work.query_len = p.cu_q[work.request + 1] - work.query_start;
        const int key_start = p.cu_k[work.request];
        work.key_end = p.cu_k[work.request + 1];
        work.key_len = work.key_end - key_start;
        return work;
    }

    __device__ int inclusive_sum(int value) const {
        for (int distance = 1; distance < 32; distance *= 2) {
            int other = __shfl_up_sync(~0u, value, distance);
            if (lane >= distance) value += other;
        }
        return value;
    }
};

}  // namespace mla::sm90::prefill
