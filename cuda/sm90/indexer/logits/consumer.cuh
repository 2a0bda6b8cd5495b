// A warpgroup that multiplies tiles of keys with queries, and sums over heads.
#pragma once

#include "../../../ptx/lanes.cuh"
#include "../../../ptx/wgmma.cuh"
#include "params.cuh"

namespace mla::sm90::logits {

template <typename C>
struct Consumer {
    static constexpr int kTokens = C::kTokens;
    static constexpr int kOfToken = C::kHeads / 4;  // columns of a token that a lane has
    static constexpr int kStep = C::kStep;

    // What a product gives, and the scale of this lane's key.
    struct Sums {
        float x[C::kColumns / 2];
        float scale;
    };

    const KernelParams& p;
    Shared<C>& s;
    const int warpgroup, warp, g, q;
    // Where `s` lies: a register, instead of instructions for every tile.
    const uint32_t base;
    Ring<C::kStages> ring;  // at this warpgroup's next tile
    Ring<2> jobs;
    float weights[C::kColumns / 4];
    uint32_t queries;  // the address
    // Where this lane's next logits go.
    float* out[kTokens > 2 ? kTokens / 2 : 1];
    int seen[kTokens > 2 ? kTokens / 2 : 1];

    __device__ __forceinline__ Consumer(const KernelParams& p, Shared<C>& s)
        : p(p),
          s(s),
          warpgroup(threadIdx.x / 128),
          warp(threadIdx.x / 32 % 4),
          g(threadIdx.x % 32 / 4),
          q(threadIdx.x % 4),
          base(ptx::in_register(ptx::shared_address(&s))) {}

    __device__ __forceinline__ void run() {
        // The heads' weights come from the kernel before.
        ptx::griddepcontrol_wait();
        int behind = 0;  // tiles of earlier jobs
        for (;;) {
            s.queries_full[jobs.slot].wait(jobs.phase);
            const Job job = s.jobs[jobs.slot];
            if (job.keys == 0) return;
            begin(job);
            const int tiles = (job.keys + kTileKeys - 1) / kTileKeys;
            const int skipped = C::kOwnTokens ? 0 : (warpgroup + behind * (kStep - 1)) % kStep;
            ring.advance(skipped);
            multiply(job, skipped, tiles);
            // To the first tile of the next job.
            const int after = (skipped + tiles * (kStep - 1)) % kStep;
            if (after) ring = ring.back(after);
            behind += tiles;
            __syncwarp();
            if (threadIdx.x % 32 == 0) s.queries_empty[jobs.slot].arrive();
            jobs.advance(1);
        }
    }

    // The row of the logits whose sums this lane ends with, number `i` of them, relative to the
    // first token: lanes of q 2 and 3 have the second of two tokens.
    __device__ __forceinline__ int token_of(int i) const {
        const int own = kTokens == 1 ? 0 : 2 * i + q / 2;
        return C::kOwnTokens ? warpgroup * kTokens + own : own;
    }

    __device__ __forceinline__ void begin(const Job& job) {
        const int first = job.first + (C::kOwnTokens ? warpgroup * kTokens : 0);
        // Of columns 8 i + 2 q and the next, as the accumulators are. Half of each, since a sum
        // below is of twice the positive parts.
#pragma unroll
        for (int i = 0; i < C::kColumns / 4; ++i) {
            const int column = i / 2 * 8 + 2 * q + i % 2;
            const int row = first + column / C::kHeads;
            weights[i] = row < p.count
                             ? 0.5f * p.weights[int64_t(row) * C::kHeads + column % C::kHeads]
                             : 0.f;
        }
        const int tile = C::kOwnTokens ? warpgroup * C::kColumns * kWidth : 0;
        queries = ptx::shared_address(s.queries[jobs.slot]) + tile;
#pragma unroll
        for (int i = 0; i < int(sizeof(seen) / sizeof(seen[0])); ++i) {
            const int row = job.first + token_of(i);
            const bool of_request = row >= job.begin && row < job.end;
            seen[i] =
                of_request
                    ? min(indexer::seen_by(p.rows, job.length, job.behind - (row - job.begin)),
                          job.key + job.keys)
                    : 0;
            out[i] = p.logits + row * p.logits_stride;
        }
    }

    __device__ __forceinline__ void multiply(const Job& job, int first, int tiles) {
        // What the loop counts with is known to be the same in all lanes, and stays in uniform
        // registers.
        ring = ring.uniform();
        queries = __shfl_sync(~0u, queries, 0);
        const int end = __shfl_sync(~0u, job.key + tiles * kTileKeys, 0);
        constexpr int kNext = kStep * kTileKeys;
        int position = __shfl_sync(~0u, job.key + first * kTileKeys, 0);
        if (position >= end) return;
#pragma unroll
        for (float*& row : out) row += position + key();
        if constexpr (C::kBuffers == 1) {
            for (; position < end; position += kNext) {
                Sums x;
                start(x);
                ptx::wgmma_wait_group<0>();
                finish(x, position, ring);
                ring.advance(kStep);
            }
        } else {
            Sums a, b;
            start(a);
            for (;;) {
                if (!follow(a, b, position, end)) return;
                if (!follow(b, a, position, end)) return;
            }
        }
    }

    // Starts the next product, if there is one, and sums what the present one gives.
    __device__ __forceinline__ bool follow(Sums& present, Sums& next, int& position, int end) {
        const Ring<C::kStages> own = ring;
        const int at = position;
        ring.advance(kStep);
        position += kStep * kTileKeys;
        if (position >= end) {
            ptx::wgmma_wait_group<0>();
            finish(present, at, own);
            return false;
        }
        start(next);
        ptx::wgmma_wait_group<1>();
        finish(present, at, own);
        return true;
    }

    // The key of a tile whose logits this lane ends with.
    __device__ __forceinline__ int key() const { return warp * 16 + g + 8 * (q % 2); }

    __device__ __forceinline__ void start(Sums& sums) {
        ptx::mbarrier_wait(base + offsetof(Shared<C>, keys_full) + ring.slot * 8, ring.phase);
        const uint32_t scales = base + offsetof(Shared<C>, scales) + key() * 4;
        sums.scale = ptx::ld_shared_f32(scales + ring.slot * (kTileKeys * 4));
        // Tiles differ in the lower half of their descriptors alone.
        const uint64_t first = ptx::wgmma_descriptor(0);
        const uint64_t upper = first >> 32 << 32;
        const uint32_t keys = uint32_t(first) + (base + ring.slot * kTileBytes) / 16;
        const uint32_t heads = uint32_t(first) + queries / 16;
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kWidth / 32; ++step)
            // 32 bytes of a row, in units of 16.
            ptx::WgmmaE4m3<C::kColumns>::run(sums.x, upper | (keys + step * 2),
                                             upper | (heads + step * 2), step > 0);
        ptx::wgmma_commit_group();
    }

    // Sums over heads, and the logits of a tile. The product is done.
    __device__ __forceinline__ void finish(const Sums& of_tile, int position,
                                           const Ring<C::kStages>& at) {
        // Every lane has read its scale before the product began.
        if (threadIdx.x % 32 == 0)
            ptx::mbarrier_arrive(base + offsetof(Shared<C>, keys_empty) + at.slot * 8);
        const auto& x = of_tile.x;
        const float scale = of_tile.scale;
        // Of each token the key g and the key g + 8.
        float sums[kTokens][2];
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float sum = 0;
#pragma unroll
                for (int i = 0; i < kOfToken; ++i) {
                    const int column = t * kOfToken + i;
                    const float of = x[column / 2 * 4 + 2 * half + column % 2];
                    // Twice the positive part, at the full rate; NaN stays NaN.
                    sum = fmaf(weights[column], of + fabsf(of), sum);
                }
                sums[t][half] = sum;
            }
        }
        const int own = position + key();
        if constexpr (kTokens == 1) {
            const float sum = exchange(sums[0][0], sums[0][1], 1);
            const float all = sum + __shfl_xor_sync(~0u, sum, 2);
            if (q < 2 && own < seen[0]) *out[0] = all * scale;
            out[0] += kStep * kTileKeys;
        } else {
#pragma unroll
            for (int t = 0; t < kTokens; t += 2) {
                const float first = exchange(sums[t][0], sums[t][1], 1);
                const float second = exchange(sums[t + 1][0], sums[t + 1][1], 1);
                const float all = exchange(first, second, 2);
                if (own < seen[t / 2]) *out[t / 2] = all * scale;
                out[t / 2] += kStep * kTileKeys;
            }
        }
    }

    // Adds up what two lanes have of two sums: the one without the bit gets the first.
    __device__ __forceinline__ float exchange(float first, float second, int bit) const {
        const bool upper = q & bit;
        const float given = __shfl_xor_sync(~0u, upper ? first : second, bit);
        return (upper ? second : first) + given;
    }
};

}  // namespace mla::sm90::logits
