// Expanded attention of query rows to keys and values per head, on sm_90a.
//
// One persistent block per multiprocessor, three warpgroups. One warp of the first brings tiles with the copy engine and
// works out which tile comes next; the other two warpgroups compute, 64 query rows each:
//
//     producer     Q  K0 K1 V0 K2 V1 K3 V2 ...           next tile: Q  K0 K1 V0 ...
//     consumer 0   S0 | S1, softmax 0, O += P0 V0 | S2, softmax 1, O += P1 V1 | ... | O += Pn Vn, store
//     consumer 1      the same, half a step later
//
// Within a consumer the softmax of block j runs while the tensor cores compute the scores of block j + 1 and the output
// of block j - 1. Between the two, named barriers let one issue its products while the other computes exponentials.
// Key blocks are taken from the last to the first, so that the ones that need a mask come first.
//
// The query tile is released as soon as its last scores are there, and keys and values stream on across tiles, so the
// next tile's operands arrive while this one finishes.
#pragma once

#include <cuda_runtime.h>

#include "../../common/instructions.cuh"
#include "../../common/mbarrier.cuh"
#include "../../common/tma.cuh"
#include "params.cuh"
#include "product.cuh"
#include "schedule.cuh"
#include "tile.cuh"

namespace mla::sm90::prefill {

// A pipeline's position: which stage, and the parity of the phase that a consumer waits for there.
struct Position {
    int stage = 0;
    uint32_t phase = 0;

    __device__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

template <typename Tile>
struct Producer {
    const KernelParams& p;
    const Maps& maps;
    Shared<Tile>& shared;
    Position key, value;

    __device__ void bring(const CUtensorMap& map, const void* to, uint64_t& full, int column, int head, int row, int end) {
        tma_load(&map, shared_address(to), shared_address(&full), column, head, row, end);
    }

    __device__ void bring_query(const Work& work) {
        const int row = work.query + p.max_query_len - work.query_len, end = work.query_start + work.query_len;
        barrier_expect(shared_address(&shared.query_full), Tile::kQueryBytes);
        for (int panel = 0; panel < Tile::kQkPanels; panel++) {
            const bool rope = panel == Tile::kNopePanels;
            bring(rope ? maps.query_rope : maps.query, shared.query + panel * Tile::kQueryPanelBytes, shared.query_full,
                  rope ? 0 : panel * kPanel, work.head, row, end);
        }
    }

    __device__ void bring_key(const Work& work, int key_end, int block) {
        const int row = block * Tile::kKeys + p.max_key_len - work.key_len;
        barrier_wait(shared_address(&shared.key_empty[key.stage]), key.phase ^ 1);
        uint64_t& full = shared.key_full[key.stage];
        barrier_expect(shared_address(&full), Tile::kKeyBytes);
        for (int panel = 0; panel < Tile::kQkPanels; panel++) {
            const bool rope = panel == Tile::kNopePanels;
            bring(rope ? maps.key_rope : maps.key, shared.key[key.stage] + panel * Tile::kKeyPanelBytes, full,
                  rope ? 0 : panel * kPanel, rope && !p.rope_per_head ? 0 : work.head, row, key_end);
        }
        key.advance();
    }

    __device__ void bring_value(const Work& work, int key_end, int block) {
        const int row = block * Tile::kKeys + p.max_key_len - work.key_len;
        barrier_wait(shared_address(&shared.value_empty[value.stage]), value.phase ^ 1);
        uint64_t& full = shared.value_full[value.stage];
        barrier_expect(shared_address(&full), Tile::kValueBytes);
        for (int panel = 0; panel < Tile::kValuePanels; panel++) {
            bring(maps.value, shared.value[value.stage] + panel * Tile::kKeyPanelBytes, full, panel * kPanel, work.head,
                  row, key_end);
        }
        value.advance();
    }

    __device__ void run(int lane) {
        const Schedule schedule{p, shared.level_end, lane};
        schedule.build();
        int announced = 0, query_tiles = 0;
        for (int index = blockIdx.x;; announced++) {
            Work work = schedule.find(index);
            int key_end = 0;
            if (work.request >= 0) {
                const int offset = work.key_len - work.query_len;
                const int visible = p.causal ? min(work.key_len, work.query + kQueries + offset) : work.key_len;
                work.blocks = visible <= 0 ? 0 : (visible + Tile::kKeys - 1) / Tile::kKeys;
                key_end = p.cu_k[work.request + 1];
            }
            if (lane == 0) {
                const int slot = announced % kAnnounced;
                barrier_wait(shared_address(&shared.work_empty[slot]), (announced / kAnnounced & 1) ^ 1);
                shared.work[slot] = work;
                barrier_arrive(shared_address(&shared.work_full[slot]));
            }
            if (work.request < 0) break;
            if (work.blocks > 0 && lane == 0) {
                barrier_wait(shared_address(&shared.query_empty), (query_tiles & 1) ^ 1);
                bring_query(work);
                bring_key(work, key_end, work.blocks - 1);
                for (int block = work.blocks - 2; block >= 0; block--) {
                    bring_key(work, key_end, block);
                    bring_value(work, key_end, block + 1);
                }
                bring_value(work, key_end, 0);
            }
            query_tiles += work.blocks > 0;
            if (lane == 0) index = gridDim.x + atomicAdd(&p.counters[0], 1);
            index = __shfl_sync(~0u, index, 0);
        }
        // The last block to finish leaves the counters as it found them. Every block has taken its last tile by then.
        if (lane == 0 && atomicInc(reinterpret_cast<unsigned*>(&p.counters[1]), gridDim.x - 1) == gridDim.x - 1) {
            atomicExch(&p.counters[0], 0);
        }
    }
};

// What a thread holds of its two query rows.
template <typename Tile>
struct Rows {
    float out[Tile::kValue / 2];
    uint32_t weights[Tile::kKeySteps][4];
    float maximum[2], sum[2];

    // Takes the scores of one block: the running maximum, the weights, and what the output so far has to be multiplied by.
    __device__ __forceinline__ void absorb(float (&scores)[Tile::kKeys / 2], float scale_log2, float (&correction)[2]) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            float before = maximum[row], now = before;
#pragma unroll
            for (int i = 0; i < Tile::kKeys / 8; i++) {
                now = fmaxf(now, fmaxf(scores[4 * i + 2 * row], scores[4 * i + 2 * row + 1]));
            }
            now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
            now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
            maximum[row] = now;
            // A row that has seen nothing yet keeps -inf: subtracting it from itself would give NaN.
            const float shift = now == -INFINITY ? 0.f : now * scale_log2;
            correction[row] = exp2_approx(before * scale_log2 - shift);
            float total = 0.f;
#pragma unroll
            for (int i = 0; i < Tile::kKeys / 8; i++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float& score = scores[4 * i + 2 * row + j];
                    score = exp2_approx(score * scale_log2 - shift);
                    total += score;
                }
            }
            sum[row] = sum[row] * correction[row] + total;
        }
    }

    // Rounds the weights into the layout of a product's left operand.
    __device__ __forceinline__ void round(const float (&scores)[Tile::kKeys / 2]) {
#pragma unroll
        for (int step = 0; step < Tile::kKeySteps; step++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                weights[step][i] = pack<typename Tile::Element>(scores[8 * step + 2 * i], scores[8 * step + 2 * i + 1]);
            }
        }
    }

    __device__ __forceinline__ void rescale(const float (&correction)[2]) {
#pragma unroll
        for (int i = 0; i < Tile::kValue / 2; i++) out[i] *= correction[i / 2 % 2];
    }
};

template <typename Tile>
struct Consumer {
    const KernelParams& p;
    Shared<Tile>& shared;
    int warpgroup, thread;
    Position key, value;

    __device__ int row_in_tile() const { return warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4; }

    // Keeps the compiler from moving a use of registers that a product reads or writes across this place.
    template <int registers>
    __device__ __forceinline__ static void settle(float (&d)[registers]) {
#pragma unroll
        for (int i = 0; i < registers; i++) cute::warpgroup_fence_operand(d[i]);
    }
    __device__ __forceinline__ static void settle(uint32_t (&weights)[Tile::kKeySteps][4]) {
#pragma unroll
        for (int i = 0; i < Tile::kKeySteps * 4; i++) cute::warpgroup_fence_operand(weights[i / 4][i % 4]);
    }

    // Waits for what has long happened, in a way that needs `sum`, which is never negative. The exponentials belong before
    // the wait for the products that hide them; ptxas would sink them behind it, but not across a loop that needs their sum.
    __device__ __forceinline__ void hold(float sum) const {
        barrier_wait(shared_address(&shared.value_full[value.stage]), value.phase ^ uint32_t(sum < 0.f));
    }

    // One warpgroup issues its products while the other computes.
    __device__ __forceinline__ void take_turn() const {
        asm volatile("bar.sync %0, 256;" ::"r"(1 + warpgroup) : "memory");
    }
    __device__ __forceinline__ void pass_turn() const {
        asm volatile("bar.arrive %0, 256;" ::"r"(2 - warpgroup) : "memory");
    }

    __device__ __forceinline__ void release(uint64_t& empty) const {
        if (thread == 0) barrier_arrive(shared_address(&empty));
    }

    // Hides the keys of a block that a row must not see.
    __device__ __forceinline__ void mask(float (&scores)[Tile::kKeys / 2], const Work& work, int block) const {
        const int offset = work.key_len - work.query_len;
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const int query = work.query + row_in_tile() + 8 * row;
            const int end = (p.causal ? min(work.key_len, query + offset + 1) : work.key_len) - block * Tile::kKeys -
                            thread % 4 * 2;
#pragma unroll
            for (int i = 0; i < Tile::kKeys / 8; i++) {
                if (8 * i >= end) scores[4 * i + 2 * row] = -INFINITY;
                if (8 * i + 1 >= end) scores[4 * i + 2 * row + 1] = -INFINITY;
            }
        }
    }

    // The first block that every row of this warpgroup sees whole, counted from the first.
    __device__ __forceinline__ int unmasked_blocks(const Work& work) const {
        const int offset = work.key_len - work.query_len;
        const int end = p.causal ? min(work.key_len, work.query + warpgroup * 64 + offset + 1) : work.key_len;
        return max(end, 0) / Tile::kKeys;
    }

    __device__ __forceinline__ void attend(const Work& work, Rows<Tile>& rows) {
        const uint32_t query = shared_address(shared.query) + warpgroup * 64 * kPanel * 2;
        const int unmasked = unmasked_blocks(work);
        float correction[2];
        {
            float scores[Tile::kKeys / 2];
            barrier_wait(shared_address(&shared.key_full[key.stage]), key.phase);
            take_turn();
            settle(scores);
            settle(rows.out);
            cute::warpgroup_arrive();
            multiply_query_key<Tile>(scores, query, shared_address(shared.key[key.stage]));
            cute::warpgroup_commit_batch();
            pass_turn();
            cute::warpgroup_wait<0>();
            settle(scores);
            release(shared.key_empty[key.stage]);
            key.advance();
            if (work.blocks > unmasked) mask(scores, work, work.blocks - 1);
            rows.absorb(scores, p.scale_log2, correction);
            rows.round(scores);
        }
        for (int block = work.blocks - 2; block >= 0; block--) {
            float scores[Tile::kKeys / 2];
            barrier_wait(shared_address(&shared.key_full[key.stage]), key.phase);
            take_turn();
            settle(scores);
            settle(rows.out);
            cute::warpgroup_arrive();
            multiply_query_key<Tile>(scores, query, shared_address(shared.key[key.stage]));
            cute::warpgroup_commit_batch();
            barrier_wait(shared_address(&shared.value_full[value.stage]), value.phase);
            cute::warpgroup_arrive();
            multiply_weight_value<Tile>(rows.out, rows.weights, shared_address(shared.value[value.stage]),
                                        block != work.blocks - 2);
            cute::warpgroup_commit_batch();
            pass_turn();
            cute::warpgroup_wait<1>();
            settle(scores);
            release(shared.key_empty[key.stage]);
            key.advance();
            if (block >= unmasked) mask(scores, work, block);
            rows.absorb(scores, p.scale_log2, correction);
            hold(rows.sum[0] + rows.sum[1]);
            cute::warpgroup_wait<0>();
            settle(rows.weights);
            settle(rows.out);
            release(shared.value_empty[value.stage]);
            value.advance();
            rows.rescale(correction);
            rows.round(scores);
        }
        release(shared.query_empty);
        barrier_wait(shared_address(&shared.value_full[value.stage]), value.phase);
        cute::warpgroup_arrive();
        multiply_weight_value<Tile>(rows.out, rows.weights, shared_address(shared.value[value.stage]), work.blocks > 1);
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
        settle(rows.out);
        release(shared.value_empty[value.stage]);
        value.advance();
    }

    // Divides by the sums and writes both rows. Four neighbouring lanes hold two columns each of every eight; they exchange
    // them so that each writes sixteen bytes.
    __device__ __forceinline__ void store(const Work& work, Rows<Tile>& rows) const {
        using Element = typename Tile::Element;
        const int quad = thread % 4;
#pragma unroll
        for (int row = 0; row < 2; row++) {
            float sum = rows.sum[row];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const float factor = sum > 0.f ? 1.f / sum : 0.f;
            const int query = work.query + row_in_tile() + 8 * row;
            const bool valid = query < work.query_len;
            const int64_t token = int64_t(work.query_start) + query;
            Element* out = static_cast<Element*>(p.out) + token * p.out_token_stride + work.head * p.out_head_stride;
            if (valid && quad == 0 && p.lse) {
                p.lse[work.head * p.lse_head_stride + token] =
                    sum > 0.f ? rows.maximum[row] * p.scale + __logf(sum) : -INFINITY;
            }
#pragma unroll
            for (int first = 0; first < Tile::kValue / 8; first += 4) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float* pair = &rows.out[4 * (first + i) + 2 * row];
                    words[i] = pack<Element>(pair[0] * factor, pair[1] * factor);
                }
                transpose_in_quad(words, quad);
                if (valid) {
                    *reinterpret_cast<uint4*>(out + 8 * (first + quad)) = make_uint4(words[0], words[1], words[2], words[3]);
                }
            }
        }
    }

    // words[i] of lane q becomes words[q] of lane i.
    __device__ static __forceinline__ void transpose_in_quad(uint32_t (&words)[4], int quad) {
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
            const bool high = quad & distance;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (i & distance) continue;
                uint32_t& low_word = words[i];
                uint32_t& high_word = words[i + distance];
                const uint32_t other = __shfl_xor_sync(~0u, high ? low_word : high_word, distance);
                (high ? low_word : high_word) = other;
            }
        }
    }

    __device__ void run() {
        if (warpgroup == 1) pass_turn();
        uint32_t query_phase = 0;
        for (int begun = 0;; begun++) {
            const int slot = begun % kAnnounced;
            barrier_wait(shared_address(&shared.work_full[slot]), begun / kAnnounced & 1);
            const Work work = shared.work[slot];
            named_barrier(3 + warpgroup, 128);
            release(shared.work_empty[slot]);
            if (work.request < 0) break;
            Rows<Tile> rows;
#pragma unroll
            for (int i = 0; i < Tile::kValue / 2; i++) rows.out[i] = 0.f;
            rows.maximum[0] = rows.maximum[1] = -INFINITY;
            rows.sum[0] = rows.sum[1] = 0.f;
            if (work.blocks > 0) {
                barrier_wait(shared_address(&shared.query_full), query_phase);
                query_phase ^= 1;
                attend(work, rows);
            }
            store(work, rows);
        }
    }
};

template <typename Tile>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_kernel(const __grid_constant__ KernelParams p, const __grid_constant__ Maps maps) {
    extern __shared__ uint8_t memory[];
    // The panels' swizzle counts from multiples of 1024 bytes.
    auto& shared = *reinterpret_cast<Shared<Tile>*>((reinterpret_cast<uintptr_t>(memory) + 1023) & ~uintptr_t(1023));
    const int warpgroup = threadIdx.x / 128;

    if (threadIdx.x == 0) {
        barrier_init(shared_address(&shared.query_full), 1);
        barrier_init(shared_address(&shared.query_empty), kConsumers);
        for (int stage = 0; stage < kStages; stage++) {
            barrier_init(shared_address(&shared.key_full[stage]), 1);
            barrier_init(shared_address(&shared.key_empty[stage]), kConsumers);
            barrier_init(shared_address(&shared.value_full[stage]), 1);
            barrier_init(shared_address(&shared.value_empty[stage]), kConsumers);
        }
        for (int slot = 0; slot < kAnnounced; slot++) {
            barrier_init(shared_address(&shared.work_full[slot]), 1);
            barrier_init(shared_address(&shared.work_empty[slot]), kConsumers);
        }
        fence_barrier_init();
    }
    __syncthreads();

    if (warpgroup == 0) {
        registers_shrink<56>();
        if (threadIdx.x < 32) Producer<Tile>{p, maps, shared}.run(threadIdx.x);
    } else {
        registers_grow<224>();
        Consumer<Tile>{p, shared, warpgroup - 1, int(threadIdx.x % 128)}.run();
    }
}

}  // namespace mla::sm90::prefill
