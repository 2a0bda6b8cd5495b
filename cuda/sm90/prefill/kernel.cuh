// Expanded attention of query rows to keys and values per head, on sm_90a.
//
// One persistent block per multiprocessor, three warpgroups. Of the first, two threads bring tiles
// with the copy engine and one warp works out which tile comes next; the other two warpgroups
// compute, 64 query rows each, and go on from tile to tile without a stop. Each has the upper rows
// of one tile and the lower ones of the next, since where keys are hidden the upper ones have less
// to do (tile a of three key blocks, then b):
//
//     scheduler        claims b ...                     claims c ...
//     producers    Ka2 Ka1 Va2 Ka0 Va1 Va0 | Kb2 Kb1 Vb2 ...
//                  Qa                      | Qb
//     consumer 0   Sa2 |  Sa1, softmax a2  |  Sa0, Oa2, softmax a1  |  Sb2, Oa1, softmax a0  |  ...
//     consumer 1      the same, half a step later
//
// that is, in each step: enqueue the scores of a key block and the output of the block before;
// then, while the tensor cores work on the output and on the other consumer's products, the softmax
// of the scores. Between the two consumers, named barriers let one enqueue its products while the
// other computes exponentials. Key blocks are taken from the last to the first, so that the ones
// that need a mask come first; of the first of them a warp leaves out what none of its rows sees. A
// tile's output is stored behind the second scores of the next tile, through shared memory.
//
// What waits for what, each barrier with one phase per use of what it guards:
//
//     query_full[c], query_empty[c]     the rows of consumer c, upper or lower; given back after the tile's last scores
//     key_full[s], key_empty[s]         given back after the scores, or after their softmax where it may need them again
//     value_full[s], value_empty[s]     given back after the output
//     work_full[i], work_empty[i]       a tile's description; given back after the tile's last weights
//     work_wanted                       lets the scheduler claim the next tile, when the end of the last one announced comes near
//
// Each warp of a consumer gives back for itself, and only what it has waited for itself: a barrier
// that goes on while a warp has yet to wait for it is a phase missed, and the parity that the warp
// then waits for may never come.
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

// Where the tile of a number is announced, and the parity of the phase that its readers wait for.
struct Slot {
    int index;
    uint32_t phase;

    __device__ explicit Slot(int number)
        : index(number % kAnnounced), phase(number / kAnnounced & 1) {}
};

// One warp works out which tile comes next, ahead of those that bring and compute it.
template <typename Tile>
struct Scheduler {
    const KernelParams& p;
    Shared<Tile>& shared;
    int lane;

    __device__ void run() const {
        Schedule schedule(p, lane);
        int announced = 0;
        for (int claim = blockIdx.x;; claim = next_claim()) {
            Work work = schedule.find(claim);
            if (work.request < 0) break;
            work.blocks = blocks_of(work);
            if (work.blocks == 0) {
                store_nothing(work);
            } else {
                announce(work, announced);
                barrier_wait(shared_address(&shared.work_wanted), (announced - 1) & 1);
            }
        }
        announce(Work{}, announced);
        // The last block to finish leaves the counters as it found them. Every block has taken its
        // last tile by then.
        if (lane == 0 && atomicInc(reinterpret_cast<unsigned*>(&p.counters[1]), gridDim.x - 1) ==
                             gridDim.x - 1) {
            atomicExch(&p.counters[0], 0);
        }
    }

    __device__ int next_claim() const {
        int claim;
        if (lane == 0) claim = gridDim.x + atomicAdd(&p.counters[0], 1);
        return __shfl_sync(~0u, claim, 0);
    }

    __device__ int blocks_of(const Work& work) const {
        const int offset = work.key_len - work.query_len;
        const int visible =
            p.causal ? min(work.key_len, work.query + kQueries + offset) : work.key_len;
        return visible <= 0 ? 0 : (visible + Tile::kKeys - 1) / Tile::kKeys;
    }

    __device__ void announce(const Work& work, int& announced) const {
        const Slot slot(announced);
        barrier_wait(shared_address(&shared.work_empty[slot.index]), slot.phase ^ 1);
        if (lane == 0) {
            shared.work[slot.index] = work;
            barrier_arrive(shared_address(&shared.work_full[slot.index]));
        }
        announced++;
    }

    // What rows that see nothing give: zeros, and minus infinity.
    __device__ void store_nothing(const Work& work) const {
        const int rows = min(kQueries, work.query_len - work.query);
        const int64_t token = int64_t(work.query_start) + work.query;
#pragma unroll 1
        for (int row = 0; row < rows; row++) {
            auto* out = static_cast<typename Tile::Element*>(p.out) +
                        (token + row) * p.out_token_stride + work.head * p.out_head_stride;
#pragma unroll 1
            for (int column = lane * 8; column < Tile::kValue; column += 32 * 8) {
                *reinterpret_cast<uint4*>(out + column) = make_uint4(0, 0, 0, 0);
            }
            if (lane == 0 && p.lse) p.lse[work.head * p.lse_head_stride + token + row] = -INFINITY;
        }
    }
};

// Two threads bring what the announced tiles need: one the query rows, whose places become free
// late and are needed soon, one keys and values, in the order in which they are needed.
template <typename Tile>
struct Producer {
    const KernelParams& p;
    const Maps& maps;
    Shared<Tile>& shared;

    // Calls `bring` with each announced tile and the number of those before it.
    template <typename Bring>
    __device__ void for_each_tile(Bring bring) const {
#pragma unroll 1
        for (int number = 0;; number++) {
            const Slot slot(number);
            barrier_wait(shared_address(&shared.work_full[slot.index]), slot.phase);
            const Work work = shared.work[slot.index];
            if (work.blocks == 0) break;
            bring(work, number);
            barrier_arrive(shared_address(&shared.work_empty[slot.index]));
        }
    }

    __device__ static void bring(const CUtensorMap& map, const void* to, uint64_t& full, int column,
                                 int head, int row, int end) {
        tma_load(&map, shared_address(to), shared_address(&full), column, head, row, end);
    }

    __device__ void bring_queries() const {
        for_each_tile([&](const Work& work, int number) {
            for (int consumer = 0; consumer < kConsumers; consumer++) {
                barrier_wait(shared_address(&shared.query_empty[consumer]), (number & 1) ^ 1);
                // The halves change sides with each tile.
                bring_query(work, consumer, consumer ^ (number & 1));
            }
        });
    }

    __device__ void bring_query(const Work& work, int consumer, int half) const {
        // Never a box that lies behind the last row altogether: with bounds far apart the copy
        // engine faults on it. Rows that do not exist are computed with whatever comes, and not
        // stored.
        const int query = min(work.query + half * kRows, work.query_len - 1);
        const int row = query + p.max_query_len - work.query_len,
                  end = work.query_start + work.query_len;
        uint64_t& full = shared.query_full[consumer];
        barrier_expect(shared_address(&full), Tile::kQueryBytes);
        for (int panel = 0; panel < Tile::kQkPanels; panel++) {
            const bool rope = panel == Tile::kNopePanels;
            bring(rope ? maps.query_rope : maps.query,
                  shared.query[consumer] + panel * Tile::kQueryPanelBytes, full,
                  rope ? 0 : panel * kPanel, work.head, row, end);
        }
    }

    __device__ void bring_keys_and_values() const {
        Position key, value;
        for_each_tile([&](const Work& work, int) {
            const int last = work.blocks - 1;
#pragma unroll 1
            for (int block = last; block >= 0; block--) {
                bring_key(work, block, key);
                if (block == min(last, kClaimBlock))
                    barrier_arrive(shared_address(&shared.work_wanted));
                if (block < last) bring_value(work, block + 1, value);
            }
            bring_value(work, 0, value);
        });
    }

    __device__ void bring_key(const Work& work, int block, Position& at) const {
        const int row = block * Tile::kKeys + p.max_key_len - work.key_len;
        barrier_wait(shared_address(&shared.key_empty[at.stage]), at.phase ^ 1);
        uint64_t& full = shared.key_full[at.stage];
        barrier_expect(shared_address(&full), Tile::kKeyBytes);
        for (int panel = 0; panel < Tile::kQkPanels; panel++) {
            const bool rope = panel == Tile::kNopePanels;
            bring(rope ? maps.key_rope : maps.key,
                  shared.key[at.stage] + panel * Tile::kKeyPanelBytes, full,
                  rope ? 0 : panel * kPanel, rope && !p.rope_per_head ? 0 : work.head, row,
                  work.key_end);
        }
        at.advance();
    }

    __device__ void bring_value(const Work& work, int block, Position& at) const {
        const int row = block * Tile::kKeys + p.max_key_len - work.key_len;
        barrier_wait(shared_address(&shared.value_empty[at.stage]), at.phase ^ 1);
        uint64_t& full = shared.value_full[at.stage];
        barrier_expect(shared_address(&full), Tile::kValueBytes);
        for (int panel = 0; panel < Tile::kValuePanels; panel++) {
            bring(maps.value, shared.value[at.stage] + panel * Tile::kKeyPanelBytes, full,
                  panel * kPanel, work.head, row, work.key_end);
        }
        at.advance();
    }
};

// What a thread holds of its two query rows.
template <typename Tile>
struct Rows {
    float out[Tile::kValue / 2];
    uint32_t weights[Tile::kKeySteps][4];
    // Weights are 2^(score - reference), scores in units of log2. The reference is near the largest
    // score so far: it rises only when a weight, or a thread's sum of weights, would pass kRise.
    // Weights up to that do no harm, and the output hardly ever needs a correction.
    float reference[2], sum[2];
    // What the output so far has to be multiplied by before the next weights count, and whether any
    // lane's is not 1.
    float correction[2];
    bool corrected;

    static constexpr float kRise = 256.f, kRiseLog2 = 8.f;
    // Sums from here on are not to be trusted: their weights may have overflowed, and 1 over them
    // would be flushed to 0.
    static constexpr float kLost = 1e30f;

    // Takes the scores of one block and leaves the weights in their place: 0 behind the first
    // `chunks`, whose scores are not looked at. What was there before the tile's first block does
    // not count.
    template <bool first>
    __device__ __forceinline__ void absorb(float (&scores)[Tile::kKeys / 2], float scale_log2,
                                           int chunks) {
        // Both rows side by side, and four maxima of each, so that no chain of instructions is
        // long. The first chunk sets all four.
        static_assert(kChunkOctets >= 4);
        float largest[2][4];
#pragma unroll
        for (int chunk = 0; chunk < Tile::kChunks; chunk++) {
            if (chunk > 0 && chunk >= chunks) continue;
#pragma unroll
            for (int i = chunk * kChunkOctets; i < chunk * kChunkOctets + kChunkOctets; i++) {
#pragma unroll
                for (int row = 0; row < 2; row++) {
                    const float pair = fmaxf(scores[4 * i + 2 * row], scores[4 * i + 2 * row + 1]);
                    largest[row][i % 4] = i < 4 ? pair : fmaxf(largest[row][i % 4], pair);
                }
            }
        }
        float top[2], shift[2];
#pragma unroll
        for (int row = 0; row < 2; row++) {
            top[row] = fmaxf(fmaxf(largest[row][0], largest[row][1]),
                             fmaxf(largest[row][2], largest[row][3]));
        }
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
            for (int row = 0; row < 2; row++)
                top[row] = fmaxf(top[row], __shfl_xor_sync(~0u, top[row], distance));
        }
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const float before = first ? -INFINITY : reference[row];
            float now = fmaxf(before, top[row] * scale_log2);
            if (!first && now - before <= kRiseLog2) now = before;
            reference[row] = now;
            // A row that has seen nothing yet keeps -inf: subtracting it from itself would give
            // NaN.
            shift[row] = now == -INFINITY ? 0.f : now;
            if (!first) correction[row] = exp2_approx(before - shift[row]);
        }
        if (!first) corrected = __any_sync(~0u, correction[0] != 1.f || correction[1] != 1.f);
        float total[2] = {};
#pragma unroll
        for (int chunk = 0; chunk < Tile::kChunks; chunk++) {
            if (chunk == 0 || chunk < chunks) {
#pragma unroll
                for (int row = 0; row < 2; row++) {
                    weigh(scores, chunk * kChunkOctets, chunk * kChunkOctets + kChunkOctets, row,
                          scale_log2, shift[row], total[row]);
                }
            } else {
#pragma unroll
                for (int i = 4 * chunk * kChunkOctets;
                     i < 4 * chunk * kChunkOctets + 4 * kChunkOctets; i++)
                    scores[i] = 0.f;
            }
        }
#pragma unroll
        for (int row = 0; row < 2; row++)
            sum[row] = first ? total[row] : sum[row] * correction[row] + total[row];
    }

    // The same without looking for the largest score first: the sums of the weights tell afterwards
    // whether the reference has to rise. False if they are too large for that, as for a row without
    // a reference; then the scores are lost.
    __device__ __forceinline__ bool absorb_by_sum(float (&scores)[Tile::kKeys / 2],
                                                  float scale_log2) {
        float total[2] = {};
#pragma unroll
        for (int row = 0; row < 2; row++)
            weigh(scores, 0, Tile::kKeys / 8, row, scale_log2, reference[row], total[row]);
        corrected = __any_sync(~0u, !(total[0] <= kRise && total[1] <= kRise));
        if (corrected) {
            if (__any_sync(~0u, !(total[0] < kLost && total[1] < kLost))) return false;
#pragma unroll
            for (int row = 0; row < 2; row++) {
                float largest = fmaxf(total[row], __shfl_xor_sync(~0u, total[row], 1));
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
                const float before = reference[row];
                if (largest > kRise) reference[row] = before + log2f(largest);
                correction[row] = exp2_approx(before - reference[row]);
#pragma unroll
                for (int i = 0; i < Tile::kKeys / 8; i++) {
                    scores[4 * i + 2 * row] *= correction[row];
                    scores[4 * i + 2 * row + 1] *= correction[row];
                }
                sum[row] *= correction[row];
                total[row] *= correction[row];
            }
        }
#pragma unroll
        for (int row = 0; row < 2; row++) sum[row] += total[row];
        return true;
    }

    // Turns a row's scores of the octets of keys from `begin` to `end` into weights and adds these
    // to `total`.
    __device__ __forceinline__ static void weigh(float (&scores)[Tile::kKeys / 2], int begin,
                                                 int end, int row, float scale_log2, float shift,
                                                 float& total) {
#pragma unroll
        for (int i = begin; i < end; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float& score = scores[4 * i + 2 * row + j];
                score = exp2_approx(score * scale_log2 - shift);
                total += score;
            }
        }
    }

    // Rounds the weights into the layout of a product's left operand.
    __device__ __forceinline__ void round(const float (&scores)[Tile::kKeys / 2]) {
#pragma unroll
        for (int step = 0; step < Tile::kKeySteps; step++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                weights[step][i] = pack<typename Tile::Element>(scores[8 * step + 2 * i],
                                                                scores[8 * step + 2 * i + 1]);
            }
        }
    }

    __device__ __forceinline__ void rescale() {
        if (!corrected) return;
#pragma unroll
        for (int i = 0; i < Tile::kValue / 2; i++) out[i] *= correction[i / 2 % 2];
    }
};

template <typename Tile>
struct Consumer {
    const KernelParams& p;
    const Maps& maps;
    Shared<Tile>& shared;
    int warpgroup, thread;
    Position key, value;
    // Which half of the tile's rows is its own: 0, the upper one, or 1. It changes with each tile,
    // as in Producer::bring_queries.
    int half = warpgroup;

    // What is the same for all lanes. Told so, the compiler keeps what depends on it in uniform
    // registers.
    __device__ __forceinline__ static int same(int number) { return __shfl_sync(~0u, number, 0); }

    __device__ int row_in_tile() const {
        return half * kRows + thread / 32 * kWarpRows + thread % 32 / 4;
    }

    // Keeps the compiler from moving a use of registers that a product reads or writes across this
    // place.
    template <int registers>
    __device__ __forceinline__ static void settle(float (&d)[registers]) {
#pragma unroll
        for (int i = 0; i < registers; i++) cute::warpgroup_fence_operand(d[i]);
    }
    __device__ __forceinline__ static void settle(uint32_t (&weights)[Tile::kKeySteps][4]) {
#pragma unroll
        for (int i = 0; i < Tile::kKeySteps * 4; i++)
            cute::warpgroup_fence_operand(weights[i / 4][i % 4]);
    }

    // Waits for nothing, in a way that needs `sum`, which is never negative. The exponentials
    // belong before the wait for the products that hide them; ptxas would sink them behind it, but
    // not across a loop that needs their sum. The barrier is one that nobody arrives at: a warp may
    // come here long after another of its warpgroup has released what it read.
    __device__ __forceinline__ void hold(float sum) const {
        barrier_wait(shared_address(&shared.idle), 1 ^ uint32_t(sum < 0.f));
    }

    // One warpgroup issues its products while the other computes.
    __device__ __forceinline__ void take_turn() const {
        asm volatile("bar.sync %0, 256;" ::"r"(1 + warpgroup) : "memory");
    }
    __device__ __forceinline__ void pass_turn() const {
        asm volatile("bar.arrive %0, 256;" ::"r"(1 + (warpgroup + 1) % kConsumers) : "memory");
    }

    // Each warp for itself.
    __device__ __forceinline__ void release(uint64_t& empty) const {
        if (thread % 32 == 0) barrier_arrive(shared_address(&empty));
    }

    // How many keys of its request a query row sees.
    __device__ __forceinline__ int visible_keys(const Work& work, int query) const {
        return p.causal ? min(work.key_len, query + work.key_len - work.query_len + 1)
                        : work.key_len;
    }

    // How many chunks of a block any row of this warp sees keys of, the same for all lanes.
    __device__ __forceinline__ int chunks_seen(const Work& work, int block) const {
        const int last = work.query + half * kRows + thread / 32 * kWarpRows + kWarpRows - 1;
        return (same(max(visible_keys(work, last) - block * Tile::kKeys, 0)) + kChunkKeys - 1) /
               kChunkKeys;
    }

    // Hides the keys of a block's first `chunks` that a row must not see; most warps have to look
    // at few of these chunks.
    __device__ __forceinline__ void mask(float (&scores)[Tile::kKeys / 2], const Work& work,
                                         int block, int chunks) const {
        const int query = work.query + row_in_tile(), before = block * Tile::kKeys;
        const int least = visible_keys(work, same(query)) - before;
        const int end[2] = {visible_keys(work, query) - before - thread % 4 * 2,
                            visible_keys(work, query + 8) - before - thread % 4 * 2};
#pragma unroll
        for (int chunk = 0; chunk < Tile::kChunks; chunk++) {
            if (least >= kChunkKeys * (chunk + 1) || (chunk > 0 && chunk >= chunks)) continue;
#pragma unroll
            for (int i = chunk * kChunkOctets; i < chunk * kChunkOctets + kChunkOctets; i++) {
#pragma unroll
                for (int row = 0; row < 2; row++) {
                    if (8 * i >= end[row]) scores[4 * i + 2 * row] = -INFINITY;
                    if (8 * i + 1 >= end[row]) scores[4 * i + 2 * row + 1] = -INFINITY;
                }
            }
        }
    }

    // The number of blocks that every row of this warpgroup sees whole, the same for all lanes.
    __device__ __forceinline__ int unmasked_blocks(const Work& work) const {
        return same(max(visible_keys(work, work.query + half * kRows), 0) / Tile::kKeys);
    }

    // Enqueues the scores of the key block at hand.
    __device__ __forceinline__ void begin_scores(float (&scores)[Tile::kKeys / 2]) const {
        settle(scores);
        cute::warpgroup_arrive();
        multiply_query_key<Tile>(scores, shared_address(shared.query[warpgroup]),
                                 shared_address(shared.key[key.stage]));
        cute::warpgroup_commit_batch();
    }

    // Enqueues the output of the value block at hand. The output so far is corrected as late as
    // that: behind scores in flight, where it costs nothing.
    __device__ __forceinline__ void begin_output(Rows<Tile>& rows, bool first) const {
        if (!first) rows.rescale();
        settle(rows.weights);
        settle(rows.out);
        barrier_wait(shared_address(&shared.value_full[value.stage]), value.phase);
        cute::warpgroup_arrive();
        multiply_weight_value<Tile>(rows.out, rows.weights,
                                    shared_address(shared.value[value.stage]), !first);
        cute::warpgroup_commit_batch();
    }

    __device__ __forceinline__ void begin_step(float (&scores)[Tile::kKeys / 2],
                                               Rows<Tile>& rows) const {
        barrier_wait(shared_address(&shared.key_full[key.stage]), key.phase);
        take_turn();
        settle(rows.out);
        begin_scores(scores);
        begin_output(rows, false);
        pass_turn();
    }

    // Gives back the key block, and after the tile's last, block 0, the query rows.
    __device__ __forceinline__ void release_scores(int block) {
        release(shared.key_empty[key.stage]);
        if (block == 0) release(shared.query_empty[warpgroup]);
        key.advance();
    }

    __device__ __forceinline__ void end_output(Rows<Tile>& rows) {
        settle(rows.weights);
        settle(rows.out);
        release(shared.value_empty[value.stage]);
        value.advance();
    }

    // Ends a step: the softmax of the scores in flight, up to the weights, behind the output that
    // was enqueued after them. Of a tile's first block, what no row of a warp sees is left out.
    template <bool first>
    __device__ __forceinline__ void end_step(float (&scores)[Tile::kKeys / 2], const Work& work,
                                             int block, int unmasked, Rows<Tile>& rows,
                                             int chunks = Tile::kChunks) {
        cute::warpgroup_wait<1>();
        settle(scores);
        release_scores(block);
        if (block >= unmasked) mask(scores, work, block, chunks);
        rows.template absorb<first>(scores, p.scale_log2, chunks);
        hold(rows.sum[0] + rows.sum[1]);
        cute::warpgroup_wait<0>();
        end_output(rows);
        rows.round(scores);
    }

    // The same for a block that every row sees whole. It keeps the key block until the softmax is
    // done: if a score lies so far above the reference that its weight overflows, each warp
    // computes its scores once more.
    __device__ __forceinline__ void end_step_unmasked(float (&scores)[Tile::kKeys / 2],
                                                      Rows<Tile>& rows) {
        cute::warpgroup_wait<1>();
        settle(scores);
        if (!rows.absorb_by_sum(scores, p.scale_log2)) {
            multiply_query_key_by_warp<Tile>(scores, shared_address(shared.query[warpgroup]),
                                             shared_address(shared.key[key.stage]), thread);
            rows.template absorb<false>(scores, p.scale_log2, Tile::kChunks);
        }
        __syncwarp();
        release_scores(-1);
        cute::warpgroup_wait<0>();
        end_output(rows);
        rows.round(scores);
    }

    // What the store of a tile needs beside its output. Another tile's softmax comes before the
    // store.
    struct Finished {
        int head, query, query_start, query_len;
        float reference[2], sum[2];
    };

    // Once the last weights of a tile are there. Gives its description back.
    __device__ __forceinline__ Finished finish(const Work& work, int number,
                                               const Rows<Tile>& rows) const {
        release(shared.work_empty[Slot(number).index]);
        return {work.head,
                work.query + half * kRows,
                work.query_start,
                work.query_len,
                {rows.reference[0], rows.reference[1]},
                {rows.sum[0], rows.sum[1]}};
    }

    // Writes the warp's rows, one panel of columns after the other: rounded into shared memory, and
    // from there by the copy engine, which leaves out rows that the request does not have.
    __device__ __forceinline__ void store(const Finished& finished, const Rows<Tile>& rows) const {
        const int warp = thread / 32, lane = thread % 32;
        const int first = finished.query + warp * kWarpRows;
        float sum[2] = {finished.sum[0], finished.sum[1]};
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
            for (int row = 0; row < 2; row++) sum[row] += __shfl_xor_sync(~0u, sum[row], distance);
        }
        float factor[2];
#pragma unroll
        for (int row = 0; row < 2; row++) {
            factor[row] = sum[row] > 0.f ? reciprocal_approx(sum[row]) : 0.f;
            const int query = first + lane / 4 + 8 * row;
            if (lane % 4 == 0 && p.lse && query < finished.query_len) {
                p.lse[finished.head * p.lse_head_stride + finished.query_start + query] =
                    sum[row] > 0.f
                        ? (finished.reference[row] + log2_approx(sum[row])) * 0.693147180559945309f
                        : -INFINITY;
            }
        }
        const uint32_t staged = shared_address(shared.out[warpgroup * (kRows / kWarpRows) + warp]);
        // Lane 8 i + j gives the address of row j of matrix i: rows 0..7 and 8..15 of eight
        // columns, then of the next eight.
        const int row = lane % 16, chunk = lane / 16;
#pragma unroll
        for (int panel = 0; panel < Tile::kValuePanels; panel++) {
            if (lane == 0) tma_wait_stores_read();
            __syncwarp();
#pragma unroll
            for (int i = 0; i < kPanel / 8; i += 2) {
                const float* out = &rows.out[4 * (kPanel / 8 * panel + i)];
                uint32_t words[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    words[j] = pack<typename Tile::Element>(out[2 * j] * factor[j % 2],
                                                            out[2 * j + 1] * factor[j % 2]);
                }
                store_matrices(staged + row * 128 + ((chunk + i) ^ row % 8) * 16, words[0],
                               words[1], words[2], words[3]);
            }
            fence_async_proxy();
            __syncwarp();
            // Never a box that lies behind the last row altogether, as for queries.
            if (lane == 0 && first < finished.query_len) {
                tma_store(&maps.out, staged, panel * kPanel, finished.head,
                          first + p.max_query_len - finished.query_len,
                          finished.query_start + finished.query_len);
            }
        }
    }

    // A tile's description stays in shared memory: its registers are needed for the products. Only
    // the first lane reads it, the one that gives it back, and told that all lanes have the same,
    // the compiler keeps it in uniform registers.
    __device__ __forceinline__ Work work_at(int number) const {
        const uint32_t address = shared_address(&shared.work[Slot(number).index]);
        int words[sizeof(Work) / 4];
#pragma unroll
        for (int i = 0; i < sizeof(Work) / 4; i++) words[i] = 0;
        if (thread % 32 == 0) {
#pragma unroll
            for (int i = 0; i < sizeof(Work) / 16; i++) {
                const uint4 four = load_shared16(address + 16 * i);
                words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z,
                          words[4 * i + 3] = four.w;
            }
        }
#pragma unroll
        for (int i = 0; i < sizeof(Work) / 4; i++) words[i] = same(words[i]);
        return {words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7]};
    }

    __device__ __forceinline__ void await_work(int number) const {
        const Slot slot(number);
        barrier_wait(shared_address(&shared.work_full[slot.index]), slot.phase);
    }

    // Steps go on across tiles: the first scores of a tile are in flight with the last output of
    // the one before, and that output is stored behind the second scores.
    __device__ void run() {
        if (warpgroup == kConsumers - 1) pass_turn();
        await_work(0);
        Work work = work_at(0);
        int blocks = work.blocks, unmasked = unmasked_blocks(work);
        if (blocks == 0) return;
        Rows<Tile> rows = {};
        {
            float scores[Tile::kKeys / 2];
            barrier_wait(shared_address(&shared.query_full[warpgroup]), 0);
            barrier_wait(shared_address(&shared.key_full[key.stage]), key.phase);
            take_turn();
            begin_scores(scores);
            pass_turn();
            cute::warpgroup_wait<0>();
            settle(scores);
            release_scores(blocks - 1);
            const int chunks = chunks_seen(work, blocks - 1);
            if (blocks > unmasked) mask(scores, work, blocks - 1, chunks);
            rows.template absorb<true>(scores, p.scale_log2, chunks);
            rows.round(scores);
        }
        Finished before = {}, older = {};
        int number = 0;
        for (;; number++) {
            if (blocks > 1) {
                {
                    float scores[Tile::kKeys / 2];
                    barrier_wait(shared_address(&shared.key_full[key.stage]), key.phase);
                    take_turn();
                    begin_scores(scores);
                    pass_turn();
                    if (number > 0) store(before, rows);
                    // Without its turn, which would come late: the other consumer's softmax of its
                    // first block takes long.
                    begin_output(rows, true);
                    end_step<false>(scores, work, blocks - 2, unmasked, rows);
                }
                for (int block = blocks - 3; block >= 0; block--) {
                    for (; block > 0 && block < unmasked; block--) {
                        float scores[Tile::kKeys / 2];
                        begin_step(scores, rows);
                        end_step_unmasked(scores, rows);
                    }
                    // The last block gives its keys and the query rows back early, for the next
                    // tile.
                    float scores[Tile::kKeys / 2];
                    begin_step(scores, rows);
                    end_step<false>(scores, work, block, unmasked, rows);
                }
            }
            // Of a tile of one block the output has not begun, and that of the tile before has not
            // been stored.
            older = before;
            before = finish(work, number, rows);
            await_work(number + 1);
            work = work_at(number + 1);
            if (work.blocks == 0) break;
            half ^= 1;
            unmasked = unmasked_blocks(work);
            const int chunks = chunks_seen(work, work.blocks - 1);
            float scores[Tile::kKeys / 2];
            barrier_wait(shared_address(&shared.query_full[warpgroup]), (number + 1) & 1);
            barrier_wait(shared_address(&shared.key_full[key.stage]), key.phase);
            take_turn();
            begin_scores(scores);
            if (blocks == 1) {
                pass_turn();
                if (number > 0) store(older, rows);
                take_turn();
            }
            begin_output(rows, blocks == 1);
            pass_turn();
            blocks = work.blocks;
            end_step<true>(scores, work, blocks - 1, unmasked, rows, chunks);
        }
        if (blocks == 1 && number > 0) store(older, rows);
        begin_output(rows, blocks == 1);
        cute::warpgroup_wait<0>();
        end_output(rows);
        store(before, rows);
        if (thread % 32 == 0) tma_wait_stores();
    }
};

template <typename Tile>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_kernel(const __grid_constant__ KernelParams p, const __grid_constant__ Maps maps) {
    extern __shared__ uint8_t memory[];
    // The panels' swizzle counts from multiples of 1024 bytes.
    auto& shared = *reinterpret_cast<Shared<Tile>*>((reinterpret_cast<uintptr_t>(memory) + 1023) &
                                                    ~uintptr_t(1023));
    const int warpgroup = threadIdx.x / 128;

    if (threadIdx.x == 0) {
        for (int consumer = 0; consumer < kConsumers; consumer++) {
            barrier_init(shared_address(&shared.query_full[consumer]), 1);
            barrier_init(shared_address(&shared.query_empty[consumer]), 4);
        }
        for (int stage = 0; stage < kStages; stage++) {
            barrier_init(shared_address(&shared.key_full[stage]), 1);
            barrier_init(shared_address(&shared.key_empty[stage]), 4 * kConsumers);
            barrier_init(shared_address(&shared.value_full[stage]), 1);
            barrier_init(shared_address(&shared.value_empty[stage]), 4 * kConsumers);
        }
        for (int slot = 0; slot < kAnnounced; slot++) {
            barrier_init(shared_address(&shared.work_full[slot]), 1);
            barrier_init(shared_address(&shared.work_empty[slot]), 4 * kConsumers + 2);
        }
        barrier_init(shared_address(&shared.work_wanted), 1);
        barrier_init(shared_address(&shared.idle), 1);
        fence_barrier_init();
    }
    __syncthreads();

    if (warpgroup == 0) {
        registers_shrink<kProducerRegisters>();
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const Producer<Tile> producer{p, maps, shared};
        if (warp == 0 && lane == 0) producer.bring_keys_and_values();
        if (warp == 2 && lane == 0) producer.bring_queries();
        if (warp == 3) Scheduler<Tile>{p, shared, lane}.run();
    } else {
        registers_grow<kConsumerRegisters>();
        Consumer<Tile>{p, maps, shared, warpgroup - 1, int(threadIdx.x % 128)}.run();
    }
}

}  // namespace mla::sm90::prefill
