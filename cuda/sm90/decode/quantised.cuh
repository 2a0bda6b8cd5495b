// Dense absorbed MLA decode for Hopper over an e4m3 cache.
//
// The cache stays as it is in shared memory, and each warp converts in registers what it multiplies
// next: both products take the cache as the operand A, which may come from registers.
//
//   load     as in kernel.cuh, but for warp 1, which only divides the imaginary batch: those who need the queries fetch them;
//   scores   S^T = K Q^T (64 tokens x N): a warp has sixteen tokens, softmax, P to shared memory;
//   output   two warpgroups, each 256 of the 512 latent values: O^T = O^T + V^T P^T.
//
// With 32 rows and fewer, two warpgroups take turns with the scores, block by block: one computes
// products during the other's softmax. A block's reference maxima follow from those of the block
// before, which the other group has. So a group decides what its block raises when the other has
// decided, and each sums for itself. The first fetches the queries and adds the sums up. Of a piece
// of four blocks:
//
//   scores 0   [fetch Q][Q K0 ][decide 0, softmax 0][Q K2 ]   [decide 2, softmax 2]   [sums]
//   scores 1            [Q K1 ]        [decide 1, softmax 1][Q K3 ]    [decide 3, softmax 3]
//   output                                 [V0 P0 ] [V1 P1 ]      [V2 P2 ]    [V3 P3 ]
//
// Blocks are counted through all pieces. Even ones are the first group's and have the first slot of
// the probabilities, odd ones the second's. The barriers are those of kernel.cuh, less those of
// queries and of the rope tile, and:
//
//   latent_full[i], latent_empty[i]   a block: the copy engine; a lane of each output warp, as soon as it has read it
//   scores_full[i], scores_empty[i]   a block's probabilities: four lanes of each warp of its group; all of the output
//   decided[i]                        all of the group whose block it is. The other group waits for each of them, so that it knows what was raised
//                                     and that everybody has read what it raises next
//   tail_cleared[i]                   all of the group, each for the zeros that it wrote, only where tokens end within a block
//   queries_ready                     all of the first group, for each piece: also that its own reads of the last piece's sums are done
//   sums_ready                        all of the second group, for each piece: also that it needs neither the queries nor the reference maxima
//                                     any longer
//
// e4m3 is exact in f16, so both products are of f16 whatever the queries' type. Queries of bf16 are
// multiplied by a power of two that brings the largest of a tile below 2^15, which the scale of the
// scores takes back: what f16 cannot hold of the others is less than 2^-39 of the largest, and f32
// sums do not hold that either.
//
// Which values of the summed dimension an instruction takes together is free, as long as both
// operands agree. So a lane reads 16 bytes of a token at a time, and the queries are permuted to
// fit: of 128 values, lane q of a quad has 32 q .. 32 q + 31, and instruction i takes values 4 i ..
// 4 i + 3 of each lane. For the output a lane reads 8 latent values of four tokens, of which each
// instruction takes two: then it has eight neighbouring values of an output row.
//
// The reference maximum lies 7 below a row's maximum, so that small probabilities keep their bits
// in f16: they reach 2^7, and 2^15 before the reference is raised. Whether it has to be is decided
// by all warps together, and only then are maxima compared between lanes and warps.
#pragma once

#include "kernel.cuh"

namespace mla::sm90::decode {

// The reference maximum of a row is this much below its true maximum when it is set, in units of
// log2.
constexpr float kHeadroom = 7.f;

// Vectors of the output of an e4m3 cache: as those of the transposed output, but a float4 is of two
// neighbouring rows at one latent value, and at the next.
struct QuantisedFragments : GroupsOfEight {
    template <typename T>
    __device__ static TwoRows<T> place(const OutputRows<T>& out, int group, int thread) {
        const int row = kGroupRows * group + 2 * rows_of(thread);
        return {out, row, row + 1, (thread >> 5) * 64 + (thread >> 2 & 7) * 8};
    }
    template <typename T>
    __device__ static void write(const OutputRows<T>&, const TwoRows<T>& to, int, int vector,
                                 bool own, const Vector& v) {
#pragma unroll
        for (int i = 0; i < kVectorTiles; ++i)
            to.write(2 * (vector * kVectorTiles + i), own, v.tile(i));
    }
};

template <typename T, int N, int pair>
struct QuantisedKernel : Kernel<T, N, pair, QuantisedLayout<N>> {
    using L = QuantisedLayout<N>;
    using Base = Kernel<T, N, pair, L>;
    using Base::at, Base::base, Base::p, Base::s, Base::latent_slot;
    using typename Base::Queue;
    using Slots = Ring<L::kLatentSlots>;

    static constexpr int kScoreGroups = L::kScoreGroups, kScoreThreads = 128 * kScoreGroups;
    static constexpr int kThreads = 384 + kScoreThreads;
    static constexpr int kEvenRegisters = even_registers(kThreads);
    static constexpr int kLoadRegisters = kScoreGroups == 2 ? 48 : 40,
                         kScoreRegisters = kScoreGroups == 2 ? 88 : 120;
    static constexpr int kOutputRegisters = kScoreGroups == 2 ? 128 : 176;
    static_assert(kLoadRegisters + kScoreGroups * kScoreRegisters + 2 * kOutputRegisters <=
                  (3 + kScoreGroups) * kEvenRegisters);

    // Barriers of one group of the scores. Their numbers are constants of the instructions.
    static constexpr int kSecondScoresBarrier = kScoresBarrier + 1;
    __device__ static void meet(int group) {
        if (group == 0)
            ptx::bar_sync(kScoresBarrier, 128);
        else
            ptx::bar_sync(kSecondScoresBarrier, 128);
    }
    __device__ static bool meet_any(int group, bool own) {
        return group == 0 ? ptx::bar_red_or(kScoresBarrier, 128, own)
                          : ptx::bar_red_or(kSecondScoresBarrier, 128, own);
    }

    __device__ QuantisedKernel(const KernelParams& params, uint32_t address,
                               typename L::Small& small, int rank, int of_team)
        : Base{params, address, small, rank, of_team} {}

    __device__ uint32_t probabilities(int slot) const {
        return base + L::kProbabilityOffset + slot * L::kProbabilityBytes;
    }

    __device__ void initialise() const {
#pragma unroll
        for (int i = 0; i < L::kLatentSlots; ++i) {
            ptx::mbarrier_init(at(s.latent_full[i]), 1);
            ptx::mbarrier_init(at(s.latent_empty[i]), 8);
        }
#pragma unroll
        for (int i = 0; i < L::kProbabilitySlots; ++i) {
            ptx::mbarrier_init(at(s.scores_full[i]), 16);
            ptx::mbarrier_init(at(s.scores_empty[i]), kOutputThreads);
            ptx::mbarrier_init(at(s.tail_cleared[i]), 128);
        }
        if constexpr (kScoreGroups == 2) {
            ptx::mbarrier_init(at(s.queries_ready), 128);
            ptx::mbarrier_init(at(s.sums_ready), 128);
            ptx::mbarrier_init(at(s.decided[0]), 128);
            ptx::mbarrier_init(at(s.decided[1]), 128);
        }
        this->initialise_queue(32 * (1 + 8) + kScoreThreads);  // warp 0, output, scores
        ptx::mbarrier_init(at(s.lens_full), 32);
        s.owed.last = s.owed.first = false;
        ptx::mbarrier_init(at(s.table_full), 32);
        ptx::mbarrier_init(at(s.stats_full), N);
        ptx::mbarrier_init(at(s.stats_empty), kOutputThreads);
        ptx::fence_mbarrier_init();
    }

    __device__ void prefetch_descriptors(const TensorMaps& maps, int lane) const {
        if (lane == 0) ptx::prefetch_tensormap(&maps.cache);
        if (lane == 1) ptx::prefetch_tensormap(&maps.cache_pairs);
    }

    // ----------------------------------------------------------------------------------------------------
    // load

    __device__ void load_cache(const TensorMaps& maps, const Schedule& schedule,
                               const Piece& first_piece) const {
        Slots ring;
        this->load_blocks(
            schedule, first_piece,
            [&](auto whole, bool, int tokens, const int (&page)[4], const int (&first)[4]) {
                const ptx::CachePolicy policy = this->cache_policy();
                const uint32_t full = at(s.latent_full[ring.slot]), slot = latent_slot(ring.slot),
                               rope = slot + L::kLatentBytes;
                ptx::mbarrier_wait(at(s.latent_empty[ring.slot]), ring.phase ^ 1);
                this->wait_for_copies(ring);
                ptx::mbarrier_arrive_expect_tx(full, tokens * (kLatent + kRope));
                if constexpr (whole.value) {
                    ptx::cp_async_bulk_tensor(&maps.cache_pairs, slot, full, policy, 0, first[0], 0,
                                              page[0]);
                    ptx::cp_async_bulk_tensor(&maps.cache, rope, full, policy, kLatent, first[0],
                                              page[0]);
                } else {
#pragma unroll 1
                    for (int i = 0; i < 4; ++i) {
                        if (i * 16 >= tokens) break;
                        const int f = i == 0   ? first[0]
                                      : i == 1 ? first[1]
                                      : i == 2 ? first[2]
                                               : first[3];
                        const int z = i == 0   ? page[0]
                                      : i == 1 ? page[1]
                                      : i == 2 ? page[2]
                                               : page[3];
#pragma unroll 1
                        for (int group = 0; group < 4; ++group)
                            ptx::cp_async_bulk_tensor(&maps.cache_pairs,
                                                      slot + group * L::kGroupBytes + i * 2048,
                                                      full, policy, 0, f, group, z);
                        ptx::cp_async_bulk_tensor(&maps.cache, rope + i * 1024, full, policy,
                                                  kLatent, f, z);
                    }
                }
                ring.advance(1);
            });
    }

    __device__ void prefetch_block(const TensorMaps& maps, typename Base::Place block) const {
        const ptx::CachePolicy policy = ptx::createpolicy_evict_first();
        if (this->half == 0)
            ptx::cp_async_bulk_prefetch_tensor(&maps.cache_pairs, policy, 0, block.token, 0,
                                               block.page);
        if (this->half == pair - 1)
            ptx::cp_async_bulk_prefetch_tensor(&maps.cache, policy, kLatent, block.token,
                                               block.page);
    }

    // Queries are fetched by those who need them.
    __device__ void load_queries(const TensorMaps&) const {}

    // --------------------------------------------------------------------------------------------------
    // scores

    // The larger of `top` and the magnitudes of two finite values of bf16, as bits.
    __device__ static uint32_t raise_magnitude(uint32_t top, uint32_t two) {
        const uint32_t low = two & 0x7fff, high = two >> 16 & 0x7fff, infinity = 0x7f80;
        if (low < infinity) top = max(top, low);
        if (high < infinity) top = max(top, high);
        return top;
    }

    // Fetches the queries of a piece, as f16. Called by the first group of the scores, when all
    // products with the last piece's queries are done.
    __device__ void fetch_queries(const Piece& piece, int thread) const {
        const int warp = thread >> 5, lane = thread & 31;
        const int first = this->first_row(piece), valid = this->rows(piece);
        if (thread < N) s.reference[thread] = -INFINITY;
        // Two values at a time, to where the instructions look for them.
#pragma unroll 1
        for (int r = warp; r < N; r += 4) {
            const int row = first + r, token = token_of(row, p.inverse_heads),
                      head = row - token * p.heads;
            const char* latent = static_cast<const char*>(p.q_latent) +
                                 ((piece.q_begin + token) * p.q_latent_token_stride +
                                  head * p.q_latent_head_stride) *
                                     2 +
                                 lane * 4;
            const char* rope =
                static_cast<const char*>(p.q_rope) +
                ((piece.q_begin + token) * p.q_rope_token_stride + head * p.q_rope_head_stride) *
                    2 +
                lane * 4;
            const uint32_t to = base + swizzled<128>(r, lane & 7);
            const uint32_t latent_to = to + (lane >> 3 & 1) * L::kQueryTileBytes + (lane >> 4) * 4;
#pragma unroll
            for (int i = 0; i < 8; ++i)
                ptx::cp_async_4(latent_to + (i >> 1) * (2 * L::kQueryTileBytes) + (i & 1) * 8,
                                r < valid ? latent + i * 128 : p.q_latent, r < valid);
            ptx::cp_async_4(to + 8 * L::kQueryTileBytes + (lane >> 3) * 4,
                            r < valid ? rope : p.q_rope, r < valid);
        }
        ptx::cp_async_wait_all();
        if constexpr (kScaled) {
            meet(0);
            uint32_t top = 0;
#pragma unroll 4
            for (int i = thread; i < L::kQueryBytes / 16; i += 128) {
                const uint4 v = ptx::ld_shared_v4(base + i * 16);
                top = raise_magnitude(
                    raise_magnitude(raise_magnitude(raise_magnitude(top, v.x), v.y), v.z), v.w);
            }
            top = __reduce_max_sync(~0u, top);
            if (lane == 0) s.query_top[warp] = top;
            meet(0);
            const float factor = __int_as_float((127 + query_shift()) << 23);
#pragma unroll 4
            for (int i = thread; i < L::kQueryBytes / 16; i += 128) {
                const uint4 v = ptx::ld_shared_v4(base + i * 16);
                ptx::st_shared_v4(base + i * 16,
                                  make_uint4(scaled(v.x, factor), scaled(v.y, factor),
                                             scaled(v.z, factor), scaled(v.w, factor)));
            }
        }
        ptx::fence_proxy_async();
        meet(0);
    }

    // The power of two that brings the largest query below 2^15; 2^100 for the smallest of all.
    __device__ int query_shift() const {
        const uint32_t top =
            max(max(s.query_top[0], s.query_top[1]), max(s.query_top[2], s.query_top[3]));
        return top == 0 ? 0 : min(127 + 14 - int(top >> 7), 100);
    }
    // What scores must be multiplied by, in units of log2, when the queries are there.
    __device__ float query_scale() const {
        if constexpr (kScaled) return p.scale_log2 * __int_as_float((127 - query_shift()) << 23);
        return p.scale_log2;
    }

    // Two values of bf16, multiplied, as f16.
    __device__ static uint32_t scaled(uint32_t two, float factor) {
        return ptx::cvt_rn_x2<__half>(__uint_as_float(two << 16) * factor,
                                      __uint_as_float(two & 0xffff0000) * factor);
    }

    static constexpr bool kScaled = std::is_same_v<T, __nv_bfloat16>;

    __device__ void scores() {
        const int group = kScoreGroups == 2 ? __shfl_sync(~0u, (threadIdx.x >> 7) - 1, 0) : 0;
        const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31,
                  quad = lane & 3;
        // This lane's tokens are this one and the eighth after it; its columns 8 i + 2 quad and the
        // next.
        const int token = warp * 16 + (lane >> 2);
        const uint32_t latent_from = swizzled<128>(token, 2 * quad);
        const uint32_t rope_from = L::kLatentBytes + swizzled<64>(token, quad);
        // A group's blocks are every second one, of all pieces together.
        Slots slots;
        slots.advance(group);
        uint32_t blocks = 0;
        Queue queue;
        for (const Piece* next; (next = this->take(queue)); this->give_back(queue)) {
            const Piece& piece = *next;
            const int begin = piece.block_begin, end = piece.block_end;
            const int first = this->first_row(piece);
            const int no_mask_before = p.causal ? piece.kv_len - piece.q_len + 1 : piece.kv_len;
            if (group == 0) {
                fetch_queries(piece, thread);
                if constexpr (kScoreGroups == 2) ptx::mbarrier_arrive(at(s.queries_ready));
            } else {
                ptx::mbarrier_wait(at(s.queries_ready), queue.pieces & 1);
            }
            const float scale = query_scale();
            float maximum[N / 4], sum[N / 4];
#pragma unroll
            for (int i = 0; i < N / 4; ++i) {
                maximum[i] = -INFINITY;
                sum[i] = 0.f;
            }
            for (int block = begin + (kScoreGroups == 2 ? (blocks ^ group) & 1 : 0); block < end;
                 block += kScoreGroups) {
                const uint32_t number = blocks + block - begin;
                float d[N / 2];
                // Of five slots a group waits for every second use. The use before this one was
                // five blocks ago, and over: the other group decided about a block after that, the
                // third one before this, which has been waited for.
                ptx::mbarrier_wait(at(s.latent_full[slots.slot]), slots.phase);
                multiply(d, latent_slot(slots.slot), latent_from, rope_from);
                if ((block + 1) * kBlock > no_mask_before) {
                    const int column = block * kBlock + token;
#pragma unroll
                    for (int i = 0; i < N / 4; ++i) {
                        const int row = first + 8 * (i >> 1) + 2 * quad + (i & 1);
                        int limit = piece.kv_len;
                        if (p.causal)
                            limit = min(limit, piece.kv_len - piece.q_len +
                                                   token_of(row, p.inverse_heads) + 1);
                        if (column >= limit) d[at_column(i)] = -INFINITY;
                        if (column + 8 >= limit) d[at_column(i) + 2] = -INFINITY;
                    }
                }
                // The slots of the probabilities take turns, as the groups do. The wait for one
                // below is the group's own, for every use of it.
                static_assert(L::kProbabilitySlots == 2);
                const int slot = number & 1;
                if (block > begin) follow_the_other(maximum, sum, number - 1, quad);
                bool raise = false;
#pragma unroll
                for (int i = 0; i < N / 4; ++i)
                    raise |= fmaxf(d[at_column(i)], d[at_column(i) + 2]) * scale >
                             maximum[i] + (kHeadroom + kLazyMaximum);
                // All warps have read the block's tokens, too.
                raise = meet_any(group, raise);

                ptx::mbarrier_wait(at(s.scores_empty[slot]), (number >> 1 & 1) ^ 1);
                const int tokens = piece.kv_len - block * kBlock;
                if (tokens < kBlock) {
                    clear_tail(latent_slot(slots.slot), tokens, thread);
                    ptx::mbarrier_arrive(at(s.tail_cleared[slot]));
                }
                if (raise) raise_maxima(d, maximum, sum, scale, slot, group, warp, lane);
                if (thread == 0) s.any_factor[slot] = raise;
                if constexpr (kScoreGroups == 2) ptx::mbarrier_arrive(at(s.decided[group]));
#pragma unroll
                for (int i = 0; i < N / 4; ++i) {
                    const float offset = offset_of(maximum[i]);
                    float &x = d[at_column(i)], &y = d[at_column(i) + 2];
                    x = ptx::ex2_approx(fmaf(x, scale, -offset));
                    y = ptx::ex2_approx(fmaf(y, scale, -offset));
                    sum[i] += x + y;
                }
                store_probabilities(d, probabilities(slot), warp, lane);
                ptx::fence_proxy_async();
                __syncwarp();
                // Those who write factors; for the others' probabilities, too.
                if (lane < 4) ptx::mbarrier_arrive(at(s.scores_full[slot]));
                slots.advance(kScoreGroups);
            }
            blocks += end - begin;
            // The last block's decision, too, is waited for: no phase is left out, and the sums are
            // all relative to the same maxima.
            if (begin < end && ((blocks ^ group) & 1) == 0)
                follow_the_other(maximum, sum, blocks - 1, quad);

            combine_columns(sum, &s.sum_of_warp[group * 4 + warp][2 * quad], lane,
                            [](float x, float y) { return x + y; });
            if (group == 1) {
                ptx::mbarrier_arrive(at(s.sums_ready));
                continue;
            }
            meet(0);
            if constexpr (kScoreGroups == 2) ptx::mbarrier_wait(at(s.sums_ready), queue.pieces & 1);
            ptx::mbarrier_wait(at(s.stats_empty), (queue.pieces & 1) ^ 1);
            if (thread < N) {
                float total = 0.f;
#pragma unroll
                for (int i = 0; i < 4 * kScoreGroups; ++i) total += s.sum_of_warp[i][thread];
                const float reference = s.reference[thread];
                s.maximum[thread] = reference;
                s.sum[thread] = total;
                s.inverse[thread] = this->inverse_of(total);
                if (piece.parts == 1 && thread < this->rows(piece))
                    write_lse(p, first + thread, piece.q_begin, log2_sum_exp2(reference, total));
                ptx::mbarrier_arrive(at(s.stats_full));
            }
        }
    }

    // Waits until the other group of the scores has decided about its block of this number, and
    // takes over what that raised.
    __device__ void follow_the_other(float (&maximum)[N / 4], float (&sum)[N / 4], uint32_t number,
                                     int quad) const {
        if constexpr (kScoreGroups == 2) {
            ptx::mbarrier_wait(at(s.decided[number & 1]), number >> 1 & 1);
            if (s.any_factor[number & 1]) take_raised(maximum, sum, 2 * quad, nullptr);
        }
    }

    // Takes over the reference maxima of this lane's columns, and multiplies their sums by what the
    // last rise says; writes that to `factor`, too, unless it is null.
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

    // The first of the two accumulators that lie in a lane's i-th column; the other, of the eighth
    // token after it, is two further.
    __device__ static constexpr int at_column(int i) { return 4 * (i >> 1) + (i & 1); }

    // d = K Q^T for a block of tokens. A step takes 64 values: 16 bytes of each of the lane's two
    // tokens.
    __device__ void multiply(float (&d)[N / 2], uint32_t slot, uint32_t latent_from,
                             uint32_t rope_from) const {
        struct Words {
            uint4 low, high;
        };
        const auto load = [&](int step) -> Words {
            if (step == 8)
                return {ptx::ld_shared_v4(slot + rope_from),
                        ptx::ld_shared_v4(slot + rope_from + 512)};
            const uint32_t from =
                slot + (step >> 1) * L::kGroupBytes + (latent_from ^ ((step & 1) << 4));
            return {ptx::ld_shared_v4(from), ptx::ld_shared_v4(from + 1024)};
        };
        // Each product's operand is converted while those before are under way: a warp that issues
        // one waits until they are nearly done.
        constexpr int buffers = 3;
        uint32_t a[buffers][4];
        Words words = load(0);
#pragma unroll
        for (int step = 0; step < 9; ++step) {
            Words following = words;
            if (step < 8) following = load(step + 1);
            const uint32_t low[4] = {words.low.x, words.low.y, words.low.z, words.low.w};
            const uint32_t high[4] = {words.high.x, words.high.y, words.high.z, words.high.w};
            const uint64_t b = ptx::wgmma_descriptor(base + step * L::kQueryTileBytes);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int product = 4 * step + i;
                if (product >= buffers) ptx::wgmma_wait_group<buffers - 1>();
                uint32_t* own = a[product % buffers];
                const uint2 l = ptx::cvt_f16x4_e4m3x4(low[i]), h = ptx::cvt_f16x4_e4m3x4(high[i]);
                own[0] = l.x;
                own[1] = h.x;
                own[2] = l.y;
                own[3] = h.y;
                ptx::wgmma_fence();
                ptx::WgmmaFromRegisters<__half, N>::run(d, own, b + 2 * i, product > 0);
                ptx::wgmma_commit_group();
            }
            words = following;
        }
        ptx::wgmma_wait_group<0>();
    }

    // Zeroes the latent values of tokens past the end: there may be anything there, and 0 * NaN is
    // NaN.
    __device__ void clear_tail(uint32_t slot, int tokens, int thread) const {
#pragma unroll 1
        for (int i = tokens * 8 + thread; i < kBlock * 8; i += 128) {
#pragma unroll
            for (int group = 0; group < 4; ++group)
                ptx::st_shared_v4(slot + group * L::kGroupBytes + i * 16, make_uint4(0, 0, 0, 0));
        }
    }

    // Combines what the eight lanes of the same columns have of them, and writes the results to
    // where `to` has these columns. At each step two lanes share the columns out; where there is
    // one left, both have it.
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
    // How far the column of a lane's i-th value lies from that of its first.
    __device__ static constexpr int columns_before(int i) { return 8 * (i >> 1) + (i & 1); }

    // Raises the reference maxima of those rows whose scores demand it, and multiplies their sums
    // by what the maxima rose. Called by all four warps of a group. A thread computes a row's, for
    // all lanes.
    __device__ void raise_maxima(const float (&d)[N / 2], float (&maximum)[N / 4],
                                 float (&sum)[N / 4], float scale, int slot, int group, int warp,
                                 int lane) const {
        const int thread = warp * 32 + lane;
        // Were it known to be what the output warpgroups have, too, it would be computed before the
        // roles part, and spilled.
        int column = 2 * (lane & 3);
        asm volatile("" : "+r"(column));
        float top[N / 4];
#pragma unroll
        for (int i = 0; i < N / 4; ++i) top[i] = fmaxf(d[at_column(i)], d[at_column(i) + 2]);
        combine_columns(top, &s.top_of_warp[warp][column], lane,
                        [](float x, float y) { return fmaxf(x, y); });
        meet(group);
        if (thread < N) {
            const float x = fmaxf(s.top_of_warp[0][thread], s.top_of_warp[1][thread]),
                        y = fmaxf(s.top_of_warp[2][thread], s.top_of_warp[3][thread]);
            const float of_row = fmaxf(x, y) * scale;
            const float reference = s.reference[thread];
            const bool rises = of_row > reference + (kHeadroom + kLazyMaximum);
            s.raised_by[thread] = rises ? ptx::ex2_approx(reference - (of_row - kHeadroom)) : 1.f;
            if (rises) s.reference[thread] = of_row - kHeadroom;
        }
        meet(group);
        // To the output, by those who then say that it is there.
        take_raised(maximum, sum, column,
                    warp == 0 && lane < 4 ? &s.factor[slot][column] : nullptr);
    }

    // Writes P as a K-major tile, row = query row, 64 tokens, from accumulators whose rows are
    // tokens.
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

    // --------------------------------------------------------------------------------------------------
    // output

    __device__ void output() {
        const int thread = threadIdx.x - 128 - kScoreThreads, lane = thread & 31, quad = lane & 3;
        // This lane's eight latent values, at token 2 quad.
        const int latent = (thread >> 5) * 64 + (lane >> 2) * 8;
        const uint32_t group = (latent >> 7) * L::kGroupBytes, chunk = latent >> 4 & 7,
                       low = latent & 8;
        const uint32_t even = group + swizzled<128>(2 * quad, chunk) + low;
        const uint32_t odd = group + swizzled<128>(2 * quad + 1, chunk) + low;
        Slots slots;
        uint32_t blocks = 0, tails = 0;  // of `tails`, a bit is the phase of a slot's barrier
        Queue queue;
        for (const Piece* next; (next = this->take(queue)); this->give_back(queue)) {
            const Piece& piece = *next;
            const int begin = piece.block_begin, end = piece.block_end;
            TransposedSums<T, N> sums;
            sums.clear();
            for (int block = begin; block < end; ++block) {
                // The slots of the probabilities take turns.
                const int slot = blocks & 1;
                ptx::mbarrier_wait(at(s.latent_full[slots.slot]), slots.phase);
                ptx::mbarrier_wait(at(s.scores_full[slot]), blocks >> 1 & 1);
                if ((block + 1) * kBlock > piece.kv_len) {
                    ptx::mbarrier_wait(at(s.tail_cleared[slot]), tails >> slot & 1);
                    tails ^= 1 << slot;
                }
                if (block > begin && s.any_factor[slot]) sums.rescale(s.factor[slot], quad);
                accumulate(sums.acc, latent_slot(slots.slot) + even, latent_slot(slots.slot) + odd,
                           probabilities(__shfl_sync(~0u, slot, 0)), s.latent_empty[slots.slot],
                           lane);
                // Each lane for what it has read itself: the factors, too.
                ptx::mbarrier_arrive(at(s.scores_empty[slot]));
                slots.advance(1);
                ++blocks;
            }
            ptx::mbarrier_wait(at(s.stats_full), queue.pieces & 1);
            if (piece.parts == 1)
                write_whole(piece, sums.acc, latent, quad);
            else
                this->deliver(piece, sums, thread);
        }
        this->template merge<QuantisedFragments>(queue, thread);
    }

    // acc += V^T P^T for a block of tokens. A step takes 16 tokens: two that lie together at `even`
    // and `odd`, and two that lie eight further on.
    __device__ void accumulate(float (&acc)[4][N / 2], uint32_t even, uint32_t odd, uint32_t tile,
                               const uint64_t& empty, int lane) const {
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
        this->free_slot(empty, lane);
        ptx::wgmma_wait_group<0>();
    }

    __device__ void write_whole(const Piece& piece, const float (&acc)[4][N / 2], int latent,
                                int quad) const {
        const OutputRows<T> out = this->output_rows(piece);
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
        ptx::mbarrier_arrive(at(s.stats_empty));
    }
};

}  // namespace mla::sm90::decode
