// A score warp. It has 16 query rows by all columns. It makes P of each KV tile, and the rows'
// statistics.
#pragma once

#include "../softmax.cuh"
#include "role_barrier.cuh"

namespace mla::sm80::decode {

template <class C>
class ScoreWarp {
    using T = typename C::Element;
    using Barrier = RoleBarrier<C>;
    // Units of 16 tokens in a KV tile.
    static constexpr int kUnits = C::kTokens / 16;
    // There are two sums if a single one would make a chain of few, long steps.
    static constexpr int kSums = kUnits == 1 ? 2 : 1;
    static constexpr int kRing = C::kAhead + 1;

  public:
    __device__ ScoreWarp(const KernelParams& p, char* shared, typename C::Scheduler& scheduler)
        : p_(p),
          shared_(shared),
          scheduler_(scheduler),
          warp_(threadIdx.x / 32 - C::kThreads / 32) {}

    __device__ void run() {
        bool more = scheduler_.first();
        for (int index = 0; more; ++index) {
            const WorkItem& item = scheduler_.item(index);
            load_queries(item);
            more = scheduler_.next(index + 1);
            if (more) prefetch_queries(p_, scheduler_.item(index + 1), warp_);
            rows_[0] = rows_[1] = RowState{};
            const int tile_end = item.tile_end;
            unmasked_ = p_.sparse ? 0 : item.unmasked;
            if (index == 0) Barrier::sync();
#pragma unroll 1
            for (int tile = item.tile_begin; tile < tile_end; ++tile) {
                do_tile(item, tile);
                if (tile + 1 == tile_end) put_statistics();
                Barrier::sync();
                stage_ = stage_ + 1 == p_.stages ? 0 : stage_ + 1;
                ++count_;
            }
        }
    }

  private:
    // Steps are multiplied in this order: first those that lie in shared memory.
    __device__ static constexpr int step_of(int i) { return (i + C::kHeldSteps) % C::kQuerySteps; }
    __device__ uint4* queries() const {
        return reinterpret_cast<uint4*>(shared_ + C::kQueryOffset) +
               (warp_ * (C::kQuerySteps - C::kHeldSteps)) * 32 + (threadIdx.x & 31);
    }
    __device__ typename C::Statistics& statistics() const {
        return *reinterpret_cast<typename C::Statistics*>(shared_ + C::kStatisticsOffset);
    }
    __device__ static const KernelParams& params() {
        return reinterpret_cast<typename C::Statistics*>(ptx::dynamic_shared() +
                                                         C::kStatisticsOffset)
            ->params;
    }

    // Addresses of the latent and rotary values of a query row. If there is no such row, they are
    // those of the item's first row.
    struct QueryRow {
        const char *latent, *rope;
        bool exists;
    };
    __device__ static QueryRow row_of(const KernelParams& p, const WorkItem& item, int r) {
        const int of_item = item.first_row + r;
        const bool exists = of_item < item.q_len * p.heads;
        const int row = exists ? of_item : item.first_row;
        const int token = item.q_begin + row / p.heads, head = row % p.heads;
        const T* latent = static_cast<const T*>(p.q_latent) + token * p.q_latent_token_stride +
                          head * p.q_latent_head_stride;
        const T* rope = p.rope_dim == 0
                            ? latent
                            : static_cast<const T*>(p.q_rope) + token * p.q_rope_token_stride +
                                  head * p.q_rope_head_stride;
        return {reinterpret_cast<const char*>(latent), reinterpret_cast<const char*>(rope), exists};
    }

    // Prefetches queries into L2, all at once, while the previous item is computed.
    __device__ static __noinline__ void prefetch_queries(const KernelParams& p,
                                                         const WorkItem& item, int warp) {
        // Lines of 64 values in a row: the rotary ones are last.
        constexpr int kLines = C::kLatent / 64 + 1;
        for (int i = threadIdx.x & 31; i < 16 * kLines; i += 32) {
            const QueryRow row = row_of(p, item, warp * 16 + i / kLines);
            const int line = i % kLines;
            if (row.exists)
                ptx::prefetch_global_l2(line < kLines - 1 ? row.latent + line * 128 : row.rope);
        }
    }

    // Queries arrive two steps at a time. These are 16 rows of four 16-byte chunks. Chunks are
    // exchanged so that the chunks of eight rows lie in different banks.
    static constexpr int kPairBytes = 2 * 16 * 32;
    // Held steps arrive in the place of the other steps.
    static constexpr int kOtherSteps = C::kQuerySteps - C::kHeldSteps;
    static_assert(C::kHeldSteps % 2 == 0 && kOtherSteps % 2 == 0 && C::kHeldSteps <= kOtherSteps);
    __device__ static int exchanged(int row, int chunk) { return chunk ^ (row >> 1 & 3); }

    // Begins to copy steps `begin` to `end` - 1 of the warp's rows. Four lanes copy a row.
    template <int begin, int end>
    __device__ static __noinline__ void copy_queries(const WorkItem& item, int warp, uint32_t to) {
        const KernelParams& p = params();
        const int lane = threadIdx.x & 31, quad = lane & 3;
        QueryRow rows[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
            rows[half] = row_of(p, item, warp * 16 + half * 8 + lane / 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = half * 8 + lane / 4;
            copy_steps<begin, begin, end>(rows[half], quad * 16, p.rope_dim,
                                          to + r * 64 + exchanged(r, quad) * 16);
        }
    }
    // Begins to copy 16 bytes of each pair of steps of a row. For latent values, the offsets are
    // part of the instruction, which reads its registers late.
    template <int step, int begin, int end>
    __device__ static void copy_steps(const QueryRow& row, int byte, int rope_dim, uint32_t to) {
        constexpr int at = (step - begin) / 2 * kPairBytes, column = step * 16 - C::kLatent;
        if constexpr (column < 0)
            ptx::cp_async_16_at<at, step * 32>(to, row.latent + byte, row.exists);
        else
            ptx::cp_async_16(to + at, row.rope + byte + (column < rope_dim ? column * 2 : 0),
                             row.exists && column < rope_dim);
        if constexpr (step + 2 < end) copy_steps<step + 2, begin, end>(row, byte, rope_dim, to);
    }
    // Rearranges steps that have arrived: puts the operands of each lane together, in the place of
    // the rows that they come from.
    __device__ static void arrange(uint32_t from, int steps) {
        // These are computed anew each time, because registers are few.
        const int lane = ThreadPosition::hide(threadIdx.x) & 31, row = lane & 15;
        const uint32_t at = from + row * 64 + exchanged(row, lane >> 4) * 16;
#pragma unroll 1
        for (int step = 0; step < steps; step += 4) {
            uint32_t words[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (i < 2 || step + 2 < steps)
                    // Odd steps lie two chunks further.
                    ptx::ldmatrix_x4(words[i], (i % 2 ? at ^ 32 : at) + (step + (i & 2)) * 512);
            __syncwarp();
            const uint32_t own = from + step * 512 + lane * 16;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (i < 2 || step + 2 < steps)
                    ptx::st_shared_v4(own + i * 512,
                                      {words[i][0], words[i][1], words[i][2], words[i][3]});
        }
        __syncwarp();
    }

    // Loads an item's queries. For the CTA's first item, the steps that registers will hold arrive
    // in the last KV stage, which stays unused until score warps have made P. All steps are thus in
    // flight at once. For later items, the held steps arrive in the place of the other steps,
    // before these.
    __device__ void load_queries(const WorkItem& item) {
        const bool first = count_ == 0;
        const uint32_t own =
            ptx::shared_address(shared_ + C::kQueryOffset) + warp_ * (kOtherSteps * 512);
        const uint32_t stage = ptx::shared_address(shared_ + C::kStagesOffset) +
                               (p_.stages - 1) * (C::kTokens * p_.pitch) +
                               warp_ * (C::kHeldSteps * 512);
        static_assert(C::kScoreWarps * C::kHeldSteps * 512 <= C::kTokens * C::pitch(0));
        const uint32_t held = first ? stage : own;
        // All lanes have read the queries of the item before this one.
        __syncwarp();
        copy_queries<0, C::kHeldSteps>(item, warp_, held);
        if (first) copy_queries<C::kHeldSteps, C::kQuerySteps>(item, warp_, own);
        ptx::cp_async_wait_all();
        __syncwarp();
        arrange(held, C::kHeldSteps);
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int step = 0; step < C::kHeldSteps; ++step) {
            const uint4 q = ptx::ld_shared_v4(held + step * 512 + lane * 16);
            held_[step][0] = q.x, held_[step][1] = q.y, held_[step][2] = q.z, held_[step][3] = q.w;
        }
        __syncwarp();
        if (!first) {
            copy_queries<C::kHeldSteps, C::kQuerySteps>(item, warp_, own);
            ptx::cp_async_wait_all();
            __syncwarp();
        }
        arrange(own, kOtherSteps);
    }

    struct OperandRing {
        uint32_t keys[kRing][kUnits][4], queries[kRing][4];
    };

    // Loads the operands of the i-th step. `keys` is the address of this lane's row among the
    // tile's first 16 tokens.
    template <int i>
    __device__ void load_step(OperandRing& ring, uint32_t keys) const {
        constexpr int step = step_of(i);
        if constexpr (step >= C::kHeldSteps) {
            const uint4 q = queries()[(step - C::kHeldSteps) * 32];
            uint32_t (&to)[4] = ring.queries[i % kRing];
            to[0] = q.x, to[1] = q.y, to[2] = q.z, to[3] = q.w;
        }
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            uint32_t from = keys + unit * 16 * p_.pitch + step * 32;
            // All lanes then read the same 16 bytes of zeros.
            if constexpr (step >= C::kLatentSteps)
                if ((step - C::kLatentSteps) * 16 >= p_.rope_dim)
                    from = ptx::shared_address(statistics().zeros);
            ptx::ldmatrix_x4(ring.keys[i % kRing][unit], from);
        }
    }

    template <int i>
    __device__ void do_step(OperandRing& ring, uint32_t keys,
                            float (&sums)[kSums][C::kBlocks][4]) const {
        if constexpr (i + C::kAhead < C::kQuerySteps) load_step<i + C::kAhead>(ring, keys);
        constexpr int step = step_of(i);
        if constexpr (step < C::kHeldSteps)
            multiply(sums[i % kSums], held_[step], ring.keys[i % kRing]);
        else
            multiply(sums[i % kSums], ring.queries[i % kRing], ring.keys[i % kRing]);
        if constexpr (i + 1 < C::kQuerySteps) do_step<i + 1>(ring, keys, sums);
    }

    __device__ static void multiply(float (&sums)[C::kBlocks][4], const uint32_t (&q)[4],
                                    const uint32_t (&keys)[kUnits][4]) {
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            const uint32_t (&k)[4] = keys[unit];
            ptx::mma_m16n8k16<T>(sums[unit * 2], q, k[0], k[1]);
            ptx::mma_m16n8k16<T>(sums[unit * 2 + 1], q, k[2], k[3]);
        }
    }

    template <int i>
    __device__ void load_first(OperandRing& ring, uint32_t keys) const {
        load_step<i>(ring, keys);
        if constexpr (i + 1 < C::kAhead) load_first<i + 1>(ring, keys);
    }

    __device__ void do_tile(const WorkItem& item, int tile) {
        const int lane = threadIdx.x & 31;
        float sums[kSums][C::kBlocks][4] = {};
        {
            const uint32_t keys = ptx::shared_address(shared_ + C::kStagesOffset) +
                                  stage_ * (C::kTokens * p_.pitch) +
                                  ((lane & 7) + (lane >> 4) * 8) * p_.pitch + (lane >> 3 & 1) * 16;
            OperandRing ring;
            load_first<0>(ring, keys);
            do_step<0>(ring, keys, sums);
        }
        float (&x)[C::kBlocks][4] = sums[0];
        if constexpr (kSums == 2)
#pragma unroll
            for (int block = 0; block < C::kBlocks; ++block)
#pragma unroll
                for (int i = 0; i < 4; ++i) x[block][i] += sums[1][block][i];

        const int first = tile * C::kTokens;
        const bool masked = first + C::kTokens > unmasked_;
        float maxima[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Mask mask = {masked ? limit_of(item, half * 8 + lane / 4) : 0,
                               masked ? valid() : ~0u};
            maxima[half] = mask_scores(x, half * 2, masked, mask, first) * p_.scale_log2;
        }
        // Nearly always, no row's maximum is raised. Lanes then need not know each other's maxima.
        float factors[2] = {1.f, 1.f};
        const bool raise = __any_sync(~0u, maxima[0] > rows_[0].maximum + kLazyMaximum ||
                                               maxima[1] > rows_[1].maximum + kLazyMaximum);
        if (raise)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                factors[half] = rows_[half].raise(quad_maximum(maxima[half]));
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int block = 0; block < C::kBlocks; ++block)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    x[block][half * 2 + i] =
                        rows_[half].probability(x[block][half * 2 + i], p_.scale_log2);
        // Until this barrier, the output of the previous item occupies P's place.
        if (tile == item.tile_begin && count_ > 0) Barrier::sync();
        put(x, factors, raise);
    }

    // Number of tokens that row r of the warp attends to.
    __device__ int limit_of(const WorkItem& item, int r) const {
        if (!p_.causal) return item.kv_len;
        const int row = item.first_row + warp_ * 16 + r;
        return min(item.before + row / p_.heads + 1, item.kv_len);
    }

    // One bit per token of the tile, set if the token exists. Output warps have found this in the
    // slot list.
    __device__ uint32_t valid() const {
        const auto* warps =
            reinterpret_cast<const typename C::WarpShared*>(shared_ + C::kWarpOffset);
        return p_.sparse ? warps[0].valid[stage_] : ~0u;
    }

    __device__ void put(const float (&x)[C::kBlocks][4], const float (&factors)[2],
                        bool rescale) const {
        const int lane = threadIdx.x & 31, buffer = count_ & 1;
        char* p = shared_ + C::kProbabilityOffset + buffer * C::kProbabilityBytes;
        auto& s = statistics();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp_ * 16 + half * 8 + lane / 4;
#pragma unroll
            for (int block = 0; block < C::kBlocks; ++block)
                *reinterpret_cast<uint32_t*>(p + C::probability_offset(row, block) + lane % 4 * 4) =
                    ptx::cvt_rn_x2<T>(x[block][half * 2], x[block][half * 2 + 1]);
            if (rescale && lane % 4 == 0) s.rescale[buffer][row] = factors[half];
        }
        if (lane == 0) s.any_rescale[buffer][warp_] = rescale;
    }

    __device__ void put_statistics() const {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp_ * 16 + half * 8 + lane / 4;
            const float sum = quad_sum(rows_[half].sum);
            if (lane % 4 == 0) {
                statistics().rows.maximum[row] = rows_[half].maximum;
                statistics().rows.sum[row] = sum;
            }
        }
    }

    const KernelParams& p_;
    char* shared_;
    typename C::Scheduler& scheduler_;
    int warp_;
    // Number of the current tile among the tiles of all items, and its stage.
    int count_ = 0, stage_ = 0;
    // Number of tokens that all rows of the item attend to.
    int unmasked_;
    RowState rows_[2];
    uint32_t held_[C::kHeldSteps > 0 ? C::kHeldSteps : 1][4];
};

}  // namespace mla::sm80::decode
