// Partial results: where they lie, how they are merged, and how output rows are written.
//
// Every part of a tile ends with one arrival at the tile's counter. The blocks that have nothing else to do wait there (the
// sharers), and once all parts are in the workspace each of them merges its own share of the tile. Nobody depends on a block
// that may not be running: a sharer that has waited too long gives up, and then the last one to arrive merges everything.
//
// An output warpgroup's accumulators are the transposed output: row = latent value, column = query row. They travel as
// float4: vector v of output thread t (0..255) holds accumulators 4 v .. 4 v + 3 of that thread, at index v * 256 + t.
// With N / 8 column groups, v = tile * (N / 8) + group.
#pragma once

#include "../../common/instructions.cuh"
#include "../../common/mbarrier.cuh"
#include "layout.cuh"

namespace mla::sm90::decode {

constexpr int kOutputThreads = 256;
constexpr int kOutputBarrier = 1;

// Writes output rows from accumulator fragments.
template <typename T>
struct OutputRows {
    T* out;
    int64_t token_stride, head_stride;
    int heads, q_begin;
    // Rows of the request: this block's tile starts at first_row and has `rows` of them.
    int first_row, rows;

    __device__ T* row(int r) const {
        const int row = first_row + r, token = unsigned(row) / unsigned(heads);
        return out + (q_begin + token) * token_stride + (row - token * heads) * head_stride;
    }

    // Writes a float4 of output thread `thread`. Called by whole warps.
    __device__ void write(T* row_pointer, bool valid, int thread, int tile, float4 v) const {
        const int lane = thread & 31;
        const int first = (thread >> 7) * 256 + tile * 64 + ((thread >> 5) & 3) * 16 + 2 * (lane & 3);
        const uint32_t low = transpose_matrix(pack<T>(v.x, v.y));
        const uint32_t high = transpose_matrix(pack<T>(v.z, v.w));
        if (valid) {
            *reinterpret_cast<uint32_t*>(row_pointer + first) = low;
            *reinterpret_cast<uint32_t*>(row_pointer + first + 8) = high;
        }
    }
};

// Writes the log-sum-exp of a row of the request, given in base 2.
__device__ __forceinline__ void write_lse(const KernelParams& p, int row, int q_begin, float lse2) {
    if (!p.lse) return;
    const int token = unsigned(row) / unsigned(p.heads);
    constexpr float ln2 = 0.69314718055994531f;
    p.lse[(row - token * p.heads) * p.lse_head_stride + q_begin + token] = lse2 * ln2;
}

// Base 2 log-sum-exp of a row from its reference maximum and its sum; minus infinity for a row without tokens.
__device__ __forceinline__ float row_lse(float maximum, float sum) { return sum > 0.f ? maximum + log2f(sum) : -INFINITY; }

// The parts of a tile in the workspace.
struct PartialSource {
    const char* partials;
    // In bytes: where part 0 lies, and where part k > 0 lies, less k steps. A workspace has less than 2^32.
    uint32_t first, rest, step;
    int parts;

    __device__ const char* part(int k) const { return partials + (k * step + (k ? rest : first)); }
};

// What several parts amount to for one float4 (rows x, y, x, y): their sum, weighted relative to 2^maximum, and the weights' sum.
struct MergeState {
    float4 value = {0.f, 0.f, 0.f, 0.f};
    float2 maximum = {-INFINITY, -INFINITY}, sum = {0.f, 0.f};

    __device__ void raise_maximum(float2 m) { maximum = make_float2(fmaxf(maximum.x, m.x), fmaxf(maximum.y, m.y)); }

    // Adds a state whose maximum is not above this one's.
    __device__ void add(const MergeState& other) {
        const float x = exp2_approx(other.maximum.x - (maximum.x == -INFINITY ? 0.f : maximum.x));
        const float y = exp2_approx(other.maximum.y - (maximum.y == -INFINITY ? 0.f : maximum.y));
        value = make_float4(fmaf(other.value.x, x, value.x), fmaf(other.value.y, y, value.y), fmaf(other.value.z, x, value.z),
                            fmaf(other.value.w, y, value.w));
        sum = make_float2(fmaf(other.sum.x, x, sum.x), fmaf(other.sum.y, y, sum.y));
    }

    // Adds the state that another lane has under the same maximum.
    __device__ void add_same(int lanes_away) {
        for (float* x : {&value.x, &value.y, &value.z, &value.w, &sum.x, &sum.y}) *x += __shfl_xor_sync(~0u, *x, lanes_away);
    }

    __device__ float4 normalised() const {
        const float x = sum.x > 0.f ? __fdividef(1.f, sum.x) : 0.f, y = sum.y > 0.f ? __fdividef(1.f, sum.y) : 0.f;
        return make_float4(value.x * x, value.y * y, value.z * x, value.w * y);
    }
};

// Where float4 `index` of a partial of the transposed output belongs: two neighbouring rows at one latent value, and at the
// eighth value after it.
template <int N>
struct TransposedFragments {
    __device__ static int column(int index) { return 8 * ((index >> 8) % (N / 8)) + 2 * (index & 3); }
    // One float4 of each row has this.
    __device__ static bool leads(int index) { return (index >> 8) / (N / 8) == 0 && (index & 255) < 4; }

    template <typename T>
    __device__ static void write(const OutputRows<T>& out, int index, float4 v) {
        const int row = column(index), tile = (index >> 8) / (N / 8);
        const int latent = (index >> 7 & 1) * 256 + tile * 64 + (index >> 5 & 3) * 16 + (index >> 2 & 7);
        if (row < out.rows) {
            T* to = out.row(row) + latent;
            to[0] = T(v.x);
            to[8] = T(v.z);
        }
        if (row + 1 < out.rows) {
            T* to = out.row(row + 1) + latent;
            to[0] = T(v.y);
            to[8] = T(v.w);
        }
    }
};

// Parts first, first + step, ... of float4 `index`, whose rows begin at `column`. All reads of a batch are under way together.
template <int N>
__device__ __forceinline__ MergeState merge_some(const PartialSource& source, int index, int column, int first, int step) {
    constexpr int batch = 8;
    MergeState state;
#pragma unroll 1
    for (int k0 = first; k0 < source.parts; k0 += batch * step) {
        float4 x[batch];
        float2 lse[batch];
        float2 top = state.maximum;
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            const int k = k0 + i * step;
            x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
            lse[i] = make_float2(-INFINITY, -INFINITY);
            if (k < source.parts) {
                const char* part = source.part(k);
                lse[i] = *reinterpret_cast<const float2*>(part + PartialLayout<N>::kLseOffset + column * 4);
                x[i] = *(reinterpret_cast<const float4*>(part) + index);
            }
        }
#pragma unroll
        for (int i = 0; i < batch; ++i) top = make_float2(fmaxf(top.x, lse[i].x), fmaxf(top.y, lse[i].y));
        const float2 offset = {top.x == -INFINITY ? 0.f : top.x, top.y == -INFINITY ? 0.f : top.y};
        const float old_x = exp2_approx(state.maximum.x - offset.x), old_y = exp2_approx(state.maximum.y - offset.y);
        state.maximum = top;
        state.value = make_float4(state.value.x * old_x, state.value.y * old_y, state.value.z * old_x, state.value.w * old_y);
        state.sum = make_float2(state.sum.x * old_x, state.sum.y * old_y);
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            const float wx = exp2_approx(lse[i].x - offset.x), wy = exp2_approx(lse[i].y - offset.y);
            state.sum = make_float2(state.sum.x + wx, state.sum.y + wy);
            state.value.x = fmaf(x[i].x, wx, state.value.x);
            state.value.y = fmaf(x[i].y, wy, state.value.y);
            state.value.z = fmaf(x[i].z, wx, state.value.z);
            state.value.w = fmaf(x[i].w, wy, state.value.w);
        }
    }
    return state;
}

// How a merge is divided. With few parts each float4 is one thread's; with many, the parts are dealt out to `kWays` lanes, whose
// sums are added in order. A unit is what is shared out among the blocks: as small as there are many of them.
template <int N>
struct MergeLayout {
    static constexpr int kUnit = N <= 16 ? 16 : 32;  // float4
    static constexpr int kHalves = 32 / kUnit;
    static constexpr int kWays = 8 * kHalves;
    static constexpr int kFewParts = 16;
};

// Merges units [begin, end) of a tile. `scratch` has room for what eight warps make of eight units; where it is null, each warp
// does all of a unit's ways itself, in the same order and thus with the same result.
template <typename T, int N, typename Fragments>
__device__ __forceinline__ void merge_units(const KernelParams& p, const PartialSource source, const OutputRows<T> out, int begin,
                                            int end, MergeState* scratch, int thread) {
    using M = MergeLayout<N>;
    const int lane = thread & 31, warp = thread >> 5, half = lane / M::kUnit, place = lane % M::kUnit;
    const bool few = source.parts <= M::kFewParts, together = !few && scratch;
    const int units = few ? 8 * M::kHalves : 8;
#pragma unroll 1
    for (int first = begin; first < end; first += units) {
        const int last = min(first + units, end);
        const int own = few ? first + warp * M::kHalves + half : first + warp;
        MergeState total;
        // Together: this warp's ways of every unit. Alone: this warp's unit, as a whole or way by way: first their common maximum,
        // then their sum.
        const int rounds = together ? last - first : own >= last ? 0 : few ? 1 : 16;
        const auto common_maximum = [&] {
            if (M::kHalves == 2)
                total.raise_maximum(
                    make_float2(__shfl_xor_sync(~0u, total.maximum.x, 16), __shfl_xor_sync(~0u, total.maximum.y, 16)));
        };
#pragma unroll 1
        for (int i = 0; i < rounds; ++i) {
            const int index = (together ? first + i : own) * M::kUnit + place;
            const int way = together ? warp * M::kHalves + half : few ? 0 : half * 8 + (i & 7);
            const MergeState some = merge_some<N>(source, index, Fragments::column(index), way, few ? 1 : M::kWays);
            if (together) {
                scratch[(i * M::kWays + way) * M::kUnit + place] = some;
            } else {
                if (few || i < 8) total.raise_maximum(some.maximum);
                if (!few && i == 8) common_maximum();
                if (few || i >= 8) total.add(some);
            }
        }
        if (together) named_barrier(kOutputBarrier, kOutputThreads);
        if (own < last) {
            if (together) {
                const MergeState* ways = scratch + (warp * M::kWays + half * 8) * M::kUnit + place;
#pragma unroll
                for (int way = 0; way < 8; ++way) total.raise_maximum(ways[way * M::kUnit].maximum);
                common_maximum();
#pragma unroll
                for (int way = 0; way < 8; ++way) total.add(ways[way * M::kUnit]);
            }
            if (!few && M::kHalves == 2) total.add_same(16);
            const int index = own * M::kUnit + place;
            if (few || half == 0) {
                Fragments::write(out, index, total.normalised());
                if (Fragments::leads(index)) {
                    const int column = Fragments::column(index);
                    if (column < out.rows) write_lse(p, out.first_row + column, out.q_begin, row_lse(total.maximum.x, total.sum.x));
                    if (column + 1 < out.rows)
                        write_lse(p, out.first_row + column + 1, out.q_begin, row_lse(total.maximum.y, total.sum.y));
                }
            }
        }
        if (together) named_barrier(kOutputBarrier, kOutputThreads);
    }
}

__device__ inline MergeRole MergeCounters::arrive(int parts, bool sharer) {
    // Low half: parts that have arrived; high half: sharers that gave up. Nobody gives up once all have arrived.
    constexpr int count = 0xffff, one_gave_up = 0x10000;
    constexpr int64_t patience = 100000;  // clocks
    // Releases what all threads wrote before the barrier that this thread came from, and acquires what others released.
    int seen = atomic_increment(&arrived) + 1;
    MergeRole role = (seen & count) < parts ? MergeRole::none : seen >= one_gave_up ? MergeRole::all : sharer ? MergeRole::share : MergeRole::none;
    if (sharer && role == MergeRole::none) {
        const int64_t start = clock64();
        while (((seen = load_acquire(&arrived)) & count) < parts)
            if (clock64() - start > patience && atomicCAS(&arrived, seen, seen + one_gave_up) == seen) break;
        if ((seen & count) == parts && seen < one_gave_up) role = MergeRole::share;
    }
    return role;
}

// Relaxed is enough: this thread's last read of `arrived` has been answered.
__device__ inline int MergeCounters::leave() { return atomic_increment_relaxed(&left) + 1; }

__device__ inline void MergeCounters::reset() {
    arrived = 0;
    left = 0;
}

}  // namespace mla::sm90::decode
