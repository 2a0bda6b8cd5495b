// The key above which everything is chosen, by histograms of ever narrower ranges of keys.
//
// The first range goes from the least key to the largest, so clustered logits spread over the bins
// as others do. Each further one is the bin in which the last chosen key lies: after at most three
// histograms it is a single key.
#pragma once

#include "bitmap.cuh"
#include "keys.cuh"
#include "params.cuh"

namespace mla::sm90::topk {

// What is chosen: every key above `least + width`, and `wanted` of those from `least` to there, of
// which there are `inside`.
struct Threshold {
    uint32_t least, width;
    uint32_t wanted, inside;

    __device__ __forceinline__ bool is_above(uint32_t key) const {
        return key > least && key - least > width;
    }
    __device__ __forceinline__ bool is_inside(uint32_t key) const { return key - least <= width; }
};

// Finds the bin, from the last one down, in which the key number `wanted` lies: s.bin, how many
// keys are in bins above it, and how many in it.
__device__ __forceinline__ void find_bin(Shared& s, uint32_t wanted) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int last = kBins - 4 - 4 * int(threadIdx.x);
    const uint4 own = *reinterpret_cast<const uint4*>(&s.bins[last]);
    const uint32_t descending[4] = {own.w, own.z, own.y, own.x};
    const uint32_t sum = own.x + own.y + own.z + own.w;
    const uint32_t inclusive = inclusive_sum(sum);
    if (lane == 31) s.warp_sums[warp] = inclusive;
    __syncthreads();
    const uint32_t of_warp = lane < warp ? s.warp_sums[lane] : 0;
    uint32_t above = inclusive - sum + __reduce_add_sync(~0u, of_warp);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // In one bin of one thread.
        if (above < wanted && wanted <= above + descending[i]) {
            s.bin = last + 3 - i;
            s.above = above;
            s.inside = descending[i];
        }
        above += descending[i];
    }
    __syncthreads();
}

// Narrows the threshold down until no more than `most` keys are inside, or it is a single key.
// `each` calls what it is given with this thread's keys. Bins are zero, here and afterwards.
template <typename Each>
__device__ __forceinline__ void narrow(Shared& s, Threshold& t, uint32_t most, const Each& each) {
    while (t.width > 0 && t.inside > most && t.inside != t.wanted) {
        const int shift = max(0, 32 - __clz(t.width) - kBinBits);
        each([&](uint32_t key) {
            if (t.is_inside(key)) atomicAdd(&s.bins[(key - t.least) >> shift], 1u);
        });
        __syncthreads();
        find_bin(s, t.wanted);
        const uint32_t below = s.bin << shift;
        t.least += below;
        t.width = min(t.width - below, (1u << shift) - 1);
        t.wanted -= s.above;
        t.inside = s.inside;
        *reinterpret_cast<uint4*>(&s.bins[4 * threadIdx.x]) = {0, 0, 0, 0};
        __syncthreads();
    }
}

}  // namespace mla::sm90::topk
