// The output warpgroups compute O^T = O^T + V^T P^T. Each of them has 256 of the 512 latent values.
// At an item's end they write the output, or merge it with the outputs of the other CTAs of the
// cluster.
//
// Accumulators have latent values for rows and heads for columns. For e = 0 and 1, lane 4 g + q has
// in acc[t][4 j + e] the latent value R::latent(t, 0, g) of its warp's 64, at head 8 j + 2 q + e.
// In acc[t][4 j + 2 + e] it has the value R::latent(t, 1, g) at the same head.
#pragma once

#include "../../../common/quad.cuh"
#include "combine.cuh"
#include "scores.cuh"

namespace mla::sm90::sparse {

template <typename T, int N, class R>
struct Output {
    using L = Layout<N, R>;
    using Operand = typename R::Operand;
    using Sums = float[4][N / 2];

    const KernelParams& p;
    typename L::Control& s;
    uint32_t base;
    int thread, lane, g, q;
    // The first of this warp's latent values.
    int first_latent;

    __device__ Output(const KernelParams& params, typename L::Control& small, uint32_t address)
        : p(params),
          s(small),
          base(address),
          thread(threadIdx.x - 128 - L::kScoreThreads),
          lane(thread & 31),
          g(lane >> 2),
          q(lane & 3),
          first_latent(__shfl_sync(~0u, thread >> 5, 0) * 64) {}

    __device__ void run() {
        PipelineState<L::kStages> ring;
        PipelineCounter<kPublishedTiles> tile;
        PipelineCounter<kProbabilityTiles> scored;
        uint32_t done = 0;
#pragma unroll 1
        for (int i = TileScheduler::first(p); i < p.items; i += TileScheduler::step(), ++done) {
            // The output warps have nothing else to do yet.
            prefetch_item<R::kRope>(p, i + TileScheduler::step(), thread, kOutputThreads);
            find_ends(p, s.ends, i, done, thread);
            Sums acc;
#pragma unroll
            for (int t = 0; t < 4; ++t)
#pragma unroll
                for (int j = 0; j < N / 2; ++j) acc[t][j] = 0.f;
#pragma unroll 1
            while (true) {
                ptx::mbarrier_wait(ptx::shared_address(&s.tile_full[tile.stage()]), tile.phase());
                const int keys = read_keys(s.keys[tile.stage()], lane);
                if (keys > 0) {
                    if (keys == kTileKeys)
                        add_tile(acc, scored, ring);
                    else
                        add_some(acc, scored, ring, keys);
                    ptx::mbarrier_arrive(ptx::shared_address(&s.scores_empty[scored.stage()]));
                    ++scored.count;
                }
                __syncwarp();
                if (lane == 0)
                    ptx::mbarrier_arrive(ptx::shared_address(&s.tile_empty[tile.stage()]));
                ++tile.count;
                if (keys == 0) break;
            }
            ptx::mbarrier_wait(ptx::shared_address(&s.stats_full), done & 1);
            const WorkItem item(p, i);
            if (TileScheduler::splits() == 1) {
                write(acc, item);
            } else if constexpr (L::kShort) {
                exchange(acc, item);
                // A cluster has one item.
                return;
            } else {
                merge(acc, item);
            }
            ptx::mbarrier_arrive(ptx::shared_address(&s.stats_empty));
        }
    }

    __device__ void rescale(Sums& acc, const float* factor) const {
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            const float2 f = *reinterpret_cast<const float2*>(&factor[8 * j + 2 * q]);
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                acc[t][4 * j] *= f.x;
                acc[t][4 * j + 1] *= f.y;
                acc[t][4 * j + 2] *= f.x;
                acc[t][4 * j + 3] *= f.y;
            }
        }
    }

    // Adds a whole KV tile.
    __device__ void add_tile(Sums& acc, const PipelineCounter<kProbabilityTiles>& scored,
                             PipelineState<L::kStages>& ring) const {
        constexpr int steps = kTileKeys / kStageKeys;
        PipelineState<L::kStages> ahead = ring;
        // The first keys need not wait for the probabilities.
        Values values = read(ahead);
        wait_for_scores(acc, scored);
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            const Values own = values;
            if (step + 1 < steps) values = read(ahead);
            add(acc, own, scored.stage(), step, ring);
        }
        ptx::wgmma_wait_group<0>();
    }

    // Adds a KV tile that has fewer keys.
    __device__ void add_some(Sums& acc, const PipelineCounter<kProbabilityTiles>& scored,
                             PipelineState<L::kStages>& ring, int keys) const {
        wait_for_scores(acc, scored);
#pragma unroll 1
        for (int step = 0; step * kStageKeys < keys; ++step) {
            PipelineState<L::kStages> at = ring;
            add(acc, read(at), scored.stage(), step, ring);
            ptx::wgmma_wait_group<0>();
        }
    }

    __device__ void wait_for_scores(Sums& acc,
                                    const PipelineCounter<kProbabilityTiles>& scored) const {
        ptx::mbarrier_wait(ptx::shared_address(&s.scores_full[scored.stage()]), scored.phase());
        if (s.any_factor[scored.stage()]) rescale(acc, s.factor[scored.stage()]);
    }

    // Eight latent values of each of four keys. Used only if they are e4m3.
    struct Values {
        uint2 x, y, x8, y8;
    };

    __device__ uint32_t stage_address(const PipelineState<L::kStages>& ring) const {
        return base + L::kRingOffset + ring.stage * L::kStageBytes;
    }

    // Waits for a stage, and reads this lane's values if they are e4m3. Other formats are read
    // later, as operands.
    __device__ Values read(PipelineState<L::kStages>& ring) const {
        ptx::mbarrier_wait(ptx::shared_address(&s.full[ring.stage]), ring.phase);
        Values v = {};
        if constexpr (R::kConverts) {
            const uint32_t from = stage_address(ring) + first_latent + 8 * g;
            v.x = ptx::ld_shared_v2(from + R::key_row(2 * q) * R::kPitch);
            v.y = ptx::ld_shared_v2(from + R::key_row(2 * q + 1) * R::kPitch);
            v.x8 = ptx::ld_shared_v2(from + R::key_row(2 * q + 8) * R::kPitch);
            v.y8 = ptx::ld_shared_v2(from + R::key_row(2 * q + 9) * R::kPitch);
        }
        ring.advance(1);
        return v;
    }

    // Adds the 16 keys of a stage, and releases the stage. The operands of two MMAs are made while
    // the two MMAs before them run.
    __device__ void add(Sums& acc, const Values& v, int at_tile, int step,
                        PipelineState<L::kStages>& ring) const {
        const uint64_t b =
            ptx::wgmma_descriptor(base + L::kProbabilityOffset +
                                  __shfl_sync(~0u, at_tile, 0) * L::kProbabilityBytes) +
            2 * step;
        uint32_t a[2][8];
        if constexpr (R::kConverts) {
            __half2 ratio, ratio8;
            if constexpr (R::kScales) {
                const __half* of_group = s.ratio[at_tile][first_latent / R::kGroupValues];
                const __half* of_key = of_group + step * kStageKeys + 2 * q;
                ratio = *reinterpret_cast<const __half2*>(of_key);
                ratio8 = *reinterpret_cast<const __half2*>(of_key + 8);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                ptx::wgmma_wait_group<1>();
                const uint32_t x = half ? v.x.y : v.x.x, y = half ? v.y.y : v.y.x;
                const uint32_t x8 = half ? v.x8.y : v.x8.x, y8 = half ? v.y8.y : v.y8.x;
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    // Two latent values of both keys of a pair.
                    const uint32_t selector = t ? 0x7362 : 0x5140;
                    const uint2 low = ptx::cvt_f16x4_e4m3x4(__byte_perm(x, y, selector));
                    const uint2 high = ptx::cvt_f16x4_e4m3x4(__byte_perm(x8, y8, selector));
                    uint32_t* own = a[half] + 4 * t;
                    own[0] = low.x;
                    own[1] = low.y;
                    own[2] = high.x;
                    own[3] = high.y;
                    if constexpr (R::kScales) {
                        own[0] = times(own[0], ratio);
                        own[1] = times(own[1], ratio);
                        own[2] = times(own[2], ratio8);
                        own[3] = times(own[3], ratio8);
                    }
                }
                multiply(acc, a[half], half, b);
            }
        } else {
            const uint32_t from = stage_address(ring) + ((lane & 7) + (lane >> 4) * 8) * R::kPitch +
                                  (first_latent + (lane >> 3 & 1) * 8) * 2;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                ptx::wgmma_wait_group<1>();
#pragma unroll
                for (int t = 0; t < 2; ++t)
                    ptx::ldmatrix_x4_trans(*reinterpret_cast<uint32_t (*)[4]>(a[half] + 4 * t),
                                           from + (2 * half + t) * 32);
                multiply(acc, a[half], half, b);
            }
        }
        // The MMAs have been issued, so the stage's values are in registers.
        ptx::mbarrier_arrive(ptx::shared_address(&s.empty[ring.stage]));
        ring.advance(1);
    }

    __device__ static void multiply(Sums& acc, const uint32_t (&a)[8], int half, uint64_t b) {
        ptx::wgmma_fence();
#pragma unroll
        for (int t = 0; t < 2; ++t)
            ptx::WgmmaFromRegisters<Operand, N>::run(acc[2 * half + t], a + 4 * t, b, 1);
        ptx::wgmma_commit_group();
    }

    __device__ static uint32_t times(uint32_t two, __half2 by) {
        const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&two), by);
        return *reinterpret_cast<const uint32_t*>(&product);
    }

    // Writes the output of an item that has no splits.
    __device__ void write(const Sums& acc, const WorkItem& item) const {
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            if (8 * j >= item.heads) break;
            const float2 f = *reinterpret_cast<const float2*>(&s.inverse[8 * j + 2 * q]);
            if constexpr (R::kConverts) {
                // A lane has eight neighbouring latent values.
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int head = 8 * j + 2 * q + e;
                    const float by = e ? f.y : f.x;
                    uint32_t v[4];
#pragma unroll
                    for (int t = 0; t < 4; ++t)
                        v[t] =
                            ptx::cvt_rn_x2<T>(acc[t][4 * j + e] * by, acc[t][4 * j + 2 + e] * by);
                    if (head < item.heads)
                        *reinterpret_cast<uint4*>(output_row<T>(p, item, head) + first_latent +
                                                  8 * g) = make_uint4(v[0], v[1], v[2], v[3]);
                }
            } else {
                // The first transposition gives a lane two neighbouring values of head g of the
                // eight. The second, within a quad, gives it eight neighbouring values.
                const int head = 8 * j + g;
                T* to = output_row<T>(p, item, head) + first_latent + 8 * q;
#pragma unroll
                for (int t = 0; t < 4; t += 2) {
                    uint32_t words[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float* x = acc[t + i / 2] + 4 * j + i % 2 * 2;
                        words[i] = ptx::movmatrix_trans(ptx::cvt_rn_x2<T>(x[0] * f.x, x[1] * f.y));
                    }
                    transpose_quad(words, q);
                    if (head < item.heads)
                        *reinterpret_cast<uint4*>(to + 16 * t) =
                            make_uint4(words[0], words[1], words[2], words[3]);
                }
            }
        }
    }

    // Row 8 (4 j + t) + warp of the accumulators has acc[t][4 j] to acc[t][4 j + 3].
    struct Fragment {
        static constexpr int kLatentStep = R::kConverts ? 1 : 8;
        // The head of a lane's value number `i`.
        __device__ static int head(int row, int lane, int i) {
            return row / 32 * 8 + 2 * (lane & 3) + i;
        }
        __device__ static int latent(int row, int lane) {
            return row % 8 * 64 + R::latent(row / 8 % 4, 0, lane >> 2);
        }
        // Index, among these four, of the value for head number `e` and latent value number `i` of
        // the lane.
        __device__ static constexpr int at(int e, int i) { return 2 * i + e; }
    };

    __device__ void exchange(const Sums& acc, const WorkItem& item) const {
        Exchange<T, L, Fragment> exchange{p, s, base, thread};
        exchange.begin(item);
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            if (8 * j >= item.heads) break;
#pragma unroll
            for (int t = 0; t < 4; ++t)
                exchange.send(8 * (4 * j + t) + first_latent / 64, acc[t] + 4 * j);
        }
        exchange.run(item);
    }

    __device__ void merge(const Sums& acc, const WorkItem& item) const {
        const Merge<T, L> merge{p, s, base, thread};
        merge.sync_output();
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int head = 8 * j + 2 * q + e;
                const float scale = s.inverse[head];
                const auto value = [&](int t, int half) {
                    return acc[t][4 * j + 2 * half + e] * scale;
                };
                if constexpr (R::kConverts) {
                    // Eight neighbouring values. Every other lane of a quad stores the last four
                    // first, so that no two lanes have the same bank.
                    const float4 low =
                        make_float4(value(0, 0), value(0, 1), value(1, 0), value(1, 1));
                    const float4 high =
                        make_float4(value(2, 0), value(2, 1), value(3, 0), value(3, 1));
                    const bool odd = q & 1;
                    const int latent = first_latent + 8 * g;
                    merge.put(head, latent + (odd ? 4 : 0), odd ? high : low);
                    merge.put(head, latent + (odd ? 0 : 4), odd ? low : high);
                } else {
#pragma unroll
                    for (int t = 0; t < 4; ++t)
#pragma unroll
                        for (int half = 0; half < 2; ++half)
                            merge.put(head, first_latent + R::latent(t, half, g), value(t, half));
                }
            }
        merge.run(item);
    }
};

}  // namespace mla::sm90::sparse
