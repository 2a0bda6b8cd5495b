// Expanded attention of query rows to keys and values per head, on sm_90a.
//
// One persistent block per multiprocessor, three warpgroups. Of the first, one thread brings tiles with the copy engine and one
// warp works out which tile comes next; the other two warpgroups compute, 64 query rows each, and go on from tile to tile
// without a stop (tile a of three key blocks, then b):
//
//     scheduler    claims b ...                     claims c ...
//     producer     Ka2 Qa Ka1 Va2 Ka0 Va1 Va0 | Kb2 Qb Kb1 Vb2 ...
//     consumer 0   Sa2 |  Sa1, softmax a2  |  Sa0, Oa2, softmax a1  |  Sb2, Oa1, softmax a0  |  ...
//     consumer 1      the same, half a step later
//
// that is, in each step: enqueue the scores of a key block and the output of the block before; then, while the tensor cores
// work on the output and on the other consumer's products, the softmax of the scores. Between the two consumers, named
// barriers let one enqueue its products while the other computes exponentials. Key blocks are taken from the last to the
// first, so that the ones that need a mask come first. A tile's output is stored behind the second scores of the next tile.
//
// What waits for what, each barrier with one phase per use of what it guards:
//
//     query_full[c], query_empty[c]     the rows of consumer c; given back after the tile's last scores
//     key_full[s], key_empty[s]         given back after the scores, or after their softmax where it may need them again
//     value_full[s], value_empty[s]     given back after the output
//     work_full[i], work_empty[i]       a tile's description; given back when its last output is on the way
//
// Each warp of a consumer gives back for itself, and only what it has waited for itself: a barrier that goes on while a warp
// has yet to wait for it is a phase missed, and the parity that the warp then waits for may never come.
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

// One warp works out which tile comes next, ahead of those that bring and compute it.
template <typename Tile>
struct Scheduler {
    const KernelParams& p;
    Shared<Tile>& shared;
    int lane;

    __device__ void run() const {
        const Schedule schedule{p, shared.level_end, lane};
        schedule.build();
        int announced = 0;
        for (int claim = blockIdx.x;; claim = next_claim()) {
            Work work = schedule.find(claim);
            if (work.request < 0) break;
            work.blocks = blocks_of(work);
            if (work.blocks == 0) {
                store_nothing(work);
            } else {
                announce(work, announced);
            }
        }
        announce(Work{}, announced);
        // The last block to finish leaves the counters as it found them. Every block has taken its last tile by then.
        if (lane == 0 && atomicInc(reinterpret_cast<unsigned*>(&p.counters[1]), gridDim.x - 1) == gridDim.x - 1) {
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
        const int visible = p.causal ? min(work.key_len, work.query + kQueries + offset) : work.key_len;
        return visible <= 0 ? 0 : (visible + Tile::kKeys - 1) / Tile::kKeys;
    }

    __device__ void announce(const Work& work, int& announced) const {
        const int slot = announced % kAnnounced;
        barrier_wait(shared_address(&shared.work_empty[slot]), (announced / kAnnounced & 1) ^ 1);
        if (lane == 0) {
            shared.work[slot] = work;
            barrier_arrive(shared_address(&shared.work_full[slot]));
        }
        announced++;
    }

    // What rows that see nothing give: zeros, and minus infinity.
    __device__ void store_nothing(const Work& work) const {
        const int rows = min(kQueries, work.query_len - work.query);
        const int64_t token = int64_t(work.query_start) + work.query;
#pragma unroll 1
        for (int row = 0; row < rows; row++) {
            auto* out = static_cast<typename Tile::Element*>(p.out) + (token + row) * p.out_token_stride +
                        work.head * p.out_head_stride;
#pragma unroll 1
            for (int column = lane * 8; column < Tile::kValue; column += 32 * 8) {
                *reinterpret_cast<uint4*>(out + column) = make_uint4(0, 0, 0, 0);
            }
            if (lane == 0 && p.lse) p.lse[work.head * p.lse_head_stride + token + row] = -INFINITY;
        }
    }
};

// One thread brings what the announced tiles need.
template <typename Tile>
struct Producer {
    const KernelParams& p;
    const Maps& maps;
    Shared<Tile>& shared;
    Position key, value;

    __device__ void bring(const CUtensorMap& map, const void* to, uint64_t& full, int column, int head, int row, int end) {
        tma_load(&map, shared_address(to), shared_address(&full), column, head, row, end);
    }

    __device__ void bring_query(const Work& work, int consumer) {
        // Never a box that lies behind the last row altogether: with bounds far apart the copy engine faults on it. Rows that
        // do not exist are computed with whatever comes, and not stored.
        const int query = min(work.query + consumer * kRows, work.query_len - 1);
        const int row = query + p.max_query_len - work.query_len, end = work.query_start + work.query_len;
        uint64_t& full = shared.query_full[consumer];
        barrier_expect(shared_address(&full), Tile::kQueryBytes);
        for (int panel = 0; panel < Tile::kQkPanels; panel++) {
            const bool rope = panel == Tile::kNopePanels;
            bring(rope ? maps.query_rope : maps.query, shared.query[consumer] + panel * Tile::kQueryPanelBytes, full,
                  rope ? 0 : panel * kPanel, work.head, row, end);
        }
    }

    __device__ void bring_key(const Work& work, int block) {
        const int row = block * Tile::kKeys + p.max_key_len - work.key_len;
        barrier_wait(shared_address(&shared.key_empty[key.stage]), key.phase ^ 1);
        uint64_t& full = shared.key_full[key.stage];
        barrier_expect(shared_address(&full), Tile::kKeyBytes);
        for (int panel = 0; panel < Tile::kQkPanels; panel++) {
            const bool rope = panel == Tile::kNopePanels;
            bring(rope ? maps.key_rope : maps.key, shared.key[key.stage] + panel * Tile::kKeyPanelBytes, full,
                  rope ? 0 : panel * kPanel, rope && !p.rope_per_head ? 0 : work.head, row, work.key_end);
        }
        key.advance();
    }

    __device__ void bring_value(const Work& work, int block) {
        const int row = block * Tile::kKeys + p.max_key_len - work.key_len;
        barrier_wait(shared_address(&shared.value_empty[value.stage]), value.phase ^ 1);
        uint64_t& full = shared.value_full[value.stage];
        barrier_expect(shared_address(&full), Tile::kValueBytes);
        for (int panel = 0; panel < Tile::kValuePanels; panel++) {
            bring(maps.value, shared.value[value.stage] + panel * Tile::kKeyPanelBytes, full, panel * kPanel, work.head,
                  row, work.key_end);
        }
        value.advance();
    }

    __device__ void run() {
        for (int begun = 0;; begun++) {
            const int slot = begun % kAnnounced;
            barrier_wait(shared_address(&shared.work_full[slot]), begun / kAnnounced & 1);
            const Work work = shared.work[slot];
            if (work.blocks == 0) break;
            // The key before the query: its place is free before the last scores of the tile before are done.
            bring_key(work, work.blocks - 1);
            for (int consumer = 0; consumer < kConsumers; consumer++) {
                barrier_wait(shared_address(&shared.query_empty[consumer]), (begun & 1) ^ 1);
                bring_query(work, consumer);
            }
            for (int block = work.blocks - 2; block >= 0; block--) {
                bring_key(work, block);
                bring_value(work, block + 1);
            }
            bring_value(work, 0);
            barrier_arrive(shared_address(&shared.work_empty[slot]));
        }
    }
};

// What a thread holds of its two query rows.
template <typename Tile>
struct Rows {
    float out[Tile::kValue / 2];
    uint32_t weights[Tile::kKeySteps][4];
    // Weights are 2^(score - reference), scores in units of log2. The reference is near the largest score so far: it rises
    // only when a weight, or a thread's sum of weights, would pass kRise. Weights up to that do no harm, and the output
    // hardly ever needs a correction.
    float reference[2], sum[2];
    // What the output so far has to be multiplied by before the next weights count, and whether any lane's is not 1.
    float correction[2];
    bool corrected;

    static constexpr float kRise = 256.f, kRiseLog2 = 8.f;
    // Sums from here on are not to be trusted: their weights may have overflowed, and 1 over them would be flushed to 0.
    static constexpr float kLost = 1e30f;

    // Before the first block of a tile.
    __device__ __forceinline__ void clear() {
        reference[0] = reference[1] = -INFINITY;
        sum[0] = sum[1] = 0.f;
    }

    // Takes the scores of one block and leaves the weights in their place.
    __device__ __forceinline__ void absorb(float (&scores)[Tile::kKeys / 2], float scale_log2) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            float largest = -INFINITY;
#pragma unroll
            for (int i = 0; i < Tile::kKeys / 8; i++) {
                largest = fmaxf(largest, fmaxf(scores[4 * i + 2 * row], scores[4 * i + 2 * row + 1]));
            }
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            const float before = reference[row];
            float now = fmaxf(before, largest * scale_log2);
            if (now - before <= kRiseLog2) now = before;
            reference[row] = now;
            // A row that has seen nothing yet keeps -inf: subtracting it from itself would give NaN.
            const float shift = now == -INFINITY ? 0.f : now;
            correction[row] = exp2_approx(before - shift);
            sum[row] = sum[row] * correction[row] + weigh(scores, row, scale_log2, shift);
        }
        corrected = __any_sync(~0u, correction[0] != 1.f || correction[1] != 1.f);
    }

    // The same without looking for the largest score first: the sums of the weights tell afterwards whether the reference
    // has to rise. False if they are too large for that, as for a row without a reference; then the scores are lost.
    __device__ __forceinline__ bool absorb_by_sum(float (&scores)[Tile::kKeys / 2], float scale_log2) {
        float total[2];
#pragma unroll
        for (int row = 0; row < 2; row++) total[row] = weigh(scores, row, scale_log2, reference[row]);
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

    // Turns a row's scores into weights and returns their sum.
    __device__ __forceinline__ static float weigh(float (&scores)[Tile::kKeys / 2], int row, float scale_log2, float shift) {
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
        return total;
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

    __device__ __forceinline__ void rescale() {
        if (!corrected) return;
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

    // Waits for nothing, in a way that needs `sum`, which is never negative. The exponentials belong before the wait for the
    // products that hide them; ptxas would sink them behind it, but not across a loop that needs their sum. The barrier is
    // one that nobody arrives at: a warp may come here long after another of its warpgroup has released what it read.
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

    // The number of blocks that every row of this warpgroup sees whole, told to be the same for all lanes, as in blocks_of().
    __device__ __forceinline__ int unmasked_blocks(const Work& work) const {
        const int offset = work.key_len - work.query_len;
        const int end = p.causal ? min(work.key_len, work.query + warpgroup * 64 + offset + 1) : work.key_len;
        return __shfl_sync(~0u, max(end, 0) / Tile::kKeys, 0);
    }

    // Enqueues the scores of the key block at hand.
    __device__ __forceinline__ void begin_scores(float (&scores)[Tile::kKeys / 2]) const {
        settle(scores);
        cute::warpgroup_arrive();
        multiply_query_key<Tile>(scores, shared_address(shared.query[warpgroup]), shared_address(shared.key[key.stage]));
        cute::warpgroup_commit_batch();
    }

    // Enqueues the output of the value block at hand. The output so far is corrected as late as that: behind scores in
    // flight, where it costs nothing.
    __device__ __forceinline__ void begin_output(Rows<Tile>& rows, bool first) const {
        if (!first) rows.rescale();
        settle(rows.weights);
        settle(rows.out);
        barrier_wait(shared_address(&shared.value_full[value.stage]), value.phase);
        cute::warpgroup_arrive();
        multiply_weight_value<Tile>(rows.out, rows.weights, shared_address(shared.value[value.stage]), !first);
        cute::warpgroup_commit_batch();
    }

    __device__ __forceinline__ void begin_step(float (&scores)[Tile::kKeys / 2], Rows<Tile>& rows) const {
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

    // Ends a step: the softmax of the scores in flight, up to the weights, behind the output that was enqueued after them.
    __device__ __forceinline__ void end_step(float (&scores)[Tile::kKeys / 2], const Work& work, int block, int unmasked,
                                             Rows<Tile>& rows) {
        cute::warpgroup_wait<1>();
        settle(scores);
        release_scores(block);
        if (block >= unmasked) mask(scores, work, block);
        rows.absorb(scores, p.scale_log2);
        hold(rows.sum[0] + rows.sum[1]);
        cute::warpgroup_wait<0>();
        end_output(rows);
        rows.round(scores);
    }

    // The same for a block that every row sees whole. It keeps the key block until the softmax is done: if a score lies so
    // far above the reference that its weight overflows, each warp computes its scores once more.
    __device__ __forceinline__ void end_step_unmasked(float (&scores)[Tile::kKeys / 2], Rows<Tile>& rows) {
        cute::warpgroup_wait<1>();
        settle(scores);
        if (!rows.absorb_by_sum(scores, p.scale_log2)) {
            multiply_query_key_by_warp<Tile>(scores, shared_address(shared.query[warpgroup]), shared_address(shared.key[key.stage]),
                                             thread);
            rows.absorb(scores, p.scale_log2);
        }
        __syncwarp();
        release_scores(-1);
        cute::warpgroup_wait<0>();
        end_output(rows);
        rows.round(scores);
    }

    // What is left of a tile when its last output is on the way: where it goes and by what it is multiplied.
    struct Finished {
        typename Tile::Element* out;
        float factor[2];
        bool valid[2];
    };

    __device__ __forceinline__ Finished finish(const Work& work, const Rows<Tile>& rows) const {
        Finished finished;
        const int query = work.query + row_in_tile();
        const int64_t token = int64_t(work.query_start) + query;
        finished.out = static_cast<typename Tile::Element*>(p.out) + token * p.out_token_stride +
                       work.head * p.out_head_stride + 8 * (thread % 4);
#pragma unroll
        for (int row = 0; row < 2; row++) {
            float sum = rows.sum[row];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            finished.factor[row] = sum > 0.f ? __fdividef(1.f, sum) : 0.f;
            finished.valid[row] = query + 8 * row < work.query_len;
            if (finished.valid[row] && thread % 4 == 0 && p.lse) {
                p.lse[work.head * p.lse_head_stride + token + 8 * row] =
                    sum > 0.f ? rows.reference[row] * 0.693147180559945309f + __logf(sum) : -INFINITY;
            }
        }
        return finished;
    }

    // Writes both rows. Four neighbouring lanes hold two columns each of every eight; they exchange them so that each writes
    // sixteen bytes.
    __device__ __forceinline__ void store(const Finished& finished, const Rows<Tile>& rows) const {
#pragma unroll
        for (int row = 0; row < 2; row++) {
#pragma unroll
            for (int first = 0; first < Tile::kValue / 8; first += 4) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float* pair = &rows.out[4 * (first + i) + 2 * row];
                    words[i] = pack<typename Tile::Element>(pair[0] * finished.factor[row], pair[1] * finished.factor[row]);
                }
                transpose_in_quad(words, thread % 4);
                if (finished.valid[row]) {
                    *reinterpret_cast<uint4*>(finished.out + 8 * row * p.out_token_stride + 8 * first) =
                        make_uint4(words[0], words[1], words[2], words[3]);
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

    // The tile stays in shared memory: its registers are needed for the products.
    __device__ __forceinline__ const Work& await_work(int begun) const {
        const int slot = begun % kAnnounced;
        barrier_wait(shared_address(&shared.work_full[slot]), begun / kAnnounced & 1);
        return shared.work[slot];
    }

    // The same for all lanes. Told so, the compiler keeps what depends on it in uniform registers.
    __device__ __forceinline__ static int blocks_of(const Work& work) { return __shfl_sync(~0u, work.blocks, 0); }

    // Steps go on across tiles: the first scores of a tile are in flight with the last output of the one before, and that
    // output is stored behind the second scores.
    __device__ void run() {
        if (warpgroup == kConsumers - 1) pass_turn();
        int blocks = blocks_of(await_work(0));
        if (blocks == 0) return;
        Rows<Tile> rows = {};
        Finished before = {};
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
            if (blocks > unmasked_blocks(shared.work[0])) mask(scores, shared.work[0], blocks - 1);
            rows.clear();
            rows.absorb(scores, p.scale_log2);
            rows.round(scores);
        }
        int begun = 0;
        for (;; begun++) {
            const Work& work = shared.work[begun % kAnnounced];
            if (blocks > 1) {
                const int unmasked = unmasked_blocks(work);
                {
                    float scores[Tile::kKeys / 2];
                    barrier_wait(shared_address(&shared.key_full[key.stage]), key.phase);
                    take_turn();
                    begin_scores(scores);
                    pass_turn();
                    store(before, rows);
                    take_turn();
                    begin_output(rows, true);
                    pass_turn();
                    end_step(scores, work, blocks - 2, unmasked, rows);
                }
                for (int block = blocks - 3; block >= 0; block--) {
                    for (; block > 0 && block < unmasked; block--) {
                        float scores[Tile::kKeys / 2];
                        begin_step(scores, rows);
                        end_step_unmasked(scores, rows);
                    }
                    // The last block gives its keys and the query rows back early, for the next tile.
                    float scores[Tile::kKeys / 2];
                    begin_step(scores, rows);
                    end_step(scores, work, block, unmasked, rows);
                }
            }
            const Work& next = await_work(begun + 1);
            const int next_blocks = blocks_of(next);
            if (next_blocks == 0) break;
            float scores[Tile::kKeys / 2];
            barrier_wait(shared_address(&shared.query_full[warpgroup]), (begun + 1) & 1);
            barrier_wait(shared_address(&shared.key_full[key.stage]), key.phase);
            take_turn();
            begin_scores(scores);
            if (blocks == 1) {
                pass_turn();
                store(before, rows);
                take_turn();
            }
            begin_output(rows, blocks == 1);
            pass_turn();
            before = finish(work, rows);
            __syncwarp();
            release(shared.work_empty[begun % kAnnounced]);
            rows.clear();
            end_step(scores, next, next_blocks - 1, unmasked_blocks(next), rows);
            blocks = next_blocks;
        }
        if (blocks == 1) store(before, rows);
        begin_output(rows, blocks == 1);
        cute::warpgroup_wait<0>();
        end_output(rows);
        store(finish(shared.work[begun % kAnnounced], rows), rows);
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
            barrier_init(shared_address(&shared.work_empty[slot]), 4 * kConsumers + 1);
        }
        barrier_init(shared_address(&shared.idle), 1);
        fence_barrier_init();
    }
    __syncthreads();

    if (warpgroup == 0) {
        registers_shrink<64>();
        if (threadIdx.x == 0) Producer<Tile>{p, maps, shared}.run();
        if (threadIdx.x / 32 == 1) Scheduler<Tile>{p, shared, int(threadIdx.x % 32)}.run();
    } else {
        registers_grow<216>();
        Consumer<Tile>{p, shared, warpgroup - 1, int(threadIdx.x % 128)}.run();
    }
}

}  // namespace mla::sm90::prefill
