// Finds the threshold above which all keys are chosen. Each histogram covers a narrower range of
// keys than the one before it.
//
// The caller gives the first range. It usually goes from the minimum key, or from an estimate of
// the lowest chosen key, to the maximum key or an estimate of it. Clustered logits therefore spread
// over the bins as others do. Each further range is the bin that contains the lowest chosen key.
// The last range is a single key, or has few enough keys for the caller, or all its keys are
// chosen.
#pragma once

#include "bitmap.cuh"
#include "keys.cuh"
#include "params.cuh"

namespace mla::sm90::topk {

// All keys above `lowest + width` are chosen. `inside` keys lie in `lowest ..= lowest + width`, and
// `wanted` of them are chosen.
struct Threshold {
    uint32_t lowest, width;
    uint32_t wanted, inside;

    __device__ __forceinline__ bool is_above(uint32_t key) const {
        return key > lowest && key - lowest > width;
    }
    __device__ __forceinline__ bool is_inside(uint32_t key) const { return key - lowest <= width; }

    // The bin of a key that is not below `lowest`. There are `bins` bins of 2^shift keys. The last
    // bin also has all larger keys.
    __device__ __forceinline__ uint32_t bin_of(uint32_t key, int shift, uint32_t bins) const {
        return min((key - lowest) >> shift, bins - 1);
    }
    // Narrows the threshold to the bin that find_bin has found.
    template <typename S>
    __device__ __forceinline__ void enter(const S& s, int shift, uint32_t bins) {
        const uint32_t below = s.bin << shift;
        lowest += below;
        width = s.bin == bins - 1 ? width - below : min(width - below, (1u << shift) - 1);
        wanted -= s.above;
        inside = s.inside;
    }
};

// The shift with which 2^bin_bits bins of 2^shift keys cover a range of keys.
__device__ __forceinline__ int shift_for(uint32_t range, int bin_bits) {
    return max(0, 32 - __clz(range) - bin_bits);
}

// Counts keys from the last of `count` bins down, and finds the bin that contains key number
// `wanted`. Stores that bin in s.bin, the number of keys in the bins above it in s.above, and the
// number of keys in it in s.inside. If there is no such bin, these values stay as they were.
template <typename S>
__device__ __forceinline__ void find_bin(S& s, const uint32_t* bins, int count, uint32_t wanted) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int last = count - 4 - 4 * int(threadIdx.x);
    uint4 own = {0, 0, 0, 0};
    if (last >= 0) own = *reinterpret_cast<const uint4*>(&bins[last]);
    const uint32_t descending[4] = {own.w, own.z, own.y, own.x};
    const uint32_t sum = own.x + own.y + own.z + own.w;
    const uint32_t inclusive = inclusive_sum(sum);
    if (lane == 31) s.warp_sums[warp] = inclusive;
    __syncthreads();
    const uint32_t of_warp = lane < warp ? s.warp_sums[lane] : 0;
    uint32_t above = inclusive - sum + __reduce_add_sync(~0u, of_warp);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // True in one bin of one thread.
        if (above < wanted && wanted <= above + descending[i]) {
            s.bin = last + 3 - i;
            s.above = above;
            s.inside = descending[i];
        }
        above += descending[i];
    }
    __syncthreads();
}

// Narrows the threshold until at most `limit` keys are inside, or until it is a single key. `each`
// calls its argument with this thread's keys. Nearly all of these keys lie less than `range` above
// the threshold's `lowest`. The bins are zero at entry and at return.
template <typename S, typename Each>
__device__ __forceinline__ void narrow(S& s, Threshold& t, uint32_t range, uint32_t limit,
                                       const Each& each) {
    for (; t.width > 0 && t.inside > limit && t.inside != t.wanted; range = t.width) {
        const int shift = shift_for(range, S::kBinBits);
        each([&](uint32_t key) {
            if (t.is_inside(key)) atomicAdd(&s.bins[t.bin_of(key, shift, S::kBins)], 1u);
        });
        __syncthreads();
        find_bin(s, s.bins, S::kBins, t.wanted);
        t.enter(s, shift, S::kBins);
        *reinterpret_cast<uint4*>(&s.bins[4 * threadIdx.x]) = {0, 0, 0, 0};
        __syncthreads();
    }
}

}  // namespace mla::sm90::topk
