// A consumer warpgroup: multiplies KV tiles with queries, and sums over heads.
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

    // Accumulators that a thread has for a part of a tile.
    static constexpr int kSums = C::kColumnsOfPart / 2;

    const KernelParams& p;
    Shared<C>& s;
    const int warpgroup, warp, g, q;
    // Address of `s`, kept in a register so that it is not computed for every tile.
    const uint32_t base;
    PipelineState<C::kStages> ring;  // at this warpgroup's next tile
    PipelineState<2> items;
    float weights[C::kColumns / 4];
    uint32_t queries;  // address of the item's queries
    // Addresses of this lane's next logits, and the positions that their rows see.
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
        // The heads' weights come from the previous kernel.
        ptx::griddepcontrol_wait();
        int behind = 0;  // tiles of earlier items
        for (;;) {
            s.queries_full[items.stage].wait(items.phase);
            const WorkItem item = s.items[items.stage];
            if (item.keys == 0) return;
            begin(item);
            const int tiles = (item.keys + kTileKeys - 1) / kTileKeys;
            const int skipped = C::kOwnTokens ? 0 : (warpgroup + behind * (kStep - 1)) % kStep;
            ring.advance(skipped);
            multiply(item, skipped, tiles);
            // Advances the ring to this warpgroup's first tile of the next item.
            const int after = (skipped + tiles * (kStep - 1)) % kStep;
            if (after) ring = ring.back(after);
            behind += tiles;
            s.queries_empty[items.stage].arrive();
            items.advance(1);
        }
    }

    // Row, relative to the first token, of result `i` of this lane. Lanes with q of 2 and 3 have
    // the second token of each pair.
    __device__ __forceinline__ int token_of(int i) const {
        const int own = kTokens == 1 ? 0 : 2 * i + q / 2;
        return C::kOwnTokens ? warpgroup * kTokens + own : own;
    }

    __device__ __forceinline__ void begin(const WorkItem& item) {
        const int first = item.first + (C::kOwnTokens ? warpgroup * kTokens : 0);
        // Weights of columns 8 i + 2 q and 8 i + 2 q + 1, in the layout of the accumulators.
#pragma unroll
        for (int i = 0; i < C::kColumns / 4; ++i) {
            const int column = i / 2 * 8 + 2 * q + i % 2;
            const int row = first + column / C::kHeads;
            weights[i] =
                row < p.count ? p.weights[int64_t(row) * C::kHeads + column % C::kHeads] : 0.f;
        }
        const int tile = C::kOwnTokens ? warpgroup * C::kColumns * kWidth : 0;
        queries = ptx::shared_address(s.queries[items.stage]) + tile;
#pragma unroll
        for (int i = 0; i < int(sizeof(seen) / sizeof(seen[0])); ++i) {
            const int row = item.first + token_of(i);
            const bool of_request = row >= item.begin && row < item.end;
            seen[i] =
                of_request
                    ? min(indexer::seen_by(p.rows, item.length, item.behind - (row - item.begin)),
                          item.key + item.keys)
                    : 0;
            out[i] = p.logits + row * p.logits_stride;
        }
    }

    __device__ __forceinline__ void multiply(const WorkItem& item, int first, int tiles) {
        // The shuffles tell the compiler that the loop's counters are the same in all lanes. The
        // counters then stay in uniform registers.
        ring = ring.warp_uniform();
        queries = __shfl_sync(~0u, queries, 0);
        const int end = __shfl_sync(~0u, item.key + tiles * kTileKeys, 0);
        constexpr int kNext = kStep * kTileKeys;
        int position = __shfl_sync(~0u, item.key + first * kTileKeys, 0);
        if (position >= end) return;
#pragma unroll
        for (float*& row : out) row += position + key();
        for (; position < end; position += kNext) {
            ptx::mbarrier_wait(base + offsetof(Shared<C>, keys_full) + ring.stage * 8, ring.phase);
            const uint32_t scales = base + offsetof(Shared<C>, scales) + key() * 4;
            const float scale = ptx::ld_shared_f32(scales + ring.stage * (kTileKeys * 4));
            float sums[C::kParts][kSums];
            ptx::wgmma_fence();
#pragma unroll
            for (int part = 0; part < C::kParts; ++part) start(sums[part], part);
            finish<0>(sums, scale, position);
            ring.advance(kStep);
        }
    }

    // Key of a tile whose logits this lane ends up with.
    __device__ __forceinline__ int key() const { return warp * 16 + g + 8 * (q % 2); }

    // Enqueues the MMAs of the keys with the columns of a part.
    __device__ __forceinline__ void start(float (&sums)[kSums], int part) {
        // The descriptors of tiles differ in their lower halves only.
        const uint64_t first = ptx::wgmma_descriptor(0);
        const uint64_t upper = first >> 32 << 32;
        const uint32_t keys = uint32_t(first) + (base + ring.stage * kTileBytes) / 16;
        const uint32_t heads =
            uint32_t(first) + queries / 16 + part * (C::kColumnsOfPart * kWidth / 16);
#pragma unroll
        for (int step = 0; step < kWidth / 32; ++step)
            // 32 bytes of a row, in units of 16.
            ptx::WgmmaE4m3<C::kColumnsOfPart>::run(sums, upper | (keys + step * 2),
                                                   upper | (heads + step * 2), step > 0);
        ptx::wgmma_commit_group();
    }

    // Computes the logits of a tile, beginning with `part`. While the sums of one part are
    // computed, the MMAs of later parts are in flight.
    template <int part>
    __device__ __forceinline__ void finish(const float (&sums)[C::kParts][kSums], float scale,
                                           int position) {
        if constexpr (part < C::kParts) {
            ptx::wgmma_wait_group<C::kParts - 1 - part>();
            // Every lane has read its scale before the MMAs began.
            if (part == C::kParts - 1 && threadIdx.x % 32 == 0)
                ptx::mbarrier_arrive(base + offsetof(Shared<C>, keys_empty) + ring.stage * 8);
            store<part>(sums[part], scale, position + key());
            finish<part + 1>(sums, scale, position);
        }
    }

    // relu. An MMA leaves the sign of a NaN clear, so NaN stays NaN. Integers are compared, because
    // integer instructions do not delay the tensor cores' reads of their operands. Each addition of
    // floats does.
    __device__ __forceinline__ static float positive(float x) {
        return __int_as_float(max(__float_as_int(x), 0));
    }

    // Sums over heads, and stores the logits of a part's tokens for this lane's key.
    template <int part>
    __device__ __forceinline__ void store(const float (&x)[kSums], float scale, int own) {
        constexpr int kOwn = C::kTokensOfPart;
        // Sums of each token for key g and for key g + 8.
        float sums[kOwn][2];
#pragma unroll
        for (int t = 0; t < kOwn; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float& sum = sums[t][half];
                sum = 0;
#pragma unroll
                for (int i = 0; i < kOfToken; ++i) {
                    const int column = t * kOfToken + i;
                    sum = fmaf(weights[part * (C::kColumnsOfPart / 4) + column],
                               positive(x[column / 2 * 4 + 2 * half + column % 2]), sum);
                }
            }
        if constexpr (kTokens == 1) {
            const float sum = exchange(sums[0][0], sums[0][1], 1);
            const float all = sum + __shfl_xor_sync(~0u, sum, 2);
            if (q < 2 && own < seen[0]) *out[0] = all * scale;
            out[0] += kStep * kTileKeys;
        } else {
#pragma unroll
            for (int t = 0; t < kOwn; t += 2) {
                const float first = exchange(sums[t][0], sums[t][1], 1);
                const float second = exchange(sums[t + 1][0], sums[t + 1][1], 1);
                const float all = exchange(first, second, 2);
                const int i = (part * kOwn + t) / 2;
                if (own < seen[i]) *out[i] = all * scale;
                out[i] += kStep * kTileKeys;
            }
        }
    }

    // Adds up two sums across two lanes: the lane without the bit gets the first sum, the other
    // lane the second.
    __device__ __forceinline__ float exchange(float first, float second, int bit) const {
        const bool upper = q & bit;
        const float given = __shfl_xor_sync(~0u, upper ? first : second, bit);
        return (upper ? second : first) + given;
    }
};

}  // namespace mla::sm90::logits
