// A consumer warpgroup.
#pragma once

#include <cstring>

#include "../../common/pipeline.cuh"
#include "../../common/swizzle.cuh"
#include "../../ptx/sm90.cuh"
#include "combine.cuh"
#include "config.cuh"
#include "mma.cuh"
#include "params.cuh"
#include "repair.cuh"
#include "softmax.cuh"

namespace mla::sm90::prefill {

template <typename Config>
struct Consumer {
    const KernelParams& p;
    const Maps& maps;
    Shared<Config>& shared;
    int warpgroup, thread;
    PipelineState<kStages> key, value;
    // Half of the tile's rows that this warpgroup computes: 0, the upper one, or 1. It alternates
    // from tile to tile, as in Producer::load_queries.
    int half = warpgroup;

    // Returns a number that is the same in all lanes. The shuffle tells the compiler so. The
    // compiler then keeps what depends on the number in uniform registers.
    __device__ __forceinline__ static int same(int number) { return __shfl_sync(~0u, number, 0); }

    __device__ int row_in_tile() const {
        return half * kRows + thread / 32 * kWarpRows + thread % 32 / 4;
    }

    // Keeps the compiler from moving uses of registers that an MMA reads or writes across this
    // call.
    template <int registers>
    __device__ __forceinline__ static void settle(float (&d)[registers]) {
#pragma unroll
        for (int i = 0; i < registers; i++) ptx::wgmma_settle(d[i]);
    }
    __device__ __forceinline__ static void settle(uint32_t (&weights)[Config::kKeySteps][4]) {
#pragma unroll
        for (int i = 0; i < Config::kKeySteps * 4; i++) ptx::wgmma_settle(weights[i / 4][i % 4]);
    }

    // Keeps ptxas from moving the exponentials behind this call. They have to come before the wait
    // for the MMAs that run meanwhile and hide them. ptxas moves no instruction across a loop that
    // needs its result, and this is a loop that needs `sum`, the sum of the exponentials. The loop
    // ends at once, because `sum` is never negative and no thread ever arrives at `idle`. It needs
    // a barrier of its own. Any other barrier may be two phases ahead when a late warp gets here,
    // and the wait would not end.
    __device__ __forceinline__ void hold(float sum) const {
        ptx::mbarrier_wait(ptx::shared_address(&shared.idle), 1 ^ uint32_t(sum < 0.f));
    }

    // Order of the two consumers at the tensor cores: one issues its MMAs while the other computes.
    __device__ __forceinline__ void wait_for_mma_order() const { MmaOrderBarrier::wait(warpgroup); }
    __device__ __forceinline__ void arrive_mma_order() const {
        MmaOrderBarrier::arrive_next(warpgroup);
    }

    // Arrives once for each warp.
    __device__ __forceinline__ void release(uint64_t& empty) const {
        if (thread % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&empty));
    }

    // Number of keys of its request that a query row sees.
    __device__ __forceinline__ int visible_keys(const WorkTile& work, int query) const {
        return p.causal ? min(work.key_len, query + work.key_len - work.query_len + 1)
                        : work.key_len;
    }

    // Number of leading chunks of a KV tile with keys that any row of this warp sees. The result is
    // the same in all lanes.
    __device__ __forceinline__ int chunks_seen(const WorkTile& work, int kv_tile) const {
        const int last = work.query + half * kRows + thread / 32 * kWarpRows + kWarpRows - 1;
        return (same(max(visible_keys(work, last) - kv_tile * Config::kKeys, 0)) + kChunkKeys - 1) /
               kChunkKeys;
    }

    // Masks the keys that a row must not see, in the first `chunks` chunks of a KV tile. Most warps
    // have to mask keys in few of these chunks.
    __device__ __forceinline__ void mask(float (&scores)[Config::kKeys / 2], const WorkTile& work,
                                         int kv_tile, int chunks) const {
        const int query = work.query + row_in_tile(), before = kv_tile * Config::kKeys;
        const int fewest = visible_keys(work, same(query)) - before;
        const int end[2] = {visible_keys(work, query) - before - thread % 4 * 2,
                            visible_keys(work, query + 8) - before - thread % 4 * 2};
#pragma unroll
        for (int chunk = 0; chunk < Config::kChunks; chunk++) {
            if (fewest >= kChunkKeys * (chunk + 1) || (chunk > 0 && chunk >= chunks)) continue;
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

    // Number of KV tiles that every row of this warpgroup sees whole; the same in all lanes.
    __device__ __forceinline__ int unmasked_kv_tiles(const WorkTile& work) const {
        return same(max(visible_keys(work, work.query + half * kRows), 0) / Config::kKeys);
    }

    // Enqueues the MMAs for the scores of the current KV tile.
    __device__ __forceinline__ void begin_scores(float (&scores)[Config::kKeys / 2]) const {
        settle(scores);
        ptx::wgmma_fence();
        multiply_query_key<Config>(scores, ptx::shared_address(shared.query[warpgroup]),
                                   ptx::shared_address(shared.key[key.stage]));
        ptx::wgmma_commit_group();
    }

    // Enqueues the MMAs for the output of the current KV tile. Corrects the output so far only now:
    // while the scores are in flight, the correction costs nothing.
    __device__ __forceinline__ void begin_output(Rows<Config>& rows, bool first) const {
        if (!first) rows.rescale();
        settle(rows.weights);
        settle(rows.out);
        ptx::mbarrier_wait(ptx::shared_address(&shared.value_full[value.stage]), value.phase);
        ptx::wgmma_fence();
        multiply_weight_value<Config>(rows.out, rows.weights,
                                      ptx::shared_address(shared.value[value.stage]), !first);
        ptx::wgmma_commit_group();
    }

    __device__ __forceinline__ void begin_step(float (&scores)[Config::kKeys / 2],
                                               Rows<Config>& rows) const {
        ptx::mbarrier_wait(ptx::shared_address(&shared.key_full[key.stage]), key.phase);
        wait_for_mma_order();
        settle(rows.out);
        begin_scores(scores);
        begin_output(rows, false);
        arrive_mma_order();
    }

    // Releases the key stage. After KV tile 0, which is the tile's last one, releases the query
    // rows, too.
    __device__ __forceinline__ void release_scores(int kv_tile) {
        release(shared.key_empty[key.stage]);
        if (kv_tile == 0) release(shared.query_empty[warpgroup]);
        key.advance();
    }

    __device__ __forceinline__ void end_output(Rows<Config>& rows) {
        settle(rows.weights);
        settle(rows.out);
        release(shared.value_empty[value.stage]);
        value.advance();
    }

    // Ends a step. Computes the softmax of the scores in flight, up to the weights. The output MMAs
    // that were enqueued after these scores run meanwhile. In a tile's first KV tile, leaves out
    // the chunks that no row of the warp sees.
    template <bool first>
    __device__ __forceinline__ void end_step(float (&scores)[Config::kKeys / 2],
                                             const WorkTile& work, int kv_tile, int unmasked,
                                             Rows<Config>& rows, int chunks = Config::kChunks) {
        ptx::wgmma_wait_group<1>();
        settle(scores);
        release_scores(kv_tile);
        if (kv_tile >= unmasked) mask(scores, work, kv_tile, chunks);
        rows.template absorb<first>(scores, p.scale_log2, chunks);
        hold(rows.sum[0] + rows.sum[1]);
        ptx::wgmma_wait_group<0>();
        end_output(rows);
        rows.round(scores);
    }

    // Ends a step whose KV tile every row sees whole. Releases the key stage only after the
    // softmax. If a score lies so far above the reference that its weight overflows, each warp
    // computes its scores once more from the keys.
    __device__ __forceinline__ void end_step_unmasked(float (&scores)[Config::kKeys / 2],
                                                      Rows<Config>& rows) {
        ptx::wgmma_wait_group<1>();
        settle(scores);
        if (!rows.absorb_by_sum(scores, p.scale_log2)) {
            multiply_query_key_by_warp<Config>(scores, ptx::shared_address(shared.query[warpgroup]),
                                               ptx::shared_address(shared.key[key.stage]), thread);
            rows.template absorb<false>(scores, p.scale_log2, Config::kChunks);
        }
        __syncwarp();
        release_scores(-1);
        ptx::wgmma_wait_group<0>();
        end_output(rows);
        rows.round(scores);
    }

    // State that the store of a tile needs besides its output. It is a copy, because the next
    // tile's softmax comes before the store.
    struct Finished {
        int slots;  // as in WorkTile
        int head, query, query_start, query_len;
        float reference[2], sum[2];
    };

    // Copies what the store of a tile needs, after the tile's last weights. Releases the tile's
    // description.
    __device__ __forceinline__ Finished finish(const WorkTile& work, int number,
                                               const Rows<Config>& rows) const {
        release(shared.work_empty[PipelineState<kWorkStages>(number).stage]);
        return {work.slots,
                work.head,
                work.query + half * kRows,
                work.query_start,
                work.query_len,
                {rows.reference[0], rows.reference[1]},
                {rows.sum[0], rows.sum[1]}};
    }

    // Writes the warp's rows: the output of a tile, or the partial result of a split.
    __device__ __forceinline__ void store(const Finished& finished,
                                          const Rows<Config>& rows) const {
        float sum[2] = {finished.sum[0], finished.sum[1]};
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
            for (int row = 0; row < 2; row++) sum[row] += __shfl_xor_sync(~0u, sum[row], distance);
        }
        if constexpr (Config::kSplitsKeys) {
            if (finished.slots >= 0) return store_partial(finished, rows, sum);
        }
        store_out(finished, rows, sum);
    }

    __device__ __forceinline__ void store_partial(const Finished& finished,
                                                  const Rows<Config>& rows,
                                                  const float (&sum)[2]) const {
        const int lane = thread % 32, first = finished.query + thread / 32 * kWarpRows;
        const Partial<Config> partial(p, finished.slots >> 16, first % kQueries / kWarpRows);
        if (first < finished.query_len) {
#pragma unroll
            for (int i = 0; i < Config::kValue / 8; i++) {
                const float* out = &rows.out[4 * i];
                partial.out[i * 32 + lane] = make_float4(out[0], out[1], out[2], out[3]);
            }
            if (lane % 4 == 0) {
                partial.sum[lane / 4] =
                    make_float4(finished.reference[0], sum[0], finished.reference[1], sum[1]);
            }
        }
        __syncwarp();
        if (lane == 0) p.arrivals(finished.slots & 0xffff).arrive();
    }

    // Writes one panel of columns after the other. Each panel is rounded into shared memory, and
    // TMA stores it from there. TMA leaves out rows behind the end of the request.
    __device__ __forceinline__ void store_out(const Finished& finished, const Rows<Config>& rows,
                                              const float (&sum)[2]) const {
        const int warp = thread / 32, lane = thread % 32;
        const int first = finished.query + warp * kWarpRows;
        float factor[2];
#pragma unroll
        for (int row = 0; row < 2; row++) {
            factor[row] = row_factor(sum[row]);
            const int query = first + lane / 4 + 8 * row;
            if (lane % 4 == 0 && p.lse && query < finished.query_len) {
                p.lse[finished.head * p.lse_head_stride + finished.query_start + query] =
                    row_log_sum_exp(finished.reference[row], sum[row]);
            }
        }
        const uint32_t staged =
            ptx::shared_address(shared.out[warpgroup * (kRows / kWarpRows) + warp]);
        // Lane 8 i + j gives the address of row j of matrix i: rows 0..7 and 8..15 of eight
        // columns, then of the next eight.
        const int row = lane % 16, chunk = lane / 16;
        // Becomes NaN if an output is not finite. A value that is not finite reaches all rows of
        // its column, so half of the rows are enough to find it.
        uint32_t contaminated = 0;
#pragma unroll
        for (int panel = 0; panel < Config::kValuePanels; panel++) {
            if (lane == 0) ptx::cp_async_bulk_wait_group_read();
            __syncwarp();
#pragma unroll
            for (int i = 0; i < kPanel / 8; i += 2) {
                const float* out = &rows.out[4 * (kPanel / 8 * panel + i)];
                uint32_t words[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    words[j] = ptx::cvt_rn_x2<typename Config::Element>(
                        out[2 * j] * factor[j % 2], out[2 * j + 1] * factor[j % 2]);
                }
                for (int j = 0; j < 4; j += 2)
                    contaminated =
                        ptx::fma_rn_x2<typename Config::Element>(words[j], 0, contaminated);
                ptx::stmatrix_x4(staged + swizzled<128>(row, chunk + i), words[0], words[1],
                                 words[2], words[3]);
            }
            ptx::fence_proxy_async();
            __syncwarp();
            // No box may lie wholly behind the last row: see Producer::load_query.
            if (lane == 0 && first < finished.query_len) {
                ptx::cp_async_bulk_tensor_store(&maps.out, staged, panel * kPanel, finished.head,
                                                first + p.max_query_len - finished.query_len,
                                                finished.query_start + finished.query_len);
            }
        }
        if (__any_sync(~0u, contaminated != 0) && p.causal && lane == 0 &&
            first < finished.query_len)
            contaminated_list().add({finished.query_start + first, finished.head});
    }

    __device__ ContaminatedList contaminated_list() const {
        // Hides the warp's number from the compiler, which would otherwise compute addresses from
        // it early and keep them in registers.
        int warp = threadIdx.x / 32 - 4;
        asm volatile("" : "+r"(warp));
        return {p, shared.contaminated, warp};
    }

    // Reads a tile's description. It stays in shared memory, because the MMAs need the registers
    // that it would take. Only the first lane, which later releases the description, reads it. The
    // shuffles tell the compiler that all lanes have the same values. The compiler then uses
    // uniform registers.
    __device__ __forceinline__ WorkTile work_at(int number) const {
        const uint32_t address =
            ptx::shared_address(&shared.work[PipelineState<kWorkStages>(number).stage]);
        int words[sizeof(WorkTile) / 4];
#pragma unroll
        for (int i = 0; i < sizeof(WorkTile) / 4; i++) words[i] = 0;
        if (thread % 32 == 0) {
#pragma unroll
            for (int i = 0; i < sizeof(WorkTile) / 16; i++) {
                const uint4 four = ptx::ld_shared_v4(address + 16 * i);
                words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z,
                          words[4 * i + 3] = four.w;
            }
        }
#pragma unroll
        for (int i = 0; i < sizeof(WorkTile) / 4; i++) words[i] = same(words[i]);
        WorkTile work;
        memcpy(&work, words, sizeof work);
        return work;
    }

    __device__ __forceinline__ void wait_for_work(int number) const {
        const PipelineState<kWorkStages> at(number);
        ptx::mbarrier_wait(ptx::shared_address(&shared.work_full[at.stage]), at.phase);
    }

    // This is inlined, because MMAs do not stay in flight across a call.
    __device__ __forceinline__ void run() {
        if (thread % 32 == 0) contaminated_list().clear();
        if (warpgroup == kConsumers - 1) arrive_mma_order();
        int number = attend();
        // Hides the thread's number from the compiler. Otherwise, values that depend on it would be
        // computed before attend(), and kept in registers.
        int of_consumers = threadIdx.x - 128;
        asm volatile("" : "+r"(of_consumers));
        const int warp = of_consumers / 32, lane = of_consumers % 32;
        for (;; number++) {
            wait_for_work(number);
            const WorkTile work = work_at(number);
            if (work.is_end()) break;
            const auto release_work = [&] {
                __syncwarp();
                if (lane == 0)
                    ptx::mbarrier_arrive(ptx::shared_address(
                        &shared.work_empty[PipelineState<kWorkStages>(number).stage]));
            };
            if (Config::kSplitsKeys && work.combines()) {
                // Combine reuses the buffers of queries, keys and values. After this barrier, no
                // warp still reads these, or the previous combine's operands.
                CombineBarrier::sync();
                const uint32_t staged =
                    ptx::shared_address(shared.query) + warp * Combine<Config>::kBytes;
                // The description is released after the last read of the counters `arrived`. A CTA
                // leaves as soon as all of its descriptions are released, and the last CTA to leave
                // clears the counters.
                Combine<Config>{p, work, lane, staged}.run(
                    work.key_len, work.slot() - work.first_slot(), warp, release_work);
            } else {
                release_work();
            }
        }
        if (lane == 0) ptx::cp_async_bulk_wait_group();
        __syncwarp();
        Repair<Config>{p, lane}.repair_all(contaminated_list());
    }

    // Computes all tiles. Returns the number of the first description that is not a tile to
    // compute. The pipeline does not drain between tiles. The first scores of a tile are in flight
    // together with the last output of the previous tile. That output is stored after the second
    // scores have been enqueued.
    __device__ __forceinline__ int attend() {
        wait_for_work(0);
        WorkTile work = work_at(0);
        if (!work.computes()) return 0;
        int kv_tiles = work.kv_tiles, unmasked = unmasked_kv_tiles(work);
        Rows<Config> rows = {};
        {
            float scores[Config::kKeys / 2];
            ptx::mbarrier_wait(ptx::shared_address(&shared.query_full[warpgroup]), 0);
            ptx::mbarrier_wait(ptx::shared_address(&shared.key_full[key.stage]), key.phase);
            wait_for_mma_order();
            begin_scores(scores);
            arrive_mma_order();
            ptx::wgmma_wait_group<0>();
            settle(scores);
            release_scores(kv_tiles - 1);
            const int chunks = chunks_seen(work, kv_tiles - 1);
            if (kv_tiles > unmasked) mask(scores, work, kv_tiles - 1, chunks);
            rows.template absorb<true>(scores, p.scale_log2, chunks);
            rows.round(scores);
        }
        Finished before = {}, older = {};
        int number = 0;
        for (;; number++) {
            if (kv_tiles > 1) {
                {
                    float scores[Config::kKeys / 2];
                    ptx::mbarrier_wait(ptx::shared_address(&shared.key_full[key.stage]), key.phase);
                    wait_for_mma_order();
                    begin_scores(scores);
                    arrive_mma_order();
                    if (number > 0) store(before, rows);
                    // This does not wait for the consumers' order. It would come late in that
                    // order, because the other consumer's softmax of its first KV tile takes long.
                    begin_output(rows, true);
                    end_step<false>(scores, work, kv_tiles - 2, unmasked, rows);
                }
                for (int kv_tile = kv_tiles - 3; kv_tile >= 0; kv_tile--) {
                    for (; kv_tile > 0 && kv_tile < unmasked; kv_tile--) {
                        float scores[Config::kKeys / 2];
                        begin_step(scores, rows);
                        end_step_unmasked(scores, rows);
                    }
                    // Before the softmax of the last KV tile, its keys and the query rows are
                    // released, so that the next tile can be loaded.
                    float scores[Config::kKeys / 2];
                    begin_step(scores, rows);
                    end_step<false>(scores, work, kv_tile, unmasked, rows);
                }
            }
            // If this tile has only one KV tile, its output MMAs have not been enqueued, and the
            // previous tile's output has not been stored.
            older = before;
            before = finish(work, number, rows);
            wait_for_work(number + 1);
            work = work_at(number + 1);
            if (!work.computes()) break;
            half ^= 1;
            unmasked = unmasked_kv_tiles(work);
            const int chunks = chunks_seen(work, work.kv_tiles - 1);
            float scores[Config::kKeys / 2];
            ptx::mbarrier_wait(ptx::shared_address(&shared.query_full[warpgroup]),
                               (number + 1) & 1);
            ptx::mbarrier_wait(ptx::shared_address(&shared.key_full[key.stage]), key.phase);
            wait_for_mma_order();
            begin_scores(scores);
            if (kv_tiles == 1) {
                arrive_mma_order();
                if (number > 0) store(older, rows);
                wait_for_mma_order();
            }
            begin_output(rows, kv_tiles == 1);
            arrive_mma_order();
            kv_tiles = work.kv_tiles;
            end_step<true>(scores, work, kv_tiles - 1, unmasked, rows, chunks);
        }
        if (kv_tiles == 1 && number > 0) store(older, rows);
        begin_output(rows, kv_tiles == 1);
        ptx::wgmma_wait_group<0>();
        end_output(rows);
        store(before, rows);
        return number + 1;
    }
};

}  // namespace mla::sm90::prefill
