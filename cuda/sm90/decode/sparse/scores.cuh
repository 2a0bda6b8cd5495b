// The scores warpgroup computes S^T = K Q^T and the softmax, and writes the probabilities to shared
// memory. score_gemm.cuh says which lane has which score.
#pragma once

#include "../../../common/softmax.cuh"
#include "combine.cuh"
#include "queries.cuh"
#include "score_gemm.cuh"

namespace mla::sm90::sparse {

// Probabilities are relative to a reference maximum. When the reference is set, it lies this far
// below the true maximum, in units of log2. Probabilities then reach 2^7, so small ones keep their
// bits in f16. The reference is raised when the true maximum has risen by 8 more.
constexpr float kHeadroom = 7.f;

// The factor of a group's values in f16 is the ratio of the group's scale to its key's largest
// scale, times this constant. Thanks to the constant, a ratio of 2^-21 is still a normal number, as
// precise as any other. Below that, each halving loses a bit. A value is 448 at most, and 448 * 2^7
// is below f16's maximum. A unit for each group would allow smaller ratios, but with 64 rows it
// would cost 9% of the time.
constexpr float kRatioLift = 128.f;

template <typename T, int N, class R>
struct Scores {
    using L = Layout<N, R>;
    using Operand = typename R::Operand;
    using Sums = typename ScoreGemm<T, N, R>::Sums;
    static constexpr int kColumns = N / 4;
    static constexpr bool kPingpong = L::kScoreGroups == 2;

    const KernelParams& p;
    typename L::Control& s;
    uint32_t base;
    // The group, and this thread's numbers within it.
    int group, thread, warp, lane;
    const ScoreGemm<T, N, R> gemm;

    __device__ Scores(const KernelParams& params, typename L::Control& small, uint32_t address)
        : p(params),
          s(small),
          base(address),
          group(__shfl_sync(~0u, (threadIdx.x >> 7) - 1, 0)),
          thread(threadIdx.x & 127),
          warp(__shfl_sync(~0u, thread >> 5, 0)),
          lane(thread & 31),
          gemm{base, lane} {}

    __device__ int g() const { return lane >> 2; }
    __device__ int q() const { return lane & 3; }

    // Returns this lane's number. Values computed from it are not computed before the loop over
    // tiles, where they would be spilled.
    __device__ int lane_again() const {
        int again = lane;
        asm volatile("" : "+r"(again));
        return again;
    }

    // The head of this lane's i-th column, and the first accumulator of the column. Its other
    // accumulator, for the eighth key after the first, is two further.
    __device__ int head(int i) const { return 8 * (i >> 1) + (i & 1) + 2 * q(); }
    __device__ static constexpr int at(int i) { return 4 * (i >> 1) + (i & 1); }
    // The numbers of barriers have to be constants in the instructions.
    __device__ void sync_group() const {
        if (group == 0)
            ScoresBarrier::sync();
        else
            SecondScoresBarrier::sync();
    }
    __device__ bool sync_group_or(bool own) const {
        return group == 0 ? ScoresBarrier::sync_or(own) : SecondScoresBarrier::sync_or(own);
    }
    __device__ static void sync_all_groups() {
        NamedBarrier<BarrierId::all_scores, L::kScoreThreads>::sync();
    }

    struct Running {
        float sum[kColumns];
        // The reference maxima. With two groups they are kept here, because the other group may be
        // raising those in shared memory.
        float maximum[kPingpong ? kColumns : 1];
        // Factor of the keys' scales: a power of two that brings them to 1 or less.
        float unit;
    };

    __device__ void run() {
        PipelineState<L::kStages> ring;
        PipelineCounter<kPublishedTiles> tile;
        PipelineCounter<kProbabilityTiles> scored;
#pragma unroll 1
        while (true) {
            // Each item has a last tile without keys. The difference is therefore the number of
            // items before this one.
            const int index =
                TileScheduler::first(p) + int(tile.count - scored.count) * TileScheduler::step();
            if (index >= p.items) break;
            if (group == 0 && thread < N) s.reference[thread] = -INFINITY;
            Queries<T, N, R>{p, s, base, group * 128 + thread}.load(WorkItem(p, index));
            sync_all_groups();
            Running running;
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                running.sum[c] = 0.f;
                if constexpr (kPingpong) running.maximum[c] = -INFINITY;
            }
            running.unit = R::kScales ? 0x1p126f : 1.f;
            const uint32_t first = scored.count;
#pragma unroll 1
            while (true) {
                ptx::mbarrier_wait(ptx::shared_address(&s.tile_full[tile.stage()]), tile.phase());
                const int keys = read_keys(s.keys[tile.stage()], lane);
                if (keys == 0) break;
                if (!kPingpong || (scored.count & 1) == group)
                    score(running, keys, ring, scored, scored.count == first);
                ring.advance((keys + kStageKeys - 1) / kStageKeys);
                ++scored.count;
                release_tile(tile);
            }
            // The last tile's maxima are adopted, too. All sums are then relative to the same
            // maxima.
            if (kPingpong && scored.count != first && ((scored.count - 1) & 1) != group)
                adopt_maxima(running, scored.count - 1);
            finish(running, tile.count - scored.count);
            release_tile(tile);
        }
    }

    // Waits until the other group has published its tile's maxima, and adopts those that it has
    // raised.
    __device__ void adopt_maxima(Running& running, uint32_t use) const {
        if constexpr (kPingpong) {
            const PipelineCounter<kProbabilityTiles> before{use};
            ptx::mbarrier_wait(ptx::shared_address(&s.maxima_published[before.stage()]),
                               before.phase());
            if (!s.any_factor[before.stage()]) return;
            take_raised(running);
            if constexpr (R::kScales) running.unit = s.unit;
        }
    }

    __device__ void take_raised(Running& running) const {
#pragma unroll
        for (int c = 0; c < kColumns; c += 2) {
            const float2 by = *reinterpret_cast<const float2*>(&s.raised_by[head(c)]);
            running.sum[c] *= by.x;
            running.sum[c + 1] *= by.y;
            if constexpr (kPingpong) {
                const float2 reference = *reinterpret_cast<const float2*>(&s.reference[head(c)]);
                running.maximum[c] = reference.x;
                running.maximum[c + 1] = reference.y;
            }
        }
    }

    // The reference maxima of two neighbouring columns.
    __device__ float2 reference_of(const Running& running, int c) const {
        if constexpr (kPingpong)
            return make_float2(running.maximum[c], running.maximum[c + 1]);
        else
            return *reinterpret_cast<const float2*>(&s.reference[head(c)]);
    }

    __device__ void release_tile(PipelineCounter<kPublishedTiles>& tile) const {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.tile_empty[tile.stage()]));
        ++tile.count;
    }

    // Computes the probabilities of a KV tile.
    __device__ void score(Running& running, int keys, const PipelineState<L::kStages>& ring,
                          const PipelineCounter<kProbabilityTiles>& scored, bool first) {
        // A warp without keys reads those of the first one; its results are not used.
        auto own = ring;
        own.advance(warp * kStageKeys < keys ? warp : 0);
        ptx::mbarrier_wait(ptx::shared_address(&s.full[own.stage]), own.phase);
        const uint32_t stage = base + L::kRingOffset + own.stage * L::kStageBytes;
        Sums d;
        gemm.run(d, stage);

        // Keys past the last one weigh nothing.
        const int of_warp = keys - warp * kStageKeys;
        const bool valid[2] = {R::key_row(g()) < of_warp, R::key_row(g() + 8) < of_warp};
        float top_scale[2] = {0.f, 0.f};
        if constexpr (R::kScales) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const uint4 scales = gemm.scales_of_key(stage, k);
                if (valid[k]) top_scale[k] = largest(scales);
            }
        }
        scale(d, valid);
        if (!first) adopt_maxima(running, scored.count - 1);
        const bool own_rises = rises(running, d, top_scale);
        const int at_tile = scored.stage();
        // Waits until the output no longer needs this tile's stage of the probabilities.
        ptx::mbarrier_wait(ptx::shared_address(&s.scores_empty[at_tile]), scored.phase() ^ 1);
        const bool any = sync_group_or(own_rises);
        if (any) raise(running, d, top_scale, at_tile);
        if (thread == 0) s.any_factor[at_tile] = any;
        if constexpr (kPingpong)
            ptx::mbarrier_arrive(ptx::shared_address(&s.maxima_published[at_tile]));

        weigh(running, d, top_scale);
        store(d, at_tile);
        if constexpr (R::kScales) {
            // Each lane writes the ratios of one group.
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const float of_group = gemm.scale_of_key(stage, k, q());
                const float top = top_scale[k];
                s.ratio[at_tile][q()][warp * 16 + g() + 8 * k] =
                    __float2half_rn(top > 0.f ? of_group / top * kRatioLift : 0.f);
            }
        }
        ptx::fence_proxy_async();
        ptx::mbarrier_arrive(ptx::shared_address(&s.scores_full[at_tile]));
    }

    // The largest magnitude of four floats.
    __device__ static float largest(const uint4& v) {
        const auto size = [](uint32_t x) { return fabsf(__uint_as_float(x)); };
        return fmaxf(fmaxf(size(v.x), size(v.y)), fmaxf(size(v.z), size(v.w)));
    }

    // Turns the sums into scores, in units of log2. The scores of keys that do not exist become
    // -inf.
    __device__ void scale(Sums& d, const bool (&valid)[2]) const {
#pragma unroll
        for (int c = 0; c < kColumns; c += 2) {
            const float2 scale = *reinterpret_cast<const float2*>(&s.query_scale[head(c)]);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    float& x = d[at(c + e) + 2 * k];
                    x = valid[k] ? x * (e ? scale.y : scale.x) : -INFINITY;
                }
            }
        }
    }

    // True if this lane's scores, or its keys' scales, are too large for the references.
    __device__ bool rises(const Running& running, const Sums& d,
                          const float (&top_scale)[2]) const {
        bool rises = R::kScales && fmaxf(top_scale[0], top_scale[1]) * running.unit > 1.f;
#pragma unroll
        for (int c = 0; c < kColumns; c += 2) {
            const float2 reference = reference_of(running, c);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float limit = (e ? reference.y : reference.x) + (kHeadroom + kLazyMaximum);
                rises |= d[at(c + e)] > limit || d[at(c + e) + 2] > limit;
            }
        }
        return rises;
    }

    // Turns scores into probabilities, adds these up, and then multiplies them by their keys'
    // scales.
    __device__ void weigh(Running& running, Sums& d, const float (&top_scale)[2]) const {
#pragma unroll
        for (int c = 0; c < kColumns; c += 2) {
            const float2 reference = reference_of(running, c);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float offset = offset_of(e ? reference.y : reference.x);
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    float& x = d[at(c + e) + 2 * k];
                    x = ptx::ex2_approx(x - offset);
                    running.sum[c + e] += x;
                    if constexpr (R::kScales) x *= top_scale[k] * running.unit;
                }
            }
        }
    }

    // Raises the reference maxima of those rows whose scores demand it, and the
    // unit of the keys' scales; called by all four warps.
    __device__ void raise(Running& running, const Sums& d, const float (&top_scale)[2],
                          int at_tile) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            float top = fmaxf(d[at(c)], d[at(c) + 2]);
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2)
                top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
            if (lane_again() < 4) s.of_warp[4 * group + warp][head(c)] = top;
        }
        if constexpr (R::kScales) {
            const float top = fmaxf(top_scale[0], top_scale[1]);
            const uint32_t of_warp = __reduce_max_sync(~0u, __float_as_uint(top));
            if (lane == 0) s.scale_of_warp[4 * group + warp] = __uint_as_float(of_warp);
        }
        sync_group();
        float change = 1.f;
        if constexpr (R::kScales) {
            const float* of_warp = s.scale_of_warp + 4 * group;
            const float top = fmaxf(fmaxf(of_warp[0], of_warp[1]), fmaxf(of_warp[2], of_warp[3]));
            if (top * running.unit > 1.f) {
                // Brings the scale below 1/2, so that the next one may be somewhat larger.
                const int exponent = int(__float_as_uint(top) >> 23) - 127;
                const float unit = __int_as_float(max(127 - (exponent + 2), 1) << 23);
                change = unit / running.unit;
                running.unit = unit;
            }
            if (kPingpong && thread == 0) s.unit = running.unit;
        }
        if (thread < N) {
            const auto* of_warp = s.of_warp + 4 * group;
            const float top = fmaxf(fmaxf(of_warp[0][thread], of_warp[1][thread]),
                                    fmaxf(of_warp[2][thread], of_warp[3][thread]));
            const float reference = s.reference[thread];
            const bool rises = top > reference + (kHeadroom + kLazyMaximum);
            const float by = rises ? ptx::ex2_approx(reference - (top - kHeadroom)) : 1.f;
            if (rises) s.reference[thread] = top - kHeadroom;
            s.raised_by[thread] = by;
            s.factor[at_tile][thread] = by * change;
        }
        sync_group();
        take_raised(running);
    }

    // Writes P as a K-major tile: row = head, 64 keys.
    __device__ void store(const Sums& d, int at_tile) const {
        const uint32_t tile = base + L::kProbabilityOffset + at_tile * L::kProbabilityBytes;
        const int own = lane_again();
        const int row = (own >> 4) * 8 + (own & 7), chunk = 2 * warp + (own >> 3 & 1);
#pragma unroll
        for (int i = 0; i < N / 16; ++i)
            ptx::stmatrix_x4_trans(tile + (16 * i + row) * 128 + ((chunk ^ (row & 7)) << 4),
                                   ptx::cvt_rn_x2<Operand>(d[8 * i], d[8 * i + 1]),
                                   ptx::cvt_rn_x2<Operand>(d[8 * i + 2], d[8 * i + 3]),
                                   ptx::cvt_rn_x2<Operand>(d[8 * i + 4], d[8 * i + 5]),
                                   ptx::cvt_rn_x2<Operand>(d[8 * i + 6], d[8 * i + 7]));
    }

    // Releases the queries, and publishes an item's maxima and sums for the output.
    __device__ void finish(Running& running, uint32_t done) {
        const WorkItem item(p, TileScheduler::first(p) + int(done) * TileScheduler::step());
        ptx::mbarrier_wait(ptx::shared_address(&s.stats_empty), (done & 1) ^ 1);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            float sum = running.sum[c];
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2)
                sum += __shfl_xor_sync(~0u, sum, distance);
            if (g() == 0) s.of_warp[4 * group + warp][head(c)] = sum;
        }
        sync_all_groups();
        if (group == 0 && thread < N) {
            float sum = 0.f;
#pragma unroll
            for (const auto& of_warp : s.of_warp) sum += of_warp[thread];
            constexpr float lift = R::kScales ? kRatioLift : 1.f;
            const float maximum = s.reference[thread], scale = p.out_scale / lift / running.unit;
            s.maximum[thread] = maximum;
            s.sum[thread] = sum;
            s.inverse[thread] = TileScheduler::splits() > 1
                                    ? scale
                                    : finish_row(p, item, thread, maximum, sum, scale);
        }
        // This fence covers all that the output waits for, and all memory that the next item writes
        // to.
        ptx::fence_proxy_async();
        if (group == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.stats_full));
        sync_all_groups();
    }
};

}  // namespace mla::sm90::sparse
