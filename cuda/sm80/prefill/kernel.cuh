// Expanded attention on mma.sync: one CTA per query tile and head.
//
// Queries stay in shared memory. Each warp computes the scores, softmax and output of its own rows.
// Values are copied while scores are computed, and the next keys after that. One stage of each is
// therefore enough, and a second CTA of the SM uses the tensor cores while this one computes
// exponentials.
#pragma once

#include <cstring>
#include <type_traits>

#include "loader.cuh"
#include "output.cuh"
#include "ptx/barrier.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"
#include "thread_position.cuh"

namespace mla::sm80::prefill {

// S = Q K^T: 16 * kWarpTiles rows by kKeys keys. Calls `begun` when the loads of the first operands
// have been issued.
template <class C, class Begun>
__device__ __forceinline__ void multiply_keys(float (&s)[C::kWarpTiles][C::kKeys / 8][4],
                                              uint32_t a_at, uint32_t b_at, const Begun& begun) {
    using T = typename C::Element;
    using Tile = typename C::QkRows;
    constexpr int kPairs = C::kKeys / 16;
#pragma unroll
    for (int tile = 0; tile < C::kWarpTiles; ++tile)
#pragma unroll
        for (int block = 0; block < C::kKeys / 8; ++block)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[tile][block][i] = 0.f;
#pragma unroll
    for (int step = 0; step < C::kQkDim / 16; ++step) {
        uint32_t a[C::kWarpTiles][4], b[kPairs][4];
#pragma unroll
        for (int tile = 0; tile < C::kWarpTiles; ++tile)
            ptx::ldmatrix_x4(a[tile], Tile::right(a_at, step * 2) + tile * 16 * Tile::kPitch);
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair)
            ptx::ldmatrix_x4(b[pair], Tile::right(b_at, step * 2) + pair * 16 * Tile::kPitch);
        if (step == 0) begun();
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair)
#pragma unroll
            for (int tile = 0; tile < C::kWarpTiles; ++tile) {
                ptx::mma_m16n8k16<T>(s[tile][pair * 2], a[tile], b[pair][0], b[pair][1]);
                ptx::mma_m16n8k16<T>(s[tile][pair * 2 + 1], a[tile], b[pair][2], b[pair][3]);
            }
    }
}

// For each of two 16-bit numbers: sets all bits if it is infinite or NaN, and clears all bits
// otherwise.
template <typename T>
__device__ __forceinline__ uint32_t nonfinite(uint32_t word) {
    constexpr uint32_t exponents = std::is_same_v<T, __half> ? 0x7c007c00u : 0x7f807f80u;
    return __vcmpeq2(word & exponents, exponents);
}

// True if any of the values that this thread has copied to the stage is infinite or NaN.
template <class C>
__device__ __forceinline__ bool has_nonfinite(uint32_t stage, unsigned thread) {
    constexpr int kStep = C::kThreads / 8;
    static_assert(C::VRows::kSwizzled);
    // One added to an exponent of all ones carries into the sign.
    constexpr bool half = std::is_same_v<typename C::Element, __half>;
    constexpr uint32_t exponents = half ? 0x7c007c00u : 0x7f807f80u;
    constexpr uint32_t one = half ? 0x04000400u : 0x00800080u;
    const uint32_t own = stage + C::VRows::at(thread / 8, thread % 8);
    uint32_t found = 0;
#pragma unroll
    for (int row = 0; row < C::kKeys; row += kStep)
#pragma unroll
        for (int j = 0; j < C::kVDim / 64; ++j) {
            const uint4 x = ptx::ld_shared_v4(own + row * C::VRows::kPitch + j * 128);
            found |= ((x.x & exponents) + one) | ((x.y & exponents) + one) |
                     ((x.z & exponents) + one) | ((x.w & exponents) + one);
        }
    return (found & 0x80008000u) != 0;
}

// O += P V. P is computed between the MMAs. With `kFinite`, values that are not finite count as 0.
template <class C, bool kFinite>
__device__ __forceinline__ void multiply_values(float (&o)[C::kWarpTiles][C::kVDim / 8][4],
                                                const float (&s)[C::kWarpTiles][C::kKeys / 8][4],
                                                Softmax<C>& softmax, float scale, uint32_t b_at) {
    using T = typename C::Element;
    using Tile = typename C::VRows;
    constexpr int kSteps = C::kKeys / 16, kPairs = C::kVDim / 16, kWords = 4 * C::kWarpTiles;
    uint32_t p[kSteps][C::kWarpTiles][4];
    const auto make = [&](int step, int word) {
        p[step][word / 4][word % 4] =
            softmax.probabilities(s[word / 4], word / 4, step, word % 4, scale);
    };
#pragma unroll
    for (int word = 0; word < kWords; ++word) make(0, word);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
            uint32_t b[4];
            ptx::ldmatrix_x4_trans(b, Tile::right(b_at, pair * 2) + step * 16 * Tile::kPitch);
            if constexpr (kFinite) {
                // The words are handled one after another: there are no registers for many at the
                // same time.
                __syncwarp();
#pragma unroll
                for (uint32_t& word : b) word &= ~nonfinite<T>(word);
            }
#pragma unroll
            for (int tile = 0; tile < C::kWarpTiles; ++tile) {
                ptx::mma_m16n8k16<T>(o[tile][pair * 2], p[step][tile], b[0], b[1]);
                ptx::mma_m16n8k16<T>(o[tile][pair * 2 + 1], p[step][tile], b[2], b[3]);
            }
            if (step + 1 < kSteps)
#pragma unroll
                for (int word = kWords * pair / kPairs; word < kWords * (pair + 1) / kPairs; ++word)
                    make(step + 1, word);
        }
}

// Adds the values that are not finite to the rows that see them: row r of the warp sees the keys
// below `limit` + r * per_row.
template <class C>
__device__ __forceinline__ void add_nonfinite(float (&o)[C::kWarpTiles][C::kVDim / 8][4],
                                              uint32_t values, int limit, int per_row) {
    using T = typename C::Element;
    const int lane = ptx::laneid();
#pragma unroll 1
    for (int key = 0; key < C::kKeys; ++key)
#pragma unroll
        for (int block = 0; block < C::kVDim / 8; ++block) {
            const uint32_t pair = ptx::ld_shared_s32(values + C::VRows::at(key, block % 8) +
                                                     block / 8 * 128 + lane % 4 * 4);
            const uint32_t bits = nonfinite<T>(pair);
            if (bits == 0) continue;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if ((bits >> 16 * i & 1) == 0) continue;
                T number;
                const uint16_t half_word = pair >> 16 * i;
                memcpy(static_cast<void*>(&number), &half_word, sizeof(number));
                const float value = number;
#pragma unroll
                for (int tile = 0; tile < C::kWarpTiles; ++tile)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        if (key < limit + (tile * 16 + half * 8 + lane / 4) * per_row)
                            o[tile][block][half * 2 + i] += value;
            }
        }
}

// Masks the keys from `limit` + row * per_row on, counted from the tile's first key.
template <class C>
__device__ __forceinline__ void mask_keys(float (&s)[C::kWarpTiles][C::kKeys / 8][4], int limit,
                                          int per_row) {
    const int lane = ptx::laneid();
#pragma unroll
    for (int tile = 0; tile < C::kWarpTiles; ++tile)
#pragma unroll
        for (int block = 0; block < C::kKeys / 8; ++block)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = tile * 16 + i / 2 * 8 + lane / 4;
                const int key = block * 8 + lane % 4 * 2 + i % 2;
                if (key >= limit + row * per_row) s[tile][block][i] = -INFINITY;
            }
}

template <class C>
__global__ __launch_bounds__(C::kThreads, C::kCtasPerSm) void prefill_kernel(
    const __grid_constant__ KernelParams p) {
    WorkItem item;
    if (!TileScheduler<C>(p).find(item)) return;
    const int query_begin = p.cu_query_lens[item.request];
    const int queries = p.cu_query_lens[item.request + 1] - query_begin;
    const int key_begin = p.cu_key_lens[item.request];
    const int keys = p.cu_key_lens[item.request + 1] - key_begin;
    const int first_row = item.number * C::kRows;
    // Keys that some row of the tile sees.
    const int last_row = min(first_row + C::kRows, queries) - 1;
    const int visible = p.causal ? min(max(keys - queries + last_row + 1, 0), keys) : keys;
    // The CTA's split of these: KV tiles from `first_tile` on, keys up to `needed`.
    const int tiles = (visible + C::kKeys - 1) / C::kKeys;
    const int first_tile = item.split * tiles / item.splits;
    const int needed = min((item.split + 1) * tiles / item.splits * C::kKeys, visible);

    const uint32_t shared = ptx::shared_address(ptx::dynamic_shared());
    const uint32_t key_stage = shared + C::kKeyOffset, value_stage = shared + C::kValueOffset;
    const ThreadPosition position;
    // Volatile, because the compiler must not keep in registers what it has read.
    auto& state = *reinterpret_cast<volatile CtaState*>(ptx::dynamic_shared() + C::kStateOffset);
    if (threadIdx.x == 0) {
        state.query_begin = query_begin;
        state.rows = queries - first_row;
        state.first_row = first_row;
        state.head = item.head;
        state.nope =
            p.key_nope + key_begin * p.key_nope_token_stride + item.head * p.key_nope_head_stride;
        state.rope =
            p.key_rope + key_begin * p.key_rope_token_stride + item.head * p.key_rope_head_stride;
        state.values = p.value + key_begin * p.value_token_stride + item.head * p.value_head_stride;
        state.first_tile = first_tile;
        state.needed = needed;
        state.whole_end = needed / C::kKeys - (needed % C::kKeys != 0);
        state.last_whole = needed / C::kKeys - 1;
        state.seen = p.causal ? keys - queries + first_row + 1 : keys;
        state.splits = item.splits;
        state.split = item.split;
        state.counter = item.counter;
        state.first_slot = item.first_slot;
        state.patience = item.patience;
        state.nonfinite = -1;
    }
    const char* query_rows =
        p.query + query_begin * p.query_token_stride + item.head * p.query_head_stride;
    TileCopy<C::kRows, C::kQkDim, C::kThreads>(
        {query_rows, p.query_token_stride, query_rows, 0, C::kQkDim}, first_row, position.thread())
        .run(shared, queries - first_row);
    __syncthreads();

    const auto key_copy = [&](int key_tile, unsigned thread) {
        const Source keys = {state.nope, p.key_nope_token_stride, state.rope,
                             p.key_rope_token_stride, C::kNopeDim > 0 ? C::kNopeDim : p.nope_dim};
        return TileCopy<C::kKeys, C::kQkDim, C::kThreads>(keys, key_tile * C::kKeys, thread);
    };
    const auto value_copy = [&](int key_tile) {
        const char* rows = state.values;
        return TileCopy<C::kKeys, C::kVDim, C::kThreads>(
            {rows, p.value_token_stride, rows, 0, C::kVDim}, key_tile * C::kKeys,
            position.thread());
    };
    // Number of keys from a tile's first one on, and number of those that the warp's first row
    // sees.
    const auto rest_from = [&](int key_tile) { return state.needed - key_tile * C::kKeys; };
    const auto seen_from = [&](int key_tile) {
        return state.seen + (p.causal ? position.first_row<C>() : 0) - key_tile * C::kKeys;
    };
    int key_tile = state.first_tile;
    if (rest_from(key_tile) > 0)
        key_copy(key_tile, position.thread()).run(key_stage, rest_from(key_tile));
    ptx::cp_async_commit_group();

    float o[C::kWarpTiles][C::kVDim / 8][4] = {};
    Softmax<C> softmax;
    const auto attend = [&](int key_tile, auto plain) {
        constexpr bool kPlain = decltype(plain)::value;
        // Waits for the values, and issues the copies of the next keys. Returns false if a value is
        // not finite. Rows that do not see all of the tile must then not multiply by the value:
        // their P is 0, and 0 times NaN is NaN. Warps come to the barrier below from two places.
        const auto begin_values = [&] {
            const unsigned thread = position.thread();
            ptx::cp_async_wait_group<0>();
            if (!kPlain && has_nonfinite<C>(value_stage, position.thread()))
                state.nonfinite = key_tile;
            // These values have landed, and no warp needs these keys any more.
            ptx::barrier_sync_all();
            if (kPlain)
                // Copies the last tile once more if there is none behind it.
                key_copy(min(key_tile + 1, int(state.last_whole)), thread).run(key_stage);
            else if (rest_from(key_tile + 1) > 0)
                key_copy(key_tile + 1, thread).run(key_stage, rest_from(key_tile + 1));
            ptx::cp_async_commit_group();
            return kPlain || state.nonfinite != key_tile;
        };
        // These addresses are computed before the barrier, since they take time.
        const auto values = value_copy(key_tile);
        const unsigned thread = position.thread();
        // Both expressions give the same number. In each case, the one is used that avoids a spill
        // by ptxas.
        const int warp = C::kQkDim == 128 ? int(thread / 32) : ptx::tid_x() / 32;
        const bool idle = warp * C::kWarpRows >= state.rows ||
                          (!kPlain && seen_from(key_tile) + (p.causal ? C::kWarpRows - 1 : 0) <= 0);
        ptx::cp_async_wait_group<0>();
        // These keys have landed, and no warp needs the previous values any more.
        __syncthreads();
        const auto copy_values = [&] {
            if (kPlain)
                values.run(value_stage);
            else
                values.run(value_stage, rest_from(key_tile));
            ptx::cp_async_commit_group();
        };
        if (idle) {
            copy_values();
            begin_values();
            return;
        }
        float s[C::kWarpTiles][C::kKeys / 8][4];
        multiply_keys<C>(s, shared + ThreadPosition::query_at<C>(thread),
                         key_stage + position.key_at<C>(), copy_values);
        const bool finite = begin_values();
        if (!kPlain && min(seen_from(key_tile), rest_from(key_tile)) < C::kKeys)
            mask_keys<C>(s, seen_from(key_tile), p.causal);
        softmax.raise(s, p.scale_log2, [&](int tile, float low, float high) {
#pragma unroll
            for (int j = 0; j < C::kVDim / 8; ++j) {
                o[tile][j][0] *= low;
                o[tile][j][1] *= low;
                o[tile][j][2] *= high;
                o[tile][j][3] *= high;
            }
        });
        const uint32_t values_at = value_stage + position.value_at<C>();
        if (finite) {
            multiply_values<C, false>(o, s, softmax, p.scale_log2, values_at);
        } else {
            multiply_values<C, true>(o, s, softmax, p.scale_log2, values_at);
            add_nonfinite<C>(o, value_stage, seen_from(key_tile), p.causal);
        }
    };
    // These are the KV tiles that all rows see, and that are followed by another whole one, or by
    // none.
    if constexpr (C::kQkDim == 128) {
        // The end is computed anew each time, because keeping it would take one register too many.
#pragma unroll 1
        for (; key_tile < state.whole_end && state.seen - key_tile * C::kKeys >= C::kKeys;
             ++key_tile)
            attend(key_tile, std::true_type{});
    } else {
        const int end = min(int(state.whole_end), state.seen / C::kKeys);
#pragma unroll 1
        for (; key_tile < end; ++key_tile) attend(key_tile, std::true_type{});
    }
#pragma unroll 1
    for (; rest_from(key_tile) > 0; ++key_tile) attend(key_tile, std::false_type{});
    // Without keys, the copies of the queries may still be in flight.
    ptx::cp_async_wait_group<0>();
    __syncthreads();

    Output<C> output(p, state.query_begin, state.rows, state.first_row, state.head);
    const int splits = state.splits;
    if (splits == 1)
        output.write(o, softmax);
    else
        output.combine(o, softmax, state.first_slot,
                       {reinterpret_cast<SplitCounters*>(p.counters) + state.counter, state.split,
                        splits, splits, state.patience});
}

}  // namespace mla::sm80::prefill
