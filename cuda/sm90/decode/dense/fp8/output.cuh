// Computes O^T += V^T P^T over the KV tiles of each work item. V is converted in registers.
#pragma once

#include "../../../../common/swizzle.cuh"
#include "../accumulators.cuh"
#include "../splits.cuh"

namespace mla::sm90::decode {

// Two warpgroups, with 256 latent values each.
template <class C>
struct Fp8Output {
    using LatentState = typename C::LatentState;
    using L = typename C::L;
    using T = typename C::T;
    static constexpr int N = C::N;

    const Context<C>& c;
    const KernelParams& p = c.p;
    typename C::Control& s = c.s;

    __device__ void run() {
        const int thread = threadIdx.x - 128 - C::kScoreThreads, lane = thread & 31,
                  quad = lane & 3;
        // This lane's eight latent values, at token 2 quad.
        const int latent = (thread >> 5) * 64 + (lane >> 2) * 8;
        const uint32_t group = (latent >> 7) * L::kGroupBytes, chunk = latent >> 4 & 7,
                       low = latent & 8;
        const uint32_t even = group + swizzled<128>(2 * quad, chunk) + low;
        const uint32_t odd = group + swizzled<128>(2 * quad + 1, chunk) + low;
        Splits<C> splits{c};
        LatentState ring;
        uint32_t kv_tiles = 0, tails = 0;  // each bit of `tails`: the phase of a stage's barrier
        PipelineCounter<kQueuedItems> queue;
        for (const WorkItem* next; (next = c.acquire(queue)); c.release(queue)) {
            const WorkItem& item = *next;
            const int begin = item.kv_tile_begin, end = item.kv_tile_end;
            const int seen_by_all = c.seen_by_all(item);
            TransposedSums<T, N, 512> sums;
            sums.clear();
            for (int kv_tile = begin; kv_tile < end; ++kv_tile) {
                // The two stages of the probabilities alternate.
                const int stage = kv_tiles & 1;
                s.latent_full[ring.stage].wait(ring.phase);
                s.scores_full[stage].wait(kv_tiles >> 1 & 1);
                if ((kv_tile + 1) * kTileTokens > seen_by_all) {
                    s.tail_cleared[stage].wait(tails >> stage & 1);
                    tails ^= 1 << stage;
                }
                if (kv_tile > begin && s.any_factor[stage]) sums.rescale(s.factor[stage], quad);
                accumulate(
                    sums.acc, c.latent_stage(ring.stage) + even, c.latent_stage(ring.stage) + odd,
                    probabilities(__shfl_sync(~0u, stage, 0)), s.latent_empty[ring.stage], lane);
                // Each lane arrives for what it has read itself, including the factors.
                s.scores_empty[stage].arrive();
                ring.advance(1);
                ++kv_tiles;
            }
            s.stats_full.wait(queue.count & 1);
            if (item.splits == 1)
                write_whole(item, sums.acc, latent, quad);
            else
                splits.store(item, sums, thread);
        }
        splits.combine(queue, thread);
    }

  private:
    __device__ uint32_t probabilities(int stage) const {
        return c.base + L::kProbabilityOffset + stage * L::kProbabilityBytes;
    }

    // acc += V^T P^T for a KV tile. A step takes 16 tokens. A lane has two neighbouring ones, at
    // `even` and `odd`, and the two that come eight tokens later.
    __device__ void accumulate(float (&acc)[4][N / 2], uint32_t even, uint32_t odd, uint32_t tile,
                               const Barrier<kOutputWarps>& empty, int lane) const {
        struct Words {
            uint2 even, odd, even8, odd8;
        };
        const auto load = [&](int step) -> Words {
            const uint32_t offset = step * 2048;
            return {ptx::ld_shared_v2(even + offset), ptx::ld_shared_v2(odd + offset),
                    ptx::ld_shared_v2(even + offset + 1024),
                    ptx::ld_shared_v2(odd + offset + 1024)};
        };
        const uint64_t b = ptx::wgmma_descriptor(tile);
        uint32_t a[2][8];
        Words words = load(0);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            Words following = words;
            if (step < 3) following = load(step + 1);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (step > 0) ptx::wgmma_wait_group<1>();
                // Four latent values of four tokens: pairs of tokens for each value.
                const uint32_t x = half ? words.even.y : words.even.x,
                               y = half ? words.odd.y : words.odd.x;
                const uint32_t x8 = half ? words.even8.y : words.even8.x,
                               y8 = half ? words.odd8.y : words.odd8.x;
                uint32_t* own = a[half];
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    const uint32_t selector = t ? 0x7362 : 0x5140;
                    const uint2 v = ptx::cvt_f16x4_e4m3x4(__byte_perm(x, y, selector)),
                                v8 = ptx::cvt_f16x4_e4m3x4(__byte_perm(x8, y8, selector));
                    own[4 * t] = v.x;
                    own[4 * t + 1] = v.y;
                    own[4 * t + 2] = v8.x;
                    own[4 * t + 3] = v8.y;
                }
                ptx::wgmma_fence();
#pragma unroll
                for (int t = 0; t < 2; ++t)
                    ptx::WgmmaFromRegisters<__half, N>::run(acc[2 * half + t], own + 4 * t,
                                                            b + 2 * step, 1);
                ptx::wgmma_commit_group();
            }
            words = following;
        }
        // All that was read is in registers.
        __syncwarp();
        free_stage(empty, lane);
        ptx::wgmma_wait_group<0>();
    }

    __device__ void write_whole(const WorkItem& item, const float (&acc)[4][N / 2], int latent,
                                int quad) const {
        const OutputRows<T> out = c.output_rows(item);
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            const int column = 8 * j + 2 * quad;
            const float2 f = *reinterpret_cast<const float2*>(&s.inverse[column]);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float factor = e ? f.y : f.x;
                uint32_t v[4];
#pragma unroll
                for (int t = 0; t < 4; ++t)
                    v[t] = ptx::cvt_rn_x2<T>(acc[t][4 * j + e] * factor,
                                             acc[t][4 * j + 2 + e] * factor);
                if (column + e < out.rows)
                    *reinterpret_cast<uint4*>(out.row(column + e) + latent) =
                        make_uint4(v[0], v[1], v[2], v[3]);
            }
        }
        s.stats_empty.arrive();
    }
};

}  // namespace mla::sm90::decode
