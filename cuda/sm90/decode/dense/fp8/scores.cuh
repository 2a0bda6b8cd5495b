// Scores of query rows and cached tokens of e4m3, their softmax, and the probabilities.
//
// The cache stays e4m3 in shared memory. Each warp converts in registers what it multiplies next.
// In both GEMMs the cache is operand A, which may come from registers. f16 holds every value of
// e4m3 exactly, so the MMAs are of f16, whatever the type of the queries. Queries of bf16 are first
// multiplied by a power of two that brings the largest value of a query tile below 2^15. The scale
// of the scores takes this back. Values that f16 then cannot hold are less than 2^-39 of the
// largest. Sums in f32 do not hold these either.
//
// An instruction may sum over any values together, if both operands agree. A lane therefore reads
// 16 bytes of a token at a time, and the queries are permuted to fit. Lane q of a quad has values
// 32 q .. 32 q + 31 of 128 values, and instruction i takes values 4 i .. 4 i + 3 of each lane.
//
// With 32 rows or fewer, two warpgroups compute scores in pingpong, KV tile by KV tile: one issues
// MMAs during the other's softmax. A tile's reference maxima follow from those of the tile before,
// which the other group has. A group therefore publishes its tile's maxima after it has adopted the
// other group's. Each group has sums of its own. The first group fetches the queries, and adds the
// sums up at the end. The drawing shows a work item of four KV tiles:
//
//   scores 0   [fetch Q][Q K0 ][maxima 0, softmax 0][Q K2 ]   [maxima 2, softmax 2]   [sums]
//   scores 1            [Q K1 ]        [maxima 1, softmax 1][Q K3 ]    [maxima 3, softmax 3]
//   output                                 [V0 P0 ] [V1 P1 ]      [V2 P2 ]    [V3 P3 ]
//
// KV tiles are counted through all work items. Even ones belong to the first group, and use the
// first stage of the probabilities. Odd ones belong to the second group, and use the second stage.
//
// The reference maximum lies 7 below a row's maximum, so that small probabilities keep their bits
// in f16. Probabilities reach 2^7 when the reference is set, and up to 2^15 before it is raised.
// All warps vote on raising it. Maxima are compared between lanes and warps only if it has to be
// raised.
//
// If each token has a scale, the products with its latent are multiplied by it before those with
// its rotary key, of bf16, are added. The output needs the product of a token's probability and
// its scale, s. The logarithm of |s| is therefore added to scores. References are maxima of these
// sums, so the products fit f16 for any scales. The softmax's own sums take probabilities divided
// by |s|, in f32, whose range is enough.
#pragma once

#include "../../../../common/finite.cuh"
#include "../../../../common/softmax.cuh"
#include "../../../../common/swizzle.cuh"
#include "../../../../ptx/wgmma.cuh"
#include "../context.cuh"

namespace mla::sm90::decode {

// The reference maximum of a row is this much below its true maximum when it is set, in units of
// log2.
constexpr float kHeadroom = 7.f;

// Two warpgroups in pingpong, or a single one, compute S^T = K Q^T, the softmax, and P.
template <class C>
struct Fp8Scores {
    using LatentState = typename C::LatentState;
    using L = typename C::L;
    using T = typename C::T;
    static constexpr int N = C::N;

    const Context<C>& c;
    const KernelParams& p = c.p;
    typename C::Control& s = c.s;

    __device__ void run() {
        const int group = C::kScoreGroups == 2 ? __shfl_sync(~0u, (threadIdx.x >> 7) - 1, 0) : 0;
        const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31,
                  quad = lane & 3;
        // This lane has this token and the eighth after it. Its columns are 8 i + 2 quad and 8 i +
        // 2 quad + 1.
        const int token = warp * 16 + (lane >> 2);
        const uint32_t latent_from = swizzled<128>(token, 2 * quad);
        const uint32_t rope_from = L::kLatentBytes + swizzled<64>(token, quad);
        // With two groups, a group has every second KV tile, counted through all work items.
        LatentState ring;
        ring.advance(group);
        uint32_t kv_tiles = 0;
        PipelineCounter<kQueuedItems> queue;
        for (const WorkItem* next; (next = c.acquire(queue)); c.release(queue)) {
            const WorkItem& item = *next;
            const int begin = item.kv_tile_begin, end = item.kv_tile_end;
            const int first = c.first_row(item);
            const int seen_by_all = c.seen_by_all(item);
            if (group == 0) {
                fetch_queries(item, thread);
                if constexpr (C::kScoreGroups == 2) s.queries_ready.arrive();
            } else {
                s.queries_ready.wait(queue.count & 1);
            }
            // Factor of scores that are not in units of log2 yet.
            const float scale = L::kTokenScales ? 1.f : query_scale();
            float maximum[N / 4], sum[N / 4];
#pragma unroll
            for (int i = 0; i < N / 4; ++i) {
                maximum[i] = -INFINITY;
                sum[i] = 0.f;
            }
            for (int kv_tile = begin + (C::kScoreGroups == 2 ? (kv_tiles ^ group) & 1 : 0);
                 kv_tile < end; kv_tile += C::kScoreGroups) {
                const uint32_t number = kv_tiles + kv_tile - begin;
                float d[N / 2];
                // With five stages, this group waits only for every second use of a stage. The wait
                // is right if the use between them is over. That was five KV tiles ago, by the
                // other group. After it, the other group published the maxima of the third KV tile
                // before this one, and this group has waited for them.
                s.latent_full[ring.stage].wait(ring.phase);
                multiply(d, c.latent_stage(ring.stage), latent_from, rope_from);
                if constexpr (L::kTokenScales)
                    multiply_rope(d, c.latent_stage(ring.stage), latent_from, token);
                // True if a token that only later query tokens see has a NaN. The scores of this
                // token are then NaN in every row, even in rows that may not see it. One of a
                // lane's rows is therefore enough to find it.
                bool contaminates = false;
                if ((kv_tile + 1) * kTileTokens > seen_by_all) {
                    if (seen_by_all < item.kv_len)
                        contaminates = __any_sync(~0u, !(fabsf(d[0] + d[2]) < INFINITY));
                    const int column = kv_tile * kTileTokens + token;
#pragma unroll
                    for (int i = 0; i < N / 4; ++i) {
                        const int row = first + 8 * (i >> 1) + 2 * quad + (i & 1);
                        int limit = item.kv_len;
                        if (p.causal)
                            limit = min(limit, item.kv_len - item.q_len +
                                                   token_of(row, p.inverse_heads) + 1);
                        if (column >= limit) d[at_column(i)] = -INFINITY;
                        if (column + 8 >= limit) d[at_column(i) + 2] = -INFINITY;
                    }
                }
                TokenFactors factors[L::kTokenScales ? 2 : 1];
                if constexpr (L::kTokenScales) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        factors[e] = factors_of(c.latent_stage(ring.stage), token + 8 * e);
#pragma unroll
                        for (int i = 0; i < N / 4; ++i) {
                            float& x = d[at_column(i) + 2 * e];
                            x = fmaf(x, p.scale_log2, factors[e].log2_scale);
                        }
                    }
                }
                // The stages of the probabilities alternate, as the groups do. A group therefore
                // waits below for every use of a stage that it writes.
                static_assert(L::kProbabilityStages == 2);
                const int stage = number & 1;
                if (kv_tile > begin) adopt_other_maxima(maximum, sum, number - 1, quad);
                // After this barrier, all warps have also read the tile's tokens.
                const bool raise = sync_group_or(group, exceeds(d, maximum, scale));

                s.scores_empty[stage].wait((number >> 1 & 1) ^ 1);
                if ((kv_tile + 1) * kTileTokens > seen_by_all) {
                    const int before = kv_tile * kTileTokens,
                              tokens = min(item.kv_len - before, kTileTokens);
                    clear_tail(c.latent_stage(ring.stage), tokens, thread);
                    if (contaminates)
                        clear_hidden(c.latent_stage(ring.stage), max(seen_by_all - before, 0),
                                     tokens, warp, lane);
                    s.tail_cleared[stage].arrive();
                }
                if (raise) raise_maxima(d, maximum, sum, scale, stage, group, warp, lane);
                if (thread == 0) s.any_factor[stage] = raise;
                if constexpr (C::kScoreGroups == 2) s.maxima_published[group].arrive();
                if constexpr (L::kTokenScales)
                    scaled_exponentials(d, maximum, sum, factors);
                else
                    exponentials(d, maximum, sum, scale);
                store_probabilities(d, probabilities(stage), warp, lane);
                ptx::fence_proxy_async();
                __syncwarp();
                // The lanes that wrote factors arrive. They arrive for the other lanes'
                // probabilities, too.
                if (lane < 4) s.scores_full[stage].arrive();
                ring.advance(C::kScoreGroups);
            }
            kv_tiles += end - begin;
            // The last KV tile's maxima are waited for, too. No phase is therefore left out, and
            // all sums are relative to the same maxima.
            if (begin < end && ((kv_tiles ^ group) & 1) == 0)
                adopt_other_maxima(maximum, sum, kv_tiles - 1, quad);

            combine_columns(sum, &s.sum_of_warp[group * 4 + warp][2 * quad], lane,
                            [](float x, float y) { return x + y; });
            if (group == 1) {
                s.sums_ready.arrive();
                continue;
            }
            sync_group(0);
            if constexpr (C::kScoreGroups == 2) s.sums_ready.wait(queue.count & 1);
            s.stats_empty.wait((queue.count & 1) ^ 1);
            if (thread < N) publish(item, first, thread);
        }
    }

  private:
    // True if a score is so far above its row's reference maximum that the maximum has to be
    // raised.
    __device__ __forceinline__ static bool exceeds(const float (&d)[N / 2],
                                                   const float (&maximum)[N / 4], float scale) {
        bool found = false;
#pragma unroll
        for (int i = 0; i < N / 4; ++i)
            found |= fmaxf(d[at_column(i)], d[at_column(i) + 2]) * scale >
                     maximum[i] + (kHeadroom + kLazyMaximum);
        return found;
    }

    // Turns scores into probabilities, and adds these to their rows' sums.
    __device__ __forceinline__ static void exponentials(float (&d)[N / 2],
                                                        const float (&maximum)[N / 4],
                                                        float (&sum)[N / 4], float scale) {
#pragma unroll
        for (int i = 0; i < N / 4; ++i) {
            const float offset = offset_of(maximum[i]);
            float &x = d[at_column(i)], &y = d[at_column(i) + 2];
            x = ptx::ex2_approx(fmaf(x, scale, -offset));
            y = ptx::ex2_approx(fmaf(y, scale, -offset));
            sum[i] += x + y;
        }
    }

    // The terms that a token's scale adds to its scores and probabilities.
    struct TokenFactors {
        float log2_scale, inverse;
        uint32_t sign;
    };

    // A scale below 2^-80 counts as one of 2^-80 in the softmax, so that sums stay finite. The
    // token's values are then multiplied by 2^-80 instead. The scale of a token that no row sees
    // may be NaN, but the terms are finite.
    __device__ __forceinline__ static TokenFactors factors_of(uint32_t stage, int token) {
        const float scale = token_scale(stage, token),
                    magnitude = fminf(fmaxf(fabsf(scale), 0x1p-80f), 0x1p125f);
        return {ptx::lg2_approx(magnitude), ptx::rcp_approx(magnitude),
                __float_as_uint(scale) & 0x80000000};
    }

    __device__ __forceinline__ static float token_scale(uint32_t stage, int token) {
        return ptx::ld_shared_f32(stage + L::kScalesOffset + token * L::kScaleBytes);
    }

    // Turns scores into products of probabilities and the tokens' scales. Adds the probabilities
    // to their rows' sums.
    __device__ __forceinline__ static void scaled_exponentials(float (&d)[N / 2],
                                                               const float (&maximum)[N / 4],
                                                               float (&sum)[N / 4],
                                                               const TokenFactors (&factors)[2]) {
#pragma unroll
        for (int i = 0; i < N / 4; ++i) {
            const float offset = offset_of(maximum[i]);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& x = d[at_column(i) + 2 * e];
                x = ptx::ex2_approx(x - offset);
                sum[i] = fmaf(x, factors[e].inverse, sum[i]);
                x = __uint_as_float(__float_as_uint(x) ^ factors[e].sign);
            }
        }
    }

    // Publishes the maximum and the sum of a work item's row for the output, and writes its
    // log-sum-exp if it is the only split.
    __device__ __forceinline__ void publish(const WorkItem& item, int first, int row) const {
        float total = 0.f;
#pragma unroll
        for (int i = 0; i < 4 * C::kScoreGroups; ++i) total += s.sum_of_warp[i][row];
        const float reference = s.reference[row];
        s.maximum[row] = reference;
        s.sum[row] = total;
        s.inverse[row] = c.inverse_of(total);
        if (item.splits == 1 && row < c.rows(item))
            write_lse(p, first + row, item.q_begin, log2_sum_exp2(reference, total));
        s.stats_full.arrive();
    }

    // Synchronises one group of the scores. The numbers of barriers have to be constants in the
    // instructions.
    __device__ static void sync_group(int group) {
        if (group == 0)
            ScoresBarrier::sync();
        else
            SecondScoresBarrier::sync();
    }

    __device__ static bool sync_group_or(int group, bool own) {
        return group == 0 ? ScoresBarrier::sync_or(own) : SecondScoresBarrier::sync_or(own);
    }

    __device__ uint32_t probabilities(int stage) const {
        return c.base + L::kProbabilityOffset + stage * L::kProbabilityBytes;
    }

    // The larger of `top` and the magnitudes of two finite values of bf16, as bits.
    __device__ static uint32_t raise_magnitude(uint32_t top, uint32_t two) {
        const uint32_t low = two & 0x7fff, high = two >> 16 & 0x7fff, infinity = 0x7f80;
        if (low < infinity) top = max(top, low);
        if (high < infinity) top = max(top, high);
        return top;
    }

    // Fetches the queries of a work item, as f16. Called by the first group of the scores, when all
    // MMAs with the last work item's queries are done.
    __device__ void fetch_queries(const WorkItem& item, int thread) const {
        const int warp = thread >> 5, lane = thread & 31;
        const int first = c.first_row(item), valid = c.rows(item);
        if (thread < N) s.reference[thread] = -INFINITY;
        // Each lane moves two values at a time to the place where the instructions look for them.
#pragma unroll 1
        for (int r = warp; r < N; r += 4) {
            const int row = first + r, token = token_of(row, p.inverse_heads),
                      head = row - token * p.heads;
            const char* latent =
                static_cast<const char*>(p.q_latent) +
                ((item.q_begin + token) * p.q_latent_token_stride + head * p.q_latent_head_stride) *
                    2 +
                lane * 4;
            const char* rope =
                static_cast<const char*>(p.q_rope) +
                ((item.q_begin + token) * p.q_rope_token_stride + head * p.q_rope_head_stride) * 2 +
                lane * 4;
            const uint32_t to = c.base + swizzled<128>(r, lane & 7);
            const uint32_t latent_to = to + (lane >> 3 & 1) * L::kQueryPanelBytes + (lane >> 4) * 4;
#pragma unroll
            for (int i = 0; i < 8; ++i)
                ptx::cp_async_4(latent_to + (i >> 1) * (2 * L::kQueryPanelBytes) + (i & 1) * 8,
                                r < valid ? latent + i * 128 : p.q_latent, r < valid);
            ptx::cp_async_4(to + 8 * L::kQueryPanelBytes + (lane >> 3) * 4,
                            r < valid ? rope : p.q_rope, r < valid);
        }
        ptx::cp_async_wait_all();
        if constexpr (kScaled) {
            sync_group(0);
            uint32_t top = 0;
#pragma unroll 4
            for (int i = thread; i < kScaledBytes / 16; i += 128) {
                const uint4 v = ptx::ld_shared_v4(c.base + i * 16);
                top = raise_magnitude(
                    raise_magnitude(raise_magnitude(raise_magnitude(top, v.x), v.y), v.z), v.w);
            }
            top = __reduce_max_sync(~0u, top);
            if (lane == 0) s.query_top[warp] = top;
            sync_group(0);
            const float factor = __int_as_float((127 + query_shift()) << 23);
#pragma unroll 4
            for (int i = thread; i < kScaledBytes / 16; i += 128) {
                const uint4 v = ptx::ld_shared_v4(c.base + i * 16);
                ptx::st_shared_v4(c.base + i * 16,
                                  make_uint4(scaled(v.x, factor), scaled(v.y, factor),
                                             scaled(v.z, factor), scaled(v.w, factor)));
            }
        }
        ptx::fence_proxy_async();
        sync_group(0);
    }

    // The exponent of the power of two that brings the largest query to 2^14 or more, and below
    // 2^15. It is at most 100.
    __device__ int query_shift() const {
        const uint32_t top =
            max(max(s.query_top[0], s.query_top[1]), max(s.query_top[2], s.query_top[3]));
        return top == 0 ? 0 : min(127 + 14 - int(top >> 7), 100);
    }

    // The factor that brings scores to units of log2, once the queries are there.
    __device__ float query_scale() const {
        if constexpr (kScaled) return p.scale_log2 * unshift();
        return p.scale_log2;
    }

    // The factor that takes the queries' power of two back.
    __device__ float unshift() const {
        if constexpr (kScaled) return __int_as_float((127 - query_shift()) << 23);
        return 1.f;
    }

    // Two values of bf16, multiplied, as f16.
    __device__ static uint32_t scaled(uint32_t two, float factor) {
        return ptx::cvt_rn_x2<__half>(__uint_as_float(two << 16) * factor,
                                      __uint_as_float(two & 0xffff0000) * factor);
    }

    // Waits until the other group of the scores has published the maxima of KV tile `number`, and
    // adopts those that it has raised.
    __device__ void adopt_other_maxima(float (&maximum)[N / 4], float (&sum)[N / 4],
                                       uint32_t number, int quad) const {
        if constexpr (C::kScoreGroups == 2) {
            s.maxima_published[number & 1].wait(number >> 1 & 1);
            if (s.any_factor[number & 1]) take_raised(maximum, sum, 2 * quad, nullptr);
        }
    }

    // Reads the current reference maxima of this lane's columns, and multiplies their sums by the
    // factors of the last rise. Also writes these factors to `factor`, unless it is null.
    __device__ void take_raised(float (&maximum)[N / 4], float (&sum)[N / 4], int column,
                                float* factor) const {
#pragma unroll
        for (int i = 0; i < N / 4; i += 2) {
            const float2 by =
                *reinterpret_cast<const float2*>(&s.raised_by[column + columns_before(i)]);
            const float2 raised =
                *reinterpret_cast<const float2*>(&s.reference[column + columns_before(i)]);
            maximum[i] = raised.x;
            maximum[i + 1] = raised.y;
            sum[i] *= by.x;
            sum[i + 1] *= by.y;
            if (factor) *reinterpret_cast<float2*>(factor + columns_before(i)) = by;
        }
    }

    // The first of the two accumulators that lie in a lane's i-th column. The other one, for the
    // eighth token after this one's, is two further.
    __device__ static constexpr int at_column(int i) { return 4 * (i >> 1) + (i & 1); }

    // d = K Q^T for a KV tile. A step takes 64 values: 16 bytes of each of the lane's two
    // tokens. If tokens have scales, only latent values are multiplied here.
    __device__ void multiply(float (&d)[N / 2], uint32_t stage, uint32_t latent_from,
                             uint32_t rope_from) const {
        struct Words {
            uint4 low, high;
        };
        const auto load = [&](int step) -> Words {
            if (step == 8)
                return {ptx::ld_shared_v4(stage + rope_from),
                        ptx::ld_shared_v4(stage + rope_from + 512)};
            const uint32_t from =
                stage + (step >> 1) * L::kGroupBytes + (latent_from ^ ((step & 1) << 4));
            return {ptx::ld_shared_v4(from), ptx::ld_shared_v4(from + 1024)};
        };
        // Each MMA's operand is converted while earlier MMAs are in flight. A warp that issues an
        // MMA waits until the earlier ones are nearly done.
        constexpr int buffers = 3;
        uint32_t a[buffers][4];
        Words words = load(0);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            Words following = words;
            if (step < kSteps - 1) following = load(step + 1);
            const uint32_t low[4] = {words.low.x, words.low.y, words.low.z, words.low.w};
            const uint32_t high[4] = {words.high.x, words.high.y, words.high.z, words.high.w};
            const uint64_t b = ptx::wgmma_descriptor(c.base + step * L::kQueryPanelBytes);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int mma = 4 * step + i;
                if (mma >= buffers) ptx::wgmma_wait_group<buffers - 1>();
                uint32_t* own = a[mma % buffers];
                const uint2 l = ptx::cvt_f16x4_e4m3x4(low[i]), h = ptx::cvt_f16x4_e4m3x4(high[i]);
                own[0] = l.x;
                own[1] = h.x;
                own[2] = l.y;
                own[3] = h.y;
                ptx::wgmma_fence();
                ptx::WgmmaFromRegisters<__half, N>::run(d, own, b + 2 * i, mma > 0);
                ptx::wgmma_commit_group();
            }
            words = following;
        }
        ptx::wgmma_wait_group<0>();
    }

    // d = s d + K Q^T for the rotary keys of a KV tile, of bf16. A lane has 32 bytes of each of its
    // two tokens. Queries of f16 are multiplied by keys that are converted to f16.
    __device__ void multiply_rope(float (&d)[N / 2], uint32_t stage, uint32_t latent_from,
                                  int token) const {
        const float scale[2] = {token_scale(stage, token) * unshift(),
                                token_scale(stage, token + 8) * unshift()};
#pragma unroll
        for (int i = 0; i < N / 4; ++i) {
            d[at_column(i)] *= scale[0];
            d[at_column(i) + 2] *= scale[1];
        }
        const uint64_t b = ptx::wgmma_descriptor(c.base + 8 * L::kQueryPanelBytes);
        uint32_t a[4][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t from = stage + L::kLatentBytes + (latent_from ^ (half << 4));
            const uint4 low = ptx::ld_shared_v4(from), high = ptx::ld_shared_v4(from + 1024);
            const uint32_t words[2][4] = {{low.x, high.x, low.y, high.y},
                                          {low.z, high.z, low.w, high.w}};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t* own = a[2 * half + i];
#pragma unroll
                for (int word = 0; word < 4; ++word)
                    own[word] = kScaled ? words[i][word] : scaled(words[i][word], 1.f);
                ptx::wgmma_fence();
                ptx::WgmmaFromRegisters<T, N>::run(d, own, b + 2 * (2 * half + i), 1);
                ptx::wgmma_commit_group();
            }
        }
        ptx::wgmma_wait_group<0>();
    }

    // Zeroes the latent values of tokens past the end. Memory may hold anything there, and 0 * NaN
    // is NaN.
    __device__ void clear_tail(uint32_t stage, int tokens, int thread) const {
#pragma unroll 1
        for (int i = tokens * 8 + thread; i < kTileTokens * 8; i += 128) {
#pragma unroll
            for (int group = 0; group < 4; ++group)
                ptx::st_shared_v4(stage + group * L::kGroupBytes + i * 16, make_uint4(0, 0, 0, 0));
        }
    }

    // Clears the NaN among the latent values of a warp's tokens from `begin` to `end`. A row that
    // sees these tokens already has NaN in its scores. clear_tail clears the places behind the last
    // token.
    __device__ void clear_hidden(uint32_t stage, int begin, int end, int warp, int lane) const {
        // Without this, values that depend on these would be computed earlier, and spilled.
        asm volatile("" : "+r"(warp), "+r"(lane));
        const int last = min(end, warp * 16 + 16);
#pragma unroll 1
        for (int token = max(begin, warp * 16); token < last; ++token)
            clear_not_finite<__nv_fp8_e4m3>(stage + (lane >> 3) * L::kGroupBytes + token * 128 +
                                            (lane & 7) * 16);
    }

    // Reduces the columns over the eight lanes that share them, and writes the results to `to`. In
    // each step, two lanes divide their columns between them. If only one column is left, both have
    // it.
    template <int distance = 4, int count, typename Combine>
    __device__ static void combine_columns(const float (&value)[count], float* to, int lane,
                                           Combine combine) {
        if constexpr (distance < 32) {
            constexpr int kept = count > 1 ? count / 2 : 1;
            const bool upper = count > 1 && lane & distance;
            float some[kept];
#pragma unroll
            for (int i = 0; i < kept; ++i) {
                const float sent = count == 1 || upper ? value[i] : value[i + count / 2];
                some[i] = combine(upper ? value[i + count / 2] : value[i],
                                  __shfl_xor_sync(~0u, sent, distance));
            }
            combine_columns<2 * distance>(some, upper ? to + columns_before(kept) : to, lane,
                                          combine);
        } else if constexpr (count == 2) {
            *reinterpret_cast<float2*>(to) = make_float2(value[0], value[1]);
        } else {
            static_assert(count == 1 && N <= 32);
            if (N == 32 || lane < 16) *to = value[0];
        }
    }

    // Distance from the column of a lane's first value to that of its i-th.
    __device__ static constexpr int columns_before(int i) { return 8 * (i >> 1) + (i & 1); }

    // Raises the reference maxima of rows whose scores demand it, and multiplies their sums by the
    // factors of the rise. Called by all four warps of a group. One thread computes a row's maximum
    // for all lanes.
    __device__ void raise_maxima(const float (&d)[N / 2], float (&maximum)[N / 4],
                                 float (&sum)[N / 4], float scale, int stage, int group, int warp,
                                 int lane) const {
        const int thread = warp * 32 + lane;
        // The asm hides that the output warpgroups have the same number. The compiler would
        // otherwise compute it before the roles part, and spill it.
        int column = 2 * (lane & 3);
        asm volatile("" : "+r"(column));
        float top[N / 4];
#pragma unroll
        for (int i = 0; i < N / 4; ++i) top[i] = fmaxf(d[at_column(i)], d[at_column(i) + 2]);
        combine_columns(top, &s.top_of_warp[warp][column], lane,
                        [](float x, float y) { return fmaxf(x, y); });
        sync_group(group);
        if (thread < N) {
            const float x = fmaxf(s.top_of_warp[0][thread], s.top_of_warp[1][thread]),
                        y = fmaxf(s.top_of_warp[2][thread], s.top_of_warp[3][thread]);
            const float of_row = fmaxf(x, y) * scale;
            const float reference = s.reference[thread];
            const bool rises = of_row > reference + (kHeadroom + kLazyMaximum);
            s.raised_by[thread] = rises ? ptx::ex2_approx(reference - (of_row - kHeadroom)) : 1.f;
            if (rises) s.reference[thread] = of_row - kHeadroom;
        }
        sync_group(group);
        // The threads that then arrive for the output write the factors.
        take_raised(maximum, sum, column,
                    warp == 0 && lane < 4 ? &s.factor[stage][column] : nullptr);
    }

    // Writes P as a K-major panel. A row of the panel is a query row, with 64 tokens. The rows of
    // the accumulators are tokens.
    __device__ static void store_probabilities(const float (&d)[N / 2], uint32_t tile, int warp,
                                               int lane) {
        const int row = (lane >> 4) * 8 + (lane & 7), chunk = 2 * warp + (lane >> 3 & 1);
#pragma unroll
        for (int i = 0; i < N / 16; ++i)
            ptx::stmatrix_x4_trans(tile + swizzled<128>(16 * i + row, chunk),
                                   ptx::cvt_rn_x2<__half>(d[8 * i], d[8 * i + 1]),
                                   ptx::cvt_rn_x2<__half>(d[8 * i + 2], d[8 * i + 3]),
                                   ptx::cvt_rn_x2<__half>(d[8 * i + 4], d[8 * i + 5]),
                                   ptx::cvt_rn_x2<__half>(d[8 * i + 6], d[8 * i + 7]));
    }

    static constexpr bool kScaled = std::is_same_v<T, __nv_bfloat16>;
    // Steps of 64 values that are multiplied as f16, and the bytes of their queries.
    static constexpr int kSteps = L::kTokenScales ? 8 : 9,
                         kScaledBytes = kSteps * L::kQueryPanelBytes;
};

}  // namespace mla::sm90::decode
