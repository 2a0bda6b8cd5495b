// The GEMM of the scores: S^T = K Q^T for a warp's 16 keys of a KV tile. The keys are operand A,
// from registers.
//
// Accumulators have keys for rows and heads for columns. For e = 0 and 1, lane 4 g + q of warp w
// has in d[4 i + e] the score of key 16 w + g at head 8 i + 2 q + e. In d[4 i + 2 + e] it has the
// score of key 16 w + g + 8 at the same head.
#pragma once

#include "config.cuh"

namespace mla::sm90::sparse {

template <typename T, int N, class R>
struct ScoreGemm {
    using L = Layout<N, R>;
    using Sums = float[N / 2];

    uint32_t base;
    int lane;

    // d = the scores of all queries and the keys of a stage, unscaled.
    __device__ void run(Sums& d, uint32_t stage) const {
        if constexpr (R::kScales) {
            multiply_scaled(d, stage);
        } else if constexpr (R::kConverts) {
            multiply_e4m3(d, stage);
        } else {
            multiply_same(d, stage);
        }
    }

    // All scales of this lane's key 0 or 1 and, below, the scale of one group of its latent values.
    // They are read only when they are needed, since registers are few.
    __device__ uint4 scales_of_key(uint32_t stage, int key) const {
        if constexpr (R::kScaleStride == 0) {
            const uint32_t scale = ptx::ld_shared_s32(scales_address(stage, key));
            return make_uint4(scale, scale, scale, scale);
        }
        return ptx::ld_shared_v4(scales_address(stage, key));
    }
    __device__ float scale_of_key(uint32_t stage, int key, int group) const {
        return __int_as_float(
            ptx::ld_shared_s32(scales_address(stage, key) + R::kScaleStride * group));
    }

  private:
    __device__ int g() const { return lane >> 2; }
    __device__ int q() const { return lane & 3; }

    __device__ uint32_t scales_address(uint32_t stage, int key) const {
        return stage + R::key_row(g() + 8 * key) * R::kPitch + R::kScalesOffset;
    }

    // Describes the queries of a step of 16 values.
    __device__ uint64_t query(int step) const {
        return ptx::wgmma_descriptor(base + step / 4 * L::kQueryTileBytes) + 2 * (step & 3);
    }

    // d = the sum of all steps, in the queries' own dtype. A warp that has issued an MMA with an
    // operand in registers waits until the MMA is nearly done. Operands are therefore loaded in
    // batches, each while the MMAs of the batch before it run.
    __device__ void multiply_same(Sums& d, uint32_t stage) const {
        constexpr int batch = 4, batches = (kLatent + R::kRope) / 16 / batch;
        const uint32_t from = stage + (lane & 15) * R::kPitch + (lane >> 4) * 16;
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

    // Runs the MMAs of all blocks. A block is 32 values of e4m3, and takes two steps. `issue(b, a)`
    // issues the MMAs of block b. When all MMAs before those are done, `behind(b)` is called. The
    // next block's operands are made then, and after that `end(b)` is called.
    template <int blocks, typename Issue, typename Behind, typename End>
    __device__ void for_each_block(uint32_t stage, const Issue& issue, const Behind& behind,
                                   const End& end) const {
        const uint32_t low_row = stage + R::key_row(g()) * R::kPitch + 8 * q();
        const uint32_t high_row = stage + R::key_row(g() + 8) * R::kPitch + 8 * q();
        uint32_t a[2][8];
        uint2 low, high;
        const auto read = [&](int b) {
            low = ptx::ld_shared_v2(low_row + b * 32);
            high = ptx::ld_shared_v2(high_row + b * 32);
        };
        const auto convert = [&](int b) {
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                const uint2 l = ptx::cvt_f16x4_e4m3x4(step ? low.y : low.x);
                const uint2 h = ptx::cvt_f16x4_e4m3x4(step ? high.y : high.x);
                uint32_t* to = a[b & 1] + 4 * step;
                to[0] = l.x;
                to[1] = h.x;
                to[2] = l.y;
                to[3] = h.y;
            }
        };
        read(0);
        convert(0);
        read(1);
#pragma unroll
        for (int b = 0; b < blocks; ++b) {
            ptx::wgmma_fence();
            issue(b, a[b & 1]);
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group<1>();
            behind(b);
            if (b + 1 < blocks) convert(b + 1);
            if (b + 2 < blocks) read(b + 2);
            end(b);
        }
    }

    // Adds both steps of a block to `sum`. Unless `add` is true, the first step overwrites `sum`.
    __device__ void issue_block(Sums& sum, const uint32_t* a, int block, bool add) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            ptx::WgmmaFromRegisters<__half, N>::run(sum, a + 4 * i, query(2 * block + i),
                                                    add || i > 0);
    }

    __device__ void multiply_e4m3(Sums& d, uint32_t stage) const {
        for_each_block<(kLatent + R::kRope) / 32>(
            stage, [&](int b, const uint32_t* a) { issue_block(d, a, b, b > 0); }, [](int) {},
            [](int) {});
        ptx::wgmma_wait_group<0>();
    }

    // d = the rotary part, if there is one, plus the part of each group of latent values times the
    // key's scale.
    __device__ void multiply_scaled(Sums& d, uint32_t stage) const {
        // With many rows there are no registers for the sums of two groups.
        constexpr int sums = N < 32 ? 2 : 1;
        constexpr int of_group = R::kGroupValues / 32;
        Sums partial[sums];
        multiply_rope(d, stage);
        // The additions to d below are not MMAs, and no MMA in flight may have d for its
        // accumulators.
        ptx::wgmma_wait_group<0>();
#pragma unroll
        for (int k = 0; k < sums; ++k)
#pragma unroll
            for (int i = 0; i < N / 2; ++i) partial[k][i] = 0.f;
        for_each_block<kLatent / 32>(
            stage,
            [&](int b, const uint32_t* a) {
                issue_block(partial[b / of_group % sums], a, b, b % of_group > 0);
            },
            [&](int b) {
                if (sums == 2 && b > 0 && b % of_group == 0)
                    add_group(d, partial[(b / of_group - 1) % sums], stage, b / of_group - 1);
            },
            [&](int b) {
                if (sums == 1 && (b + 1) % of_group == 0) {
                    ptx::wgmma_wait_group<0>();
                    add_group(d, partial[0], stage, b / of_group);
                }
            });
        if constexpr (sums == 2) {
            ptx::wgmma_wait_group<0>();
            add_group(d, partial[1], stage, R::kGroups - 1);
        }
    }

    __device__ void add_group(Sums& d, const Sums& sum, uint32_t stage, int group) const {
        const float scales[2] = {scale_of_key(stage, 0, group), scale_of_key(stage, 1, group)};
#pragma unroll
        for (int i = 0; i < N / 2; ++i) d[i] = fmaf(sum[i], scales[i >> 1 & 1], d[i]);
    }

    __device__ void multiply_rope(Sums& d, uint32_t stage) const {
        if constexpr (R::kRope == 0) {
#pragma unroll
            for (float& x : d) x = 0.f;
        } else if constexpr (R::kScales) {
            const uint32_t from =
                stage + R::key_row(lane & 15) * R::kPitch + R::kRopeOffset + (lane >> 4) * 16;
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
                ptx::WgmmaFromRegisters<T, N>::run(d, a[step], query(kLatent / 16 + step),
                                                   step > 0);
            ptx::wgmma_commit_group();
        }
    }
};

}  // namespace mla::sm90::sparse
