// Index logits of query tokens over their paged context.
//
//   logit[t, s] = scale[s] * sum over h of weight[t, h] * relu(query[t, h] . key[s])
//
// A warpgroup scores 64 keys at a time: keys are the first operand, from registers, since every
// lane can read its share of a key straight from the cache; the token's queries are the second, in
// shared memory. What is summed over may stand in any order if it is the same for both: lane 4 g +
// q has bytes 16 q .. + 15 and 64 + 16 q .. + 15 of its two keys, so that four lanes read 64 bytes
// that lie together, and the queries are stored to match.
#pragma once

#include "../../../common/swizzle.cuh"
#include "../../../ptx/sm90.cuh"
#include "../../../ptx/wgmma.cuh"
#include "params.cuh"

namespace mla::sm90::logits {

// Where word `word` (four bytes) of a query stands, so that an instruction's 32 columns are what
// the lanes hold of the keys: word j of lane q's eight is half j % 2 of instruction j / 2.
__device__ __forceinline__ int place_of_word(int word) {
    const int q = word / 4 % 4, j = word / 16 * 4 + word % 4;
    return j / 2 * 8 + j % 2 * 4 + q;
}

// Copies the token's queries to shared memory, as wgmma reads them.
template <int kHeads>
__device__ __forceinline__ void load_queries(const uint8_t* queries, char* tile) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(queries);
    for (int i = threadIdx.x; i < kHeads * kWidth / 4; i += kThreads) {
        const int head = i / (kWidth / 4), place = place_of_word(i % (kWidth / 4));
        const uint32_t at = swizzled<128>(head, place / 4) + place % 4 * 4;
        *reinterpret_cast<uint32_t*>(tile + at) = from[i];
    }
}

// A lane's share of two keys, and the scale of one: lanes of q 0 have the first's, others the
// second's.
struct Keys {
    uint4 words[2][2];  // of each key the two halves
    float scale;

    __device__ __forceinline__ void load(const KernelParams& p, const indexer::Row& row,
                                         int position, int end, int q) {
        int64_t values[2];
        float own = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = position + 8 * i;
            const int column =
                p.rows.page_shift >= 0 ? at >> p.rows.page_shift : at / p.rows.page_size;
            const int offset = at - column * p.rows.page_size;
            values[i] = -1;
            if (at < end && column < p.rows.max_pages) {
                const int page = row.table[column];
                if (page >= 0 && int64_t(page) * p.rows.page_size + offset < p.rows.slots) {
                    const int64_t start = page * p.page_stride;
                    values[i] = start + offset * kWidth;
                    if (i == (q != 0))
                        own = *reinterpret_cast<const float*>(
                            p.cache + start + int64_t(p.rows.page_size) * kWidth + offset * 4);
                }
            }
            words[i][0] = words[i][1] = {0, 0, 0, 0};
            if (values[i] >= 0) {
                const uint8_t* from = p.cache + values[i] + 16 * q;
                words[i][0] = *reinterpret_cast<const uint4*>(from);
                words[i][1] = *reinterpret_cast<const uint4*>(from + 64);
            }
        }
        scale = own;
    }

    // The operand of instruction `step` of four.
    __device__ __forceinline__ void operand(int step, uint32_t (&a)[4]) const {
        const uint4 first = words[0][step / 2], second = words[1][step / 2];
        if (step % 2 == 0) {
            a[0] = first.x, a[1] = second.x, a[2] = first.y, a[3] = second.y;
        } else {
            a[0] = first.z, a[1] = second.z, a[2] = first.w, a[3] = second.w;
        }
    }
};

// A lane's sums over its heads of one key, then over all heads in all four lanes of a key.
template <int kHeads>
__device__ __forceinline__ float sum_heads(const float (&products)[kHeads / 2],
                                           const float (&weights)[kHeads / 4], int key) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kHeads / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float x = products[4 * i + 2 * key + j];
            // NaN stays NaN.
            sum = fmaf(weights[2 * i + j], x < 0.f ? 0.f : x, sum);
        }
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return sum;
}

template <int kHeads>
__global__ void __launch_bounds__(kThreads) logits_kernel(const __grid_constant__ KernelParams p) {
    __shared__ alignas(1024) char queries[kHeads * kWidth];
    const int number = blockIdx.x / p.parts, part = blockIdx.x % p.parts;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const indexer::Row row = indexer::find_row(p.rows, number, lane);
    const int begin = part * p.keys, end = min(row.seen, begin + p.keys);
    if (begin >= end) return;

    load_queries<kHeads>(p.queries + int64_t(number) * kHeads * kWidth, queries);
    // Of columns 8 i + 2 q and the next, as the accumulators are.
    float weights[kHeads / 4];
#pragma unroll
    for (int i = 0; i < kHeads / 4; ++i)
        weights[i] = p.weights[int64_t(number) * kHeads + i / 2 * 8 + 2 * q + i % 2];
    const uint64_t descriptor = ptx::wgmma_descriptor(ptx::shared_address(queries));
    float* out = p.logits + number * p.logits_stride;

    Keys keys;
    keys.load(p, row, begin + warp * 16 + g, end, q);
    ptx::fence_proxy_async();
    __syncthreads();
    for (int tile = begin; tile < end; tile += kTileKeys) {
        const int position = tile + warp * 16 + g;
        float products[kHeads / 2];
        uint32_t a[4][4];
#pragma unroll
        for (int step = 0; step < 4; ++step) keys.operand(step, a[step]);
        const float scale = keys.scale;
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step)
            // 32 bytes of a row, in units of 16.
            ptx::WgmmaE4m3FromRegisters<kHeads>::run(products, a[step], descriptor + step * 2,
                                                     step > 0);
        ptx::wgmma_commit_group();
        // The next keys are on their way while these are multiplied.
        if (tile + kTileKeys < end) keys.load(p, row, position + kTileKeys, end, q);
        ptx::wgmma_wait_group<0>();
        // The operands' registers are free from here on.
#pragma unroll
        for (int step = 0; step < 4; ++step)
            asm volatile("" ::"r"(a[step][0]), "r"(a[step][1]), "r"(a[step][2]), "r"(a[step][3]));
        const float first = sum_heads<kHeads>(products, weights, 0);
        const float second = sum_heads<kHeads>(products, weights, 1);
        const int at = position + (q == 0 ? 0 : 8);
        if (q < 2 && at < end) out[at] = (q == 0 ? first : second) * scale;
    }
}

}  // namespace mla::sm90::logits
