// The largest logits of each row, exactly and always the same, as slots of the cache.
//
// A cluster of CTAs has a row. Each reads its part of the logits once, into shared memory as keys
// (keys.cuh); together they find the threshold (threshold.cuh), and each writes what it has above
// it, in ascending order of position, where the CTAs before it end (compact.cuh).
#pragma once

#include "../../../ptx/sm90.cuh"
#include "compact.cuh"
#include "keys.cuh"
#include "params.cuh"
#include "threshold.cuh"

namespace mla::sm90::topk {

// A row that sees no more than it may choose.
__device__ __forceinline__ void choose_all(const KernelParams& p, const Row& row, int32_t* list,
                                           const Cluster& cluster) {
    const int first = cluster.rank * kThreads + threadIdx.x;
    for (int i = first; i < p.topk; i += cluster.ctas * kThreads)
        list[i] = i < row.seen ? indexer::slot_of(p.rows, row, i) : -1;
}

__global__ void __launch_bounds__(kThreads, 2) topk_kernel(const __grid_constant__ KernelParams p) {
    Shared& s = *reinterpret_cast<Shared*>(ptx::dynamic_shared());
    uint32_t* keys = reinterpret_cast<uint32_t*>(&s + 1);
    const Cluster cluster = {ptx::cluster_ctarank(), ptx::cluster_nctarank()};
    const int number = blockIdx.x / cluster.ctas;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    const Row row = indexer::find_row(p.rows, number, lane);
    int32_t* list = p.lists + number * p.list_stride;
    if (row.seen <= p.topk) {
        choose_all(p, row, list, cluster);
        return;
    }

    // Parts begin at multiples of four, as vectors do.
    const int each = (row.seen + 4 * int(cluster.ctas) - 1) / (4 * int(cluster.ctas)) * 4;
    const int first = min(int(cluster.rank) * each, row.seen);
    const int count = min(each, row.seen - first);
    const float* logits = p.logits + number * p.logits_stride + first;
    Range range = load_keys(logits, keys, count, p.vectors);
    range = row_range(cluster, s, range);
    const Threshold threshold = find_threshold(cluster, s, keys, count, range, p.topk);

    const Part part = part_of(warp, count);
    const Counts before = counts_before(cluster, s, keys, part, threshold.key);
    // Nobody reads this CTA's shared memory any more when all have come here.
    ptx::barrier_cluster_arrive();
    write_positions(list, keys, first, part, threshold, before.warp);
    __syncthreads();
    translate(p.rows, row, list, place_of(before.cta, threshold.ties),
              place_of(before.next, threshold.ties));
    ptx::barrier_cluster_wait();
}

}  // namespace mla::sm90::topk
