// The scores warpgroup: S^T = K Q^T, softmax, probabilities to shared memory.
//
// Accumulators have keys for rows and heads for columns: of a lane 4 g + q of
// warp w, d[4 i + e] is of key 16 w + g at head 8 i + 2 q + e, e = 0, 1, and
// d[4 i + 2 + e] of key 16 w + g + 8.
#pragma once

#include "../../../common/softmax.cuh"
#include "../../../common/swizzle.cuh"
#include "results.cuh"
#include "rows.cuh"

namespace mla::sm90::sparse {

// Named barriers: of one group of the scores, of the other, of both.
constexpr int kScoresBarrier = 1, kSecondScoresBarrier = 2, kAllScoresBarrier = 3;
// Probabilities are relative to a reference maximum that leaves 2^7 of
// headroom, so that small ones keep their bits in f16; it is raised when a true
// maximum has risen by 2^8 more.
constexpr float kHeadroom = 7.f;

template <typename T, int N, Format format>
struct Scores {
    using R = Rows<T, format>;
    using L = Layout<N, R>;
    using Operand = typename R::Operand;
    static constexpr int kColumns = N / 4;
    static constexpr bool kTurns = L::kScoreGroups == 2;
    // Blocks of 32 values that are converted together; with many rows registers
    // are few.
    static constexpr int kBatch = 1;

    const KernelParams& p;
    typename L::Small& s;
    uint32_t base;
    // In its group.
    int group, thread, warp, lane;

    __device__ Scores(const KernelParams& params, typename L::Small& small, uint32_t address)
        : p(params),
          s(small),
          base(address),
          group(__shfl_sync(~0u, (threadIdx.x >> 7) - 1, 0)),
          thread(threadIdx.x & 127),
          warp(__shfl_sync(~0u, thread >> 5, 0)),
          lane(thread & 31) {}

    __device__ int g() const { return lane >> 2; }
    __device__ int q() const { return lane & 3; }

    // This lane's number, in a form that keeps what is computed from it from
    // being computed before the loop over tiles, and spilled.
    __device__ int lane_again() const {
        int again = lane;
        asm volatile("" : "+r"(again));
        return again;
    }

    // Of this lane's i-th column: its head, and its first accumulator. The other,
    // of the eighth key after it, is two further.
    __device__ int head(int i) const { return 8 * (i >> 1) + (i & 1) + 2 * q(); }
    __device__ static constexpr int at(int i) { return 4 * (i >> 1) + (i & 1); }
    // The numbers of barriers are constants of the instructions.
    __device__ void meet() const {
        if (group == 0)
            ptx::bar_sync(kScoresBarrier, 128);
        else
            ptx::bar_sync(kSecondScoresBarrier, 128);
    }
    __device__ bool meet_any(bool own) const {
        return group == 0 ? ptx::bar_red_or(kScoresBarrier, 128, own)
                          : ptx::bar_red_or(kSecondScoresBarrier, 128, own);
    }
    __device__ static void meet_all() { ptx::bar_sync(kAllScoresBarrier, L::kScoreThreads); }

    struct Running {
        float sum[kColumns];
        // The reference maxima, where the other group may be raising those in
        // shared memory.
        float maximum[kTurns ? kColumns : 1];
        // What the keys' scales are multiplied by: a power of two that brings them
        // to 1 at most.
        float unit;
    };

    __device__ void run() {
        Ring<L::kSlots> ring;
        Turn<kAnnounced> tile;
        Turn<kProbabilityTiles> turn;
#pragma unroll 1
        while (true) {
            // Each item has a last announcement without keys.
            const int index = Items::first(p) + int(tile.uses - turn.uses) * Items::step();
            if (index >= p.items) break;
            if (group == 0 && thread < N) s.reference[thread] = -INFINITY;
            load_queries(Item(p, index));
            meet_all();
            Running running;
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                running.sum[c] = 0.f;
                if constexpr (kTurns) running.maximum[c] = -INFINITY;
            }
            running.unit = R::kScales ? 0x1p126f : 1.f;
            const uint32_t first = turn.uses;
#pragma unroll 1
            while (true) {
                ptx::mbarrier_wait(ptx::shared_address(&s.announced[tile.place()]), tile.phase());
                const int keys = s.keys[tile.place()];
                if (keys == 0) break;
                if (!kTurns || (turn.uses & 1) == group)
                    score(running, keys, ring, turn, turn.uses == first);
                ring.advance((keys + kSlotKeys - 1) / kSlotKeys);
                ++turn.uses;
                give_back(tile);
            }
            // The last tile's decision, too, is followed: sums are all relative to
            // the same maxima.
            if (kTurns && turn.uses != first && ((turn.uses - 1) & 1) != group)
                follow(running, turn.uses - 1);
            finish(running, tile.uses - turn.uses);
            give_back(tile);
        }
    }

    // Waits until the other group has decided about its tile, and takes over what
    // that raised.
    __device__ void follow(Running& running, uint32_t use) const {
        if constexpr (kTurns) {
            const Turn<kProbabilityTiles> before{use};
            ptx::mbarrier_wait(ptx::shared_address(&s.decided[before.place()]), before.phase());
            if (!s.any_factor[before.place()]) return;
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
            if constexpr (kTurns) {
                const float2 reference = *reinterpret_cast<const float2*>(&s.reference[head(c)]);
                running.maximum[c] = reference.x;
                running.maximum[c + 1] = reference.y;
            }
        }
    }

    // The reference maxima of two neighbouring columns.
    __device__ float2 reference_of(const Running& running, int c) const {
        if constexpr (kTurns)
            return make_float2(running.maximum[c], running.maximum[c + 1]);
        else
            return *reinterpret_cast<const float2*>(&s.reference[head(c)]);
    }

    __device__ void give_back(Turn<kAnnounced>& tile) const {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.announced_empty[tile.place()]));
        ++tile.uses;
    }

    // Fetches queries to where products look for them: nine K-major tiles of N
    // rows by 64 values. A thread has units of 32 values of one row, which nobody
    // else touches before the meeting that follows.
    __device__ void load_queries(const Item& item) const {
        constexpr int of_row = L::kScoreThreads / N, units = (kLatent + kRope) / 32;
        const int of_all = group * 128 + thread, row = of_all / of_row, first = of_all % of_row;
        const bool valid = row < item.heads;
        const char* latent = item.latent(p, valid ? row : 0);
        const char* rope = item.rope(p, valid ? row : 0);
#pragma unroll 1
        for (int unit = first; unit < units; unit += of_row) {
            const char* from = unit < 16 ? latent + unit * 64 : rope + (unit - 16) * 64;
#pragma unroll
            for (int c = 0; c < 4; ++c)
                ptx::cp_async_16(query_place(row, unit, c), from + c * 16, valid);
        }
        ptx::cp_async_wait_all();
        int shift = 0;
        if constexpr (R::kConverts) {
            if constexpr (kScalesQueries) {
                uint32_t top = 0;
#pragma unroll 1
                for (int unit = first; unit < units; unit += of_row) {
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        const uint4 v = ptx::ld_shared_v4(query_place(row, unit, c));
                        top = larger(larger(larger(larger(top, v.x), v.y), v.z), v.w);
                    }
                }
                top = max(top & 0xffff, top >> 16);
#pragma unroll
                for (int distance = 1; distance < of_row; distance *= 2)
                    top = max(top, __shfl_xor_sync(~0u, top, distance));
                // The power of two that brings the largest value below 2^15.
                const int exponent = int(top >> 7);
                shift = exponent == 0 ? 0 : min(127 + 14 - exponent, 100);
            }
            const float factor = __int_as_float((127 + shift) << 23);
#pragma unroll 1
            for (int unit = first; unit < units; unit += of_row) convert(row, unit, factor);
        }
        if (first == 0) s.query_scale[row] = p.scale_log2 * __int_as_float((127 - shift) << 23);
        ptx::fence_proxy_async();
    }

    // bf16 has exponents that f16 has not.
    static constexpr bool kScalesQueries = R::kConverts && !std::is_same_v<T, __half>;

    __device__ uint32_t query_place(int row, int unit, int chunk) const {
        return base + (unit >> 1) * L::kQueryTileBytes + swizzled<128>(row, (unit & 1) * 4 + chunk);
    }
    // The larger magnitudes of two values of bf16, as bits.
    __device__ static uint32_t larger(uint32_t top, uint32_t two) {
        return __vmaxu2(top, two & 0x7fff7fff);
    }

    // Puts a unit's words, of two values each, in the order of the keys'
    // operands: of four chunks the first words, then the second ones, and so on.
    __device__ void convert(int row, int unit, float factor) const {
        const bool is_rope = unit >= 16 && R::kScales;
        uint32_t in[4][4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const uint4 v = ptx::ld_shared_v4(query_place(row, unit, c));
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                in[c][i] = words[i];
                if constexpr (kScalesQueries) {
                    const float x = __uint_as_float(words[i] << 16) * factor;
                    const float y = __uint_as_float(words[i] & 0xffff0000) * factor;
                    in[c][i] = is_rope ? ptx::cvt_rn_x2<T>(x, y) : ptx::cvt_rn_x2<__half>(x, y);
                }
            }
        }
#pragma unroll
        for (int c = 0; c < 4; ++c)
            ptx::st_shared_v4(query_place(row, unit, c),
                              is_rope ? make_uint4(in[c][0], in[c][1], in[c][2], in[c][3])
                                      : make_uint4(in[0][c], in[1][c], in[2][c], in[3][c]));
    }

    // A tile of keys.
    __device__ void score(Running& running, int keys, const Ring<L::kSlots>& ring,
                          const Turn<kProbabilityTiles>& turn, bool first) {
        // A warp without keys reads those of the first one; nobody looks at what it
        // makes of them.
        auto own = ring;
        own.advance(warp * kSlotKeys < keys ? warp : 0);
        ptx::mbarrier_wait(ptx::shared_address(&s.full[own.slot]), own.phase);
        const uint32_t slot = base + L::kRingOffset + own.slot * L::kSlotBytes;
        float d[N / 2];
        if constexpr (R::kScales) {
            multiply_scaled(d, slot);
        } else if constexpr (R::kConverts) {
            multiply_e4m3(d, slot);
        } else {
            multiply_same(d, slot);
        }

        // Keys past the last one weigh nothing.
        const int of_warp = keys - warp * kSlotKeys;
        const bool valid[2] = {R::key_row(g()) < of_warp, R::key_row(g() + 8) < of_warp};
        float top_scale[2] = {0.f, 0.f};
        if constexpr (R::kScales) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const uint4 v = ptx::ld_shared_v4(scales_of_key(slot, k));
                const auto size = [](uint32_t x) { return fabsf(__uint_as_float(x)); };
                if (valid[k])
                    top_scale[k] = fmaxf(fmaxf(size(v.x), size(v.y)), fmaxf(size(v.z), size(v.w)));
            }
        }
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
        if (!first) follow(running, turn.uses - 1);
        bool rises = R::kScales && fmaxf(top_scale[0], top_scale[1]) * running.unit > 1.f;
#pragma unroll
        for (int c = 0; c < kColumns; c += 2) {
            const float2 reference = reference_of(running, c);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float most = (e ? reference.y : reference.x) + (kHeadroom + kLazyMaximum);
                rises |= d[at(c + e)] > most || d[at(c + e) + 2] > most;
            }
        }
        const int place = turn.place();
        // The output has done with what lies in this tile's place.
        ptx::mbarrier_wait(ptx::shared_address(&s.scores_empty[place]), turn.phase() ^ 1);
        const bool any = meet_any(rises);
        if (any) raise(running, d, top_scale, place);
        if (thread == 0) s.any_factor[place] = any;
        if constexpr (kTurns) ptx::mbarrier_arrive(ptx::shared_address(&s.decided[place]));

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
        store(d, place);
        if constexpr (R::kScales) {
            // A lane writes those of one group.
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const float of_group = scale_of_key(slot, k, q());
                const float top = top_scale[k];
                s.ratio[place][q()][warp * 16 + g() + 8 * k] =
                    __float2half_rn(top > 0.f ? of_group / top : 0.f);
            }
        }
        ptx::fence_proxy_async();
        ptx::mbarrier_arrive(ptx::shared_address(&s.scores_full[place]));
    }

    // Describes the queries of a step of 16 values.
    __device__ uint64_t query(int step) const {
        return ptx::wgmma_descriptor(base + step / 4 * L::kQueryTileBytes) + 2 * (step & 3);
    }

    // d = products of all 36 steps, in the queries' own dtype. A warp that has
    // issued a product from registers waits until it is nearly done: so operands
    // are loaded in batches, while those of the batch before are under way.
    __device__ void multiply_same(float (&d)[N / 2], uint32_t slot) const {
        constexpr int batch = 4, batches = 36 / batch;
        const uint32_t from = slot + (lane & 15) * R::kPitch + (lane >> 4) * 16;
        uint32_t a[2][batch][4];
        const auto load = [&](int b) {
#pragma unroll
            for (int i = 0; i < batch; ++i)
                ptx::ldmatrix_x4(a[b & 1][i], from + (b * batch + i) * 32);
        };
        load(0);
#pragma unroll
        for (int b = 0; b < batches; ++b) {
            ptx::wgmma_fence();
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                const int step = b * batch + i;
                ptx::WgmmaFromRegisters<T, N>::run(d, a[b & 1][i], query(step), step > 0);
            }
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group<1>();
            if (b + 1 < batches) load(b + 1);
        }
        ptx::wgmma_wait_group<0>();
    }

    // The products of batches of blocks of 32 values, which are two steps each:
    // `issue(b, a)` issues those of a batch, and when all before it are done,
    // `behind(b)` is called. The next batch's operands are made meanwhile; then
    // `end(b)` is called.
    template <int blocks, typename Issue, typename Behind, typename End>
    __device__ void for_each_batch(uint32_t slot, const Issue& issue, const Behind& behind,
                                   const End& end) const {
        constexpr int batches = blocks / kBatch;
        const uint32_t low_row = slot + R::key_row(g()) * R::kPitch + 8 * q();
        const uint32_t high_row = slot + R::key_row(g() + 8) * R::kPitch + 8 * q();
        uint32_t a[2][kBatch * 8];
        uint2 low[kBatch], high[kBatch];
        const auto read = [&](int b) {
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                low[i] = ptx::ld_shared_v2(low_row + (b * kBatch + i) * 32);
                high[i] = ptx::ld_shared_v2(high_row + (b * kBatch + i) * 32);
            }
        };
        const auto convert = [&](int b) {
#pragma unroll
            for (int i = 0; i < 2 * kBatch; ++i) {
                const uint2 own = low[i / 2], other = high[i / 2];
                const uint2 l = ptx::cvt_f16x4_e4m3x4(i & 1 ? own.y : own.x);
                const uint2 h = ptx::cvt_f16x4_e4m3x4(i & 1 ? other.y : other.x);
                a[b & 1][4 * i] = l.x;
                a[b & 1][4 * i + 1] = h.x;
                a[b & 1][4 * i + 2] = l.y;
                a[b & 1][4 * i + 3] = h.y;
            }
        };
        read(0);
        convert(0);
        if (batches > 1) read(1);
#pragma unroll
        for (int b = 0; b < batches; ++b) {
            ptx::wgmma_fence();
            issue(b, a[b & 1]);
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group<1>();
            behind(b);
            if (b + 1 < batches) convert(b + 1);
            if (b + 2 < batches) read(b + 2);
            end(b);
        }
    }

    __device__ void multiply_e4m3(float (&d)[N / 2], uint32_t slot) const {
        for_each_batch<(kLatent + kRope) / 32>(
            slot,
            [&](int b, const uint32_t* a) {
#pragma unroll
                for (int i = 0; i < 2 * kBatch; ++i) {
                    const int step = 2 * kBatch * b + i;
                    ptx::WgmmaFromRegisters<__half, N>::run(d, a + 4 * i, query(step), step > 0);
                }
            },
            [](int) {}, [](int) {});
        ptx::wgmma_wait_group<0>();
    }

    // d = the rotary product, plus that of each group of latent values times the
    // key's scale.
    __device__ void multiply_scaled(float (&d)[N / 2], uint32_t slot) const {
        // With many rows there are no registers for the sums of two groups.
        constexpr int sums = N < 32 ? 2 : 1;
        float partial[sums][N / 2];
        multiply_rope(d, slot);
        // What follows adds to d by other means, which no product under way may
        // have for its sums.
        ptx::wgmma_wait_group<0>();
#pragma unroll
        for (int k = 0; k < sums; ++k)
#pragma unroll
            for (int i = 0; i < N / 2; ++i) partial[k][i] = 0.f;
        constexpr int of_group = R::kGroupValues / 32;
        const auto group_of = [](int b) { return b * kBatch / of_group; };
        for_each_batch<kLatent / 32>(
            slot,
            [&](int b, const uint32_t* a) {
#pragma unroll
                for (int i = 0; i < 2 * kBatch; ++i)
                    ptx::WgmmaFromRegisters<__half, N>::run(partial[group_of(b) % sums], a + 4 * i,
                                                            query(2 * kBatch * b + i),
                                                            b * kBatch % of_group > 0 || i > 0);
            },
            [&](int b) {
                if (sums == 2 && b > 0 && b * kBatch % of_group == 0)
                    add_group(d, partial[(group_of(b) - 1) % sums], slot, group_of(b) - 1);
            },
            [&](int b) {
                if (sums == 1 && (b + 1) * kBatch % of_group == 0) {
                    ptx::wgmma_wait_group<0>();
                    add_group(d, partial[0], slot, group_of(b));
                }
            });
        if constexpr (sums == 2) {
            ptx::wgmma_wait_group<0>();
            add_group(d, partial[1], slot, 3);
        }
    }

    __device__ void add_group(float (&d)[N / 2], const float (&sum)[N / 2], uint32_t slot,
                              int group) const {
        const float scales[2] = {scale_of_key(slot, 0, group), scale_of_key(slot, 1, group)};
#pragma unroll
        for (int i = 0; i < N / 2; ++i) d[i] = fmaf(sum[i], scales[i >> 1 & 1], d[i]);
    }

    // Where the scales of this lane's key 0 or 1 lie; that of a group of latent
    // values. They are read when they are needed, since registers are few.
    __device__ uint32_t scales_of_key(uint32_t slot, int key) const {
        return slot + R::key_row(g() + 8 * key) * R::kPitch + R::kScalesOffset;
    }
    __device__ float scale_of_key(uint32_t slot, int key, int group) const {
        return __int_as_float(ptx::ld_shared_s32(scales_of_key(slot, key) + 4 * group));
    }

    __device__ void multiply_rope(float (&d)[N / 2], uint32_t slot) const {
        if constexpr (R::kScales) {
            const uint32_t from =
                slot + R::key_row(lane & 15) * R::kPitch + R::kRopeOffset + (lane >> 4) * 16;
            uint32_t a[4][4];
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                ptx::ldmatrix_x4(a[step], from + step * 32);
                if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
                    for (uint32_t& word : a[step])
                        word = ptx::cvt_rn_x2<__half>(__uint_as_float(word << 16),
                                                      __uint_as_float(word & 0xffff0000));
                }
            }
            ptx::wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step)
                ptx::WgmmaFromRegisters<T, N>::run(d, a[step], query(32 + step), step > 0);
            ptx::wgmma_commit_group();
        }
    }

    // Raises the reference maxima of those rows whose scores demand it, and the
    // unit of the keys' scales; called by all four warps.
    __device__ void raise(Running& running, const float (&d)[N / 2], const float (&top_scale)[2],
                          int place) {
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
        meet();
        float change = 1.f;
        if constexpr (R::kScales) {
            const float* of_warp = s.scale_of_warp + 4 * group;
            const float top = fmaxf(fmaxf(of_warp[0], of_warp[1]), fmaxf(of_warp[2], of_warp[3]));
            if (top * running.unit > 1.f) {
                // Brings the scale below 1/2, so that the next one may be somewhat
                // larger.
                const int exponent = int(__float_as_uint(top) >> 23) - 127;
                const float unit = __int_as_float(max(127 - (exponent + 2), 1) << 23);
                change = unit / running.unit;
                running.unit = unit;
            }
            if (kTurns && thread == 0) s.unit = running.unit;
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
            s.factor[place][thread] = by * change;
        }
        meet();
        take_raised(running);
    }

    // Writes P as a K-major tile: row = head, 64 keys.
    __device__ void store(const float (&d)[N / 2], int place) const {
        const uint32_t tile = base + L::kProbabilityOffset + place * L::kProbabilityBytes;
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

    // Gives the queries back, and tells the output of an item's maxima and sums.
    __device__ void finish(Running& running, uint32_t done) {
        const Item item(p, Items::first(p) + int(done) * Items::step());
        ptx::mbarrier_wait(ptx::shared_address(&s.stats_empty), (done & 1) ^ 1);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            float sum = running.sum[c];
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2)
                sum += __shfl_xor_sync(~0u, sum, distance);
            if (g() == 0) s.of_warp[4 * group + warp][head(c)] = sum;
        }
        meet_all();
        if (group == 0 && thread < N) {
            float sum = 0.f;
#pragma unroll
            for (const auto& of_warp : s.of_warp) sum += of_warp[thread];
            const float maximum = s.reference[thread], scale = p.out_scale / running.unit;
            s.maximum[thread] = maximum;
            s.sum[thread] = sum;
            s.inverse[thread] =
                Items::splits() > 1 ? scale : finish_row(p, item, thread, maximum, sum, scale);
        }
        // All that the output waits for, and all that the next item writes to.
        ptx::fence_proxy_async();
        if (group == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.stats_full));
        meet_all();
    }
};

}  // namespace mla::sm90::sparse
