// Expanded attention on mma.sync: one CTA per tile of query rows and head.
//
// Queries stay in shared memory. Scores, softmax and output are the warp's own. Values are copied
// while scores are computed, and the next keys while values are multiplied: so one stage of each is
// enough, and a second CTA has the matrix units while this one takes exponentials.
#pragma once

#include <cstring>
#include <type_traits>

#include "loader.cuh"
#include "output.cuh"
#include "schedule.cuh"

namespace mla::sm80::prefill {

// S = Q K^T: 16 * kWarpTiles rows by kKeys keys.
template <class C>
__device__ __forceinline__ void multiply_keys(float (&s)[C::kWarpTiles][C::kKeys / 8][4],
                                              uint32_t queries, uint32_t keys) {
    const int lane = ptx::laneid();
#pragma unroll
    for (int tile = 0; tile < C::kWarpTiles; ++tile)
#pragma unroll
        for (int block = 0; block < C::kKeys / 8; ++block)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[tile][block][i] = 0.f;
    using Tile = typename C::QkRows;
    const uint32_t a_at = queries + Tile::at(lane & 15, lane >> 4);
    const uint32_t b_at = keys + Tile::at((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
#pragma unroll
    for (int step = 0; step < C::kQkDim / 16; ++step) {
        uint32_t a[C::kWarpTiles][4];
#pragma unroll
        for (int tile = 0; tile < C::kWarpTiles; ++tile)
            ptx::ldmatrix_x4(a[tile], Tile::right(a_at, step * 2) + tile * 16 * Tile::kPitch);
#pragma unroll
        for (int pair = 0; pair < C::kKeys / 16; ++pair) {
            uint32_t b[4];
            ptx::ldmatrix_x4(b, Tile::right(b_at, step * 2) + pair * 16 * Tile::kPitch);
#pragma unroll
            for (int tile = 0; tile < C::kWarpTiles; ++tile) {
                using T = typename C::Element;
                ptx::mma_m16n8k16<T>(s[tile][pair * 2], a[tile], b[0], b[1]);
                ptx::mma_m16n8k16<T>(s[tile][pair * 2 + 1], a[tile], b[2], b[3]);
            }
        }
    }
}

// Of two 16-bit numbers, all bits of those that are infinite or NaN.
template <typename T>
__device__ __forceinline__ uint32_t nonfinite(uint32_t word) {
    constexpr uint32_t exponents = std::is_same_v<T, __half> ? 0x7c007c00u : 0x7f807f80u;
    return __vcmpeq2(word & exponents, exponents);
}

// Whether this thread finds any such number in its share of a tile of values.
template <class C>
__device__ __forceinline__ bool has_nonfinite(uint32_t values) {
    constexpr int kChunks = C::kKeys * C::VRows::kPitch / 16;
    static_assert(C::VRows::kSwizzled && kChunks % C::kThreads == 0);
    // Of an exponent that is all ones, one more is the sign.
    constexpr bool half = std::is_same_v<typename C::Element, __half>;
    constexpr uint32_t exponents = half ? 0x7c007c00u : 0x7f807f80u;
    constexpr uint32_t one = half ? 0x04000400u : 0x00800080u;
    const uint32_t at = values + ptx::tid_x() * 16;
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < kChunks / C::kThreads; ++i) {
        const uint4 x = ptx::ld_shared_v4(at + i * C::kThreads * 16);
        found |= ((x.x & exponents) + one) | ((x.y & exponents) + one) |
                 ((x.z & exponents) + one) | ((x.w & exponents) + one);
    }
    return (found & 0x80008000u) != 0;
}

// O += P V. With `kFinite`, values that are no finite numbers are taken for 0.
template <class C, bool kFinite>
__device__ __forceinline__ void multiply_values(
    float (&o)[C::kWarpTiles][C::kVDim / 8][4],
    const uint32_t (&p)[C::kWarpTiles][C::kKeys / 16][4], uint32_t values) {
    const int lane = ptx::laneid();
    using Tile = typename C::VRows;
    const uint32_t b_at = values + Tile::at(lane & 15, lane >> 4);
#pragma unroll
    for (int step = 0; step < C::kKeys / 16; ++step)
#pragma unroll
        for (int pair = 0; pair < C::kVDim / 16; ++pair) {
            uint32_t b[4];
            ptx::ldmatrix_x4_trans(b, Tile::right(b_at, pair * 2) + step * 16 * Tile::kPitch);
            using T = typename C::Element;
            if constexpr (kFinite) {
                // One after another: many at the same time take registers that there are not.
                __syncwarp();
#pragma unroll
                for (uint32_t& word : b) word &= ~nonfinite<T>(word);
            }
#pragma unroll
            for (int tile = 0; tile < C::kWarpTiles; ++tile) {
                ptx::mma_m16n8k16<T>(o[tile][pair * 2], p[tile][step], b[0], b[1]);
                ptx::mma_m16n8k16<T>(o[tile][pair * 2 + 1], p[tile][step], b[2], b[3]);
            }
        }
}

// Adds the values that are no finite numbers to the rows that see them: row r of the warp sees the
// keys below `limit` + r * per_row.
template <class C>
__device__ __forceinline__ void add_nonfinite(float (&o)[C::kWarpTiles][C::kVDim / 8][4],
                                              uint32_t values, int limit, int per_row) {
    using T = typename C::Element;
    const int lane = ptx::laneid();
#pragma unroll 1
    for (int key = 0; key < C::kKeys; ++key)
#pragma unroll
        for (int block = 0; block < C::kVDim / 8; ++block) {
            const uint32_t pair =
                ptx::ld_shared_s32(values + C::VRows::at(key, block % 8) + block / 8 * 128 +
                                   lane % 4 * 4);
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

// Masks the keys from `limit` + row * per_row on, counted from the tile's first.
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
__global__ __launch_bounds__(C::kThreads, C::kResident) void prefill_kernel(
    const __grid_constant__ KernelParams p) {
    Tile tile;
    const int split = blockIdx.x % p.splits, block = blockIdx.x / p.splits;
    if (!Schedule<C::kRows>(p).find(block, tile)) return;
    const int query_begin = p.cu_query_lens[tile.request];
    const int queries = p.cu_query_lens[tile.request + 1] - query_begin;
    const int key_begin = p.cu_key_lens[tile.request];
    const int keys = p.cu_key_lens[tile.request + 1] - key_begin;
    const int first_row = tile.number * C::kRows;
    const auto warp_row = [] { return ptx::tid_x() / 32 * 16 * C::kWarpTiles; };
    // Keys that some row of the tile sees.
    const int last_row = min(first_row + C::kRows, queries) - 1;
    const int seen = p.causal ? min(max(keys - queries + last_row + 1, 0), keys) : keys;
    // Of these the CTA has some tiles, up to `needed`.
    const int tiles = (seen + C::kKeys - 1) / C::kKeys;
    const int first_tile = split * tiles / p.splits;
    const int needed = min((split + 1) * tiles / p.splits * C::kKeys, seen);

    const uint32_t shared = ptx::shared_address(ptx::dynamic_shared());
    const uint32_t key_stage = shared + C::kKeyOffset, value_stage = shared + C::kValueOffset;
    // Volatile: what is read is not kept.
    auto& item = *reinterpret_cast<volatile Item*>(ptx::dynamic_shared() + C::kItemOffset);
    if (threadIdx.x == 0) {
        item.query_begin = query_begin;
        item.query_count = queries;
        item.first_row = first_row;
        item.head = tile.head;
        item.nope =
            p.key_nope + key_begin * p.key_nope_token_stride + tile.head * p.key_nope_head_stride;
        item.rope =
            p.key_rope + key_begin * p.key_rope_token_stride + tile.head * p.key_rope_head_stride;
        item.values = p.value + key_begin * p.value_token_stride + tile.head * p.value_head_stride;
        item.needed = needed;
        item.seen = p.causal ? keys - queries + first_row + 1 : keys;
        item.tile = block;
        item.split = split;
    }
    const char* query_rows =
        p.query + query_begin * p.query_token_stride + tile.head * p.query_head_stride;
    copy_rows<C::kRows, C::kQkDim, C::kThreads>(
        shared, {query_rows, p.query_token_stride, query_rows, 0, C::kQkDim}, first_row, queries);
    __syncthreads();
    const auto exists = [&](int key_tile) { return key_tile * C::kKeys < item.needed; };
    const auto stage_of = [&](int key_tile) {
        return key_stage + (C::kKeyStages > 1 ? key_tile % C::kKeyStages * C::kKeyBytes : 0);
    };
    const auto copy_keys = [&](int key_tile) {
        if (exists(key_tile))
            copy_rows<C::kKeys, C::kQkDim, C::kThreads>(
                stage_of(key_tile),
                {item.nope, p.key_nope_token_stride, item.rope, p.key_rope_token_stride,
                 C::kNopeDim > 0 ? C::kNopeDim : p.nope_dim},
                key_tile * C::kKeys, item.needed);
        ptx::cp_async_commit_group();
    };
    const auto copy_values = [&](int key_tile) {
        const char* rows = item.values;
        copy_rows<C::kKeys, C::kVDim, C::kThreads>(
            value_stage, {rows, p.value_token_stride, rows, 0, C::kVDim}, key_tile * C::kKeys,
            item.needed);
        ptx::cp_async_commit_group();
    };
    copy_keys(first_tile);

    // Keys from a tile's first that the warp's first row sees.
    const auto seen_of = [&](int key_tile) {
        return item.seen + (p.causal ? warp_row() : 0) - key_tile * C::kKeys;
    };
    // Whether any row of the warp sees any of them.
    const auto sees = [&](int key_tile) {
        const int last = p.causal ? 16 * C::kWarpTiles - 1 : 0;
        return item.first_row + warp_row() < item.query_count && seen_of(key_tile) + last > 0;
    };
    // How many keys a tile has.
    const auto keys_of = [&](int key_tile) {
        return min(item.needed - key_tile * C::kKeys, C::kKeys);
    };
    // Between a tile's keys and its values. Returns whether rows that do not see all of the tile
    // may multiply by its values: their P is 0 then, and 0 times NaN would be NaN.
    const auto turn_to_values = [&](int key_tile) {
        ptx::cp_async_wait_group<C::kKeyStages - 1>();
        // These values are there, and no warp needs these keys.
        __syncthreads();
        if (C::kKeyStages == 1) copy_keys(key_tile + 1);
        if (item.seen - key_tile * C::kKeys >= keys_of(key_tile)) return true;
        return !ptx::bar_red_or(0, C::kThreads, has_nonfinite<C>(value_stage));
    };
    float o[C::kWarpTiles][C::kVDim / 8][4] = {};
    Softmax<C> softmax;
#pragma unroll 1
    for (int key_tile = first_tile; exists(key_tile); ++key_tile) {
        ptx::cp_async_wait_group<0>();
        // These keys are there, and no warp needs the values before these.
        __syncthreads();
        copy_values(key_tile);
        if (C::kKeyStages > 1) copy_keys(key_tile + 1);
        if (!sees(key_tile)) {
            turn_to_values(key_tile);
            continue;
        }
        float s[C::kWarpTiles][C::kKeys / 8][4];
        multiply_keys<C>(s, shared + warp_row() * C::QkRows::kPitch, stage_of(key_tile));
        const bool finite = turn_to_values(key_tile);
        uint32_t probabilities[C::kWarpTiles][C::kKeys / 16][4];
        {
            if (min(seen_of(key_tile), keys_of(key_tile)) < C::kKeys)
                mask_keys<C>(s, seen_of(key_tile), p.causal);
            float rescale[C::kWarpTiles][2];
            softmax.apply(s, p.scale_log2, rescale, probabilities);
#pragma unroll
            for (int i = 0; i < C::kWarpTiles; ++i)
                if (__any_sync(~0u, rescale[i][0] != 1.f || rescale[i][1] != 1.f))
#pragma unroll
                    for (int j = 0; j < C::kVDim / 8; ++j) {
                        o[i][j][0] *= rescale[i][0];
                        o[i][j][1] *= rescale[i][0];
                        o[i][j][2] *= rescale[i][1];
                        o[i][j][3] *= rescale[i][1];
                    }
        }
        if (finite) {
            multiply_values<C, false>(o, probabilities, value_stage);
        } else {
            multiply_values<C, true>(o, probabilities, value_stage);
            add_nonfinite<C>(o, value_stage, seen_of(key_tile), p.causal);
        }
    }
    // Where there were no keys, the queries.
    ptx::cp_async_wait_group<0>();
    __syncthreads();

    Output<C> output(p, item.query_begin, item.query_count - item.first_row, item.first_row,
                     item.head);
    if (p.splits == 1)
        output.write(o, softmax);
    else
        output.combine(o, softmax,
                       {reinterpret_cast<SplitCounters*>(p.counters) + item.tile,
                        item.split, p.splits, p.splits, p.patience});
}

}  // namespace mla::sm80::prefill
