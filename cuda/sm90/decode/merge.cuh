// Partial results: where they lie, how they are merged, and how output rows are written.
//
// Every part of a tile ends with one arrival at the tile's counter. The blocks that have nothing
// else to do wait there (the sharers), and once all parts are in the workspace each of them merges
// its own share of the tile. Where parts are few, a sharer keeps what its own part has of its share
// in shared memory and does not write it to the workspace. Nobody depends on a block that may not
// be running: when one sharer has waited too long, all of them give up, that is, they write what
// they kept, too, and whoever comes last merges everything.
//
// What output threads have of a part travels as vectors of 16 bytes, each of two rows, one group of
// rows after the other: so each has its place, and a share is of few rows. How the vectors of a
// group lie, and which rows are neighbours, depends on what the accumulators are: transposed
// output, output by rows, or that of an e4m3 cache (a type of fragments each).
#pragma once

#include "../../common/softmax.cuh"
#include "../../ptx/sm80.cuh"
#include "../../ptx/sm90.cuh"
#include "layout.cuh"

namespace mla::sm90::decode {

constexpr int kOutputThreads = 256;
constexpr int kOutputBarrier = 1;

// The query token of a row of a request. Exact, since a request has 1024 rows at most; a division
// takes four times as many instructions.
__device__ __forceinline__ int token_of(int row, float inverse_heads) {
    return int((row + 0.5f) * inverse_heads);
}

// Writes output rows from accumulator fragments.
template <typename T>
struct OutputRows {
    T* out;
    int64_t token_stride, head_stride;
    int heads;
    float inverse_heads;
    int q_begin;
    // Rows of the request: this block's tile starts at first_row and has `rows` of them.
    int first_row, rows;

    __device__ T* row(int r) const {
        const int row = first_row + r, token = token_of(row, inverse_heads);
        return out + (q_begin + token) * token_stride + (row - token * heads) * head_stride;
    }

    // Writes a float4 of output thread `thread`. Called by whole warps.
    __device__ void write(T* row_pointer, bool valid, int thread, int tile, float4 v) const {
        const int lane = thread & 31;
        const int first =
            (thread >> 7) * 64 + tile * 128 + ((thread >> 5) & 3) * 16 + 2 * (lane & 3);
        const uint32_t low = ptx::movmatrix_trans(ptx::cvt_rn_x2<T>(v.x, v.y));
        const uint32_t high = ptx::movmatrix_trans(ptx::cvt_rn_x2<T>(v.z, v.w));
        if (valid) {
            *reinterpret_cast<uint32_t*>(row_pointer + first) = low;
            *reinterpret_cast<uint32_t*>(row_pointer + first + 8) = high;
        }
    }
};

// Writes the log-sum-exp of a row of the request, given in base 2.
__device__ __forceinline__ void write_lse(const KernelParams& p, int row, int q_begin, float lse2) {
    if (!p.lse) return;
    const int token = token_of(row, p.inverse_heads);
    constexpr float ln2 = 0.69314718055994531f;
    p.lse[(row - token * p.heads) * p.lse_head_stride + q_begin + token] = lse2 * ln2;
}

// The parts of a tile in the workspace. `step`, in bytes, is constant, so that the places of parts
// at known distances are, too.
template <uint32_t step>
struct PartialSource {
    static constexpr uint32_t kStep = step;
    const char* partials;
    // In bytes: where part 0 lies, and where part k > 0 lies, less k steps. A workspace has less
    // than 2^32.
    uint32_t first, rest;
    int parts;

    __device__ const char* part(int k) const { return partials + (k * step + (k ? rest : first)); }
};

// The values of a vector: two neighbouring rows in turns, of two tiles of the output (or what takes
// their place).
constexpr int kVectorTiles = kVectorValues / 4;
struct Vector {
    float value[kVectorValues] = {};

    Vector() = default;
    __device__ explicit Vector(uint4 bits) {
        const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
            value[2 * i] = two.x;
            value[2 * i + 1] = two.y;
        }
    }

    // Those of the i-th tile in it.
    __device__ float4 tile(int i) const {
        return make_float4(value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]);
    }

    __device__ Vector times(float2 factors) const {
        Vector product;
#pragma unroll
        for (int i = 0; i < kVectorValues; ++i)
            product.value[i] = value[i] * (i & 1 ? factors.y : factors.x);
        return product;
    }

    __device__ void add(const Vector& other, float2 factors) {
#pragma unroll
        for (int i = 0; i < kVectorValues; ++i)
            value[i] = fmaf(other.value[i], i & 1 ? factors.y : factors.x, value[i]);
    }
};

// Groups of eight rows as they lie in the tile.
struct GroupsOfEight {
    static constexpr int kGroupRows = 8;
    // Which two rows of a group the vectors of an index are of: the first one is twice this.
    __device__ static int rows_of(int index) { return index & 3; }
    // Whether a vector of a group is the first one of its rows.
    __device__ static bool begins_rows(int of_group) { return of_group < 4; }
    // Where a row of the part lies in the tile.
    __device__ static int row_of_tile(int row) { return row; }
};

// Vectors of the transposed output, row = latent value, column = query row: vector v of output
// thread t (0..255) is at index v * 256 + t and holds what that thread has of two tiles and a group
// of eight query rows, v = 2 * group + tile / 2. A float4 of it is of two neighbouring rows at one
// latent value, and at the eighth value after it.
struct TransposedFragments : GroupsOfEight {
    // Where a lane writes of a group of rows.
    template <typename T>
    struct Place {
        T* row;
        bool valid;
    };
    template <typename T>
    __device__ static Place<T> place(const OutputRows<T>& out, int group, int thread) {
        // What a lane writes is of one row.
        const int row = kGroupRows * group + (thread >> 2 & 7);
        return {out.row(row), row < out.rows};
    }
    // Writes merged vector `vector` of an output thread's group. Called by a whole warp; `own` says
    // whether the lane's is to be written.
    template <typename T>
    __device__ static void write(const OutputRows<T>& out, const Place<T>& to, int thread,
                                 int vector, bool own, const Vector& v) {
#pragma unroll
        for (int i = 0; i < kVectorTiles; ++i) {
            // It comes from eight lanes that lie together.
            const bool needed = __shfl_sync(~0u, own, 8 * (thread & 3));
            out.write(to.row, needed && to.valid, thread, vector * kVectorTiles + i, v.tile(i));
        }
    }
};

// Where a thread writes vectors of two rows that it has two neighbouring latent values of at a
// time.
template <typename T>
struct TwoRows {
    T* rows[2];
    bool valid[2];

    __device__ TwoRows(const OutputRows<T>& out, int first, int second, int latent)
        : rows{out.row(first) + latent, out.row(second) + latent},
          valid{first < out.rows, second < out.rows} {}

    __device__ void write(int latent, bool own, float4 v) const {
        if (own && valid[0])
            *reinterpret_cast<uint32_t*>(rows[0] + latent) = ptx::cvt_rn_x2<T>(v.x, v.z);
        if (own && valid[1])
            *reinterpret_cast<uint32_t*>(rows[1] + latent) = ptx::cvt_rn_x2<T>(v.y, v.w);
    }
};

// Vectors of the output by rows. Of the sixteen query rows of a warp, vector v of thread t of
// output warpgroup g is at index v / 4 * 256 + v % 4 * 64 + 32 * g + t % 32; a row and the eighth
// after it are neighbours in the part. A float4 is of both rows at one latent value, and at the
// next.
struct RowFragments {
    static constexpr int kGroupRows = 16;
    __device__ static int rows_of(int index) { return index >> 2 & 7; }
    __device__ static bool begins_rows(int of_group) {
        return of_group < 32 && (of_group & 3) == 0;
    }
    __device__ static int row_of_tile(int row) {
        return (row & ~15) | (row >> 1 & 7) | (row & 1) << 3;
    }

    template <typename T>
    __device__ static TwoRows<T> place(const OutputRows<T>& out, int group, int thread) {
        const int row = kGroupRows * group + rows_of(thread);
        return {out, row, row + 8, (thread & 32) * 2 + (thread >> 6) * 16 + 2 * (thread & 3)};
    }
    template <typename T>
    __device__ static void write(const OutputRows<T>&, const TwoRows<T>& to, int, int vector,
                                 bool own, const Vector& v) {
#pragma unroll
        for (int i = 0; i < kVectorTiles; ++i) to.write(vector * 128 + i * 8, own, v.tile(i));
    }
};

// How a merge is divided, given how many rows a group has.
template <int N, int group_rows>
struct MergeLayout {
    // What is shared out among the blocks, and what some lanes do together, in vectors.
    static constexpr int kUnit = N <= 16 ? 8 : N / 2;
    static constexpr int kUnitBytes = kUnit * 16, kUnits = PartialLayout<N>::kVectors / kUnit;
    // Of a group: vectors of each output thread, and all.
    static constexpr int kThreadVectors = PartialLayout<N>::kGroupVectors * group_rows / 8;
    static constexpr int kGroupVectors = kThreadVectors * kOutputThreads,
                         kGroupUnits = kGroupVectors / kUnit;
    // Of each thread at a time, since its instructions wait for one another: where groups are
    // large, two, of the same rows.
    static constexpr int kTogether = group_rows / 8;
    static constexpr int kWorkers = kOutputThreads / kUnit;
};

// What a part says of two rows that are neighbours in it, of which the first is even: their
// log-sum-exp, and what values have to be multiplied by.
struct PartRows {
    float2 lse = {-INFINITY, -INFINITY};
    float scale = 1.f;

    PartRows() = default;
    // From lse_offset() of the first.
    __device__ explicit PartRows(const char* rows) {
        const float4 v = *reinterpret_cast<const float4*>(rows);
        lse = make_float2(v.x, v.y);
        scale = v.z;
    }
};

// With so many parts or fewer, shares are large, and merged in shared memory. With more, they are
// small, and merged in registers.
constexpr int kFewParts = 16;

// Units [begin, end) of a tile.
struct Share {
    int begin, end;

    __device__ static Share of(int units, int i, int sharers) {
        return {int(unsigned(units * i) / unsigned(sharers)),
                int(unsigned(units * (i + 1)) / unsigned(sharers))};
    }
};

// Merges one share of a tile of few parts, by all output threads. In shared memory lie the parts'
// weights, then the share of the part that it is named after (slot 0), which may be there already,
// then that of the others in order, as many units at a time as there is room for.
//
// This code runs once in a launch, with eight warps: what counts is how many instructions there are
// and how many of them wait for one another. So whatever can be known before all parts are there is
// computed by the constructor.
template <typename T, int N, typename Fragments, typename Source>
struct ShareMerge {
    using M = MergeLayout<N, Fragments::kGroupRows>;
    static constexpr int kUnitBytes = M::kUnitBytes, kWeightBytes = kFewParts * N * 4;

    const KernelParams& p;
    const Source source;
    const OutputRows<T> out;
    const Share share;
    const int part, thread, place, worker;
    uint32_t weights, kept, fetched;
    int first_group, rows, room;
    // This round's units, and how a worker goes through pairs of slot and unit.
    int first, units, slot, unit, slot_step, unit_step;

    __device__ ShareMerge(const KernelParams& p, const Source& source, const OutputRows<T>& out,
                          Share share, int part, uint32_t shared, int bytes, int thread)
        : p(p),
          source(source),
          out(out),
          share(share),
          part(part),
          thread(thread),
          place(thread % M::kUnit),
          worker(thread / M::kUnit) {
        const int size = share.end - share.begin;
        weights = shared;
        kept = shared + kWeightBytes;
        fetched = kept + size * kUnitBytes;
        room = size;
        bytes -= kWeightBytes;
        if (source.parts * size * kUnitBytes > bytes)
            room = unsigned(bytes - size * kUnitBytes) / unsigned((source.parts - 1) * kUnitBytes);
        first_group = unsigned(share.begin) / M::kGroupUnits;
        rows = Fragments::kGroupRows * (unsigned(share.end - 1) / M::kGroupUnits + 1 - first_group);
        plan(share.begin);
    }

    __device__ void plan(int from) {
        first = from;
        units = min(room, share.end - first);
        // Exact for such small numbers.
        const float inverse = __fdividef(1.f, float(units));
        slot_step = int((M::kWorkers + 0.5f) * inverse);
        unit_step = M::kWorkers - slot_step * units;
        slot = int((worker + 0.5f) * inverse);
        unit = worker - slot * units;
        ++slot;
    }

    __device__ const char* slot_source(int slot) const {
        return source.part(slot == 0 ? part : slot - (slot <= part));
    }

    // `there`: whether slot 0 is in shared memory already.
    __device__ void run(bool there) {
        if (!there)
            for (int u = worker; u < share.end - share.begin; u += M::kWorkers)
                ptx::cp_async_16(kept + u * kUnitBytes + place * 16,
                                 slot_source(0) + (share.begin + u) * kUnitBytes + place * 16,
                                 true);
#pragma unroll 1
        while (true) {
            // The rows first: they need not wait for the values, which are under way while the
            // weights are computed.
            Weights of_row;
            if (first == share.begin) of_row.load(*this);
            fetch();
            if (first == share.begin) weigh(of_row);
            ptx::cp_async_wait_all();
            ptx::bar_sync(kOutputBarrier, kOutputThreads);
            add();
            if (first + units == share.end) break;
            ptx::bar_sync(kOutputBarrier, kOutputThreads);
            plan(first + units);
        }
    }

    __device__ void fetch() const {
        uint32_t to = fetched + worker * kUnitBytes + place * 16;
        int s = slot, u = unit;
#pragma unroll 1
        while (s < source.parts) {
            ptx::cp_async_16(to, slot_source(s) + (first + u) * kUnitBytes + place * 16, true);
            to += M::kWorkers * kUnitBytes;
            s += slot_step;
            u += unit_step;
            if (u >= units) {
                u -= units;
                ++s;
            }
        }
    }

    // Of a row, what a lane needs for the weights of its parts. Four lanes have a row, whole warps
    // have rows or none.
    struct Weights {
        static constexpr int kLanes = 4, kMost = kFewParts / kLanes;
        static_assert(N * kLanes <= kOutputThreads, "every row has its lanes");
        float lse[kMost], scale[kMost];

        __device__ void load(const ShareMerge& merge) {
            const int row = merge.thread / kLanes, lane = merge.thread % kLanes;
#pragma unroll
            for (int i = 0; i < kMost; ++i) {
                const int slot = lane + i * kLanes;
                lse[i] = -INFINITY;
                scale[i] = 1.f;
                if (row < merge.rows && slot < merge.source.parts) {
                    const char* part = merge.slot_source(slot);
                    const int of_part = Fragments::kGroupRows * merge.first_group + row;
                    lse[i] = *reinterpret_cast<const float*>(part +
                                                             PartialLayout<N>::lse_offset(of_part));
                    scale[i] = *reinterpret_cast<const float*>(
                        part + PartialLayout<N>::scale_offset(of_part));
                }
            }
        }
    };

    // Finds the weights of the parts; writes the log-sum-exp of the rows that begin in this share.
    __device__ void weigh(const Weights& of_row) const {
        constexpr int lanes = Weights::kLanes, most = Weights::kMost;
        const int row = thread / lanes, lane = thread % lanes;
        if (row >= rows) return;
        const auto& lse = of_row.lse;
        float weight[most], top = fmaxf(fmaxf(lse[0], lse[1]), fmaxf(lse[2], lse[3])), sum = 0.f;
#pragma unroll
        for (int distance = 1; distance < lanes; distance *= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
        const float offset = offset_of(top);
#pragma unroll
        for (int i = 0; i < most; ++i) {
            weight[i] = ptx::ex2_approx(lse[i] - offset);
            sum += weight[i];
        }
#pragma unroll
        for (int distance = 1; distance < lanes; distance *= 2)
            sum += __shfl_xor_sync(~0u, sum, distance);
        const float inverse = sum > 0.f ? __fdividef(1.f, sum) : 0.f;
#pragma unroll
        for (int i = 0; i < most; ++i)
            ptx::st_shared(weights + ((lane + i * lanes) * rows + row) * 4,
                           __float_as_uint(weight[i] * inverse * of_row.scale[i]));
        const int of_part = Fragments::kGroupRows * first_group + row,
                  of_tile = Fragments::row_of_tile(of_part);
        if (lane == 0 && of_part / Fragments::kGroupRows * M::kGroupUnits >= share.begin &&
            of_tile < out.rows)
            write_lse(p, out.first_row + of_tile, out.q_begin, log2_sum_exp2(top, sum));
    }

    // Adds the slots and writes the output, each warp its vectors of a group one after the other.
    __device__ void add() const {
#pragma unroll 1
        for (int group = unsigned(first) / M::kGroupUnits; group * M::kGroupUnits < first + units;
             ++group) {
            const auto to = Fragments::place(out, group, thread);
#pragma unroll 1
            for (int vector = 0; vector < M::kThreadVectors; vector += M::kTogether) {
                int at[M::kTogether];
                bool own[M::kTogether], any = false;
#pragma unroll
                for (int i = 0; i < M::kTogether; ++i) {
                    at[i] = group * M::kGroupVectors + (vector + i) * kOutputThreads + thread -
                            first * M::kUnit;
                    own[i] = unsigned(at[i]) < unsigned(units * M::kUnit);
                    any = any || own[i];
                }
                if (!__any_sync(~0u, any)) continue;
                Vector sum[M::kTogether];
                if (any) {
                    uint32_t x[M::kTogether], next[M::kTogether];
#pragma unroll
                    for (int i = 0; i < M::kTogether; ++i) {
                        // What is not its own a thread reads elsewhere and does not write.
                        if (!own[i]) at[i] = 0;
                        x[i] = kept + (first - share.begin) * kUnitBytes + at[i] * 16;
                        next[i] = fetched + at[i] * 16;
                    }
                    uint32_t weight = weights + (Fragments::kGroupRows * (group - first_group) +
                                                 2 * Fragments::rows_of(thread)) *
                                                    4;
                    constexpr int slots = 4 / M::kTogether;
#pragma unroll slots
                    for (int slot = 0; slot < source.parts; ++slot) {
                        const float2 of_rows = ptx::ld_shared_v2_f32(weight);
#pragma unroll
                        for (int i = 0; i < M::kTogether; ++i) {
                            sum[i].add(Vector(ptx::ld_shared_v4(x[i])), of_rows);
                            x[i] = next[i];
                            next[i] += units * kUnitBytes;
                        }
                        weight += rows * 4;
                    }
                }
#pragma unroll
                for (int i = 0; i < M::kTogether; ++i)
                    Fragments::write(out, to, thread, vector + i, own[i], sum[i]);
            }
        }
    }
};

// What several parts amount to for one vector: their sum, weighted relative to 2^maximum, and the
// weights' sum.
struct MergeState {
    Vector value;
    float2 maximum = {-INFINITY, -INFINITY}, sum = {0.f, 0.f};

    __device__ void raise_maximum(float2 m) {
        maximum = make_float2(fmaxf(maximum.x, m.x), fmaxf(maximum.y, m.y));
    }

    // Adds a state whose maximum is not above this one's.
    __device__ void add(const MergeState& other) {
        const float x = ptx::ex2_approx(other.maximum.x - offset_of(maximum.x));
        const float y = ptx::ex2_approx(other.maximum.y - offset_of(maximum.y));
        value.add(other.value, make_float2(x, y));
        sum = make_float2(fmaf(other.sum.x, x, sum.x), fmaf(other.sum.y, y, sum.y));
    }

    // Adds the state that another lane has under the same maximum.
    __device__ void add_same(int lanes_away) {
#pragma unroll
        for (float& x : value.value) x += __shfl_xor_sync(~0u, x, lanes_away);
        for (float* x : {&sum.x, &sum.y}) *x += __shfl_xor_sync(~0u, *x, lanes_away);
    }

    __device__ Vector normalised() const {
        return value.times(make_float2(sum.x > 0.f ? __fdividef(1.f, sum.x) : 0.f,
                                       sum.y > 0.f ? __fdividef(1.f, sum.y) : 0.f));
    }
};

// Parts first, first + step, ... of `count` vectors of the rows that begin at `column`: vector
// `index`, and, if `all` are there, those that lie `apart` behind one another. All reads of a batch
// are under way together.
template <int N, int step, int apart, int count, typename Source>
__device__ __forceinline__ void merge_some(MergeState (&states)[count], const Source& source,
                                           int index, bool all, int column, int first) {
    constexpr int batch = N <= 16 ? 4 : 8;
    MergeState& state = states[0];
    const char* own = source.partials + (first * Source::kStep + source.rest);
    const char *vectors = own + index * 16, *stats = own + PartialLayout<N>::lse_offset(column);
#pragma unroll 1
    for (int k0 = first; k0 < source.parts; k0 += batch * step) {
        uint4 x[batch][count];
        PartRows rows[batch];
        float2 top = state.maximum;
#pragma unroll
        for (int i = 0; i < batch; ++i) {
#pragma unroll
            for (int j = 0; j < count; ++j) x[i][j] = make_uint4(0, 0, 0, 0);
            if (k0 + i * step < source.parts) {
                // Part 0 lies elsewhere.
                const int64_t from = int64_t(i) * step * Source::kStep +
                                     (i == 0 && k0 == 0 ? int64_t(source.first) - source.rest : 0);
                rows[i] = PartRows(stats + from);
#pragma unroll
                for (int j = 0; j < count; ++j)
                    if (j == 0 || all)
                        x[i][j] = *reinterpret_cast<const uint4*>(vectors + from + j * apart * 16);
            }
        }
        vectors += int64_t(batch) * step * Source::kStep;
        stats += int64_t(batch) * step * Source::kStep;
#pragma unroll
        for (int i = 0; i < batch; ++i)
            top = make_float2(fmaxf(top.x, rows[i].lse.x), fmaxf(top.y, rows[i].lse.y));
        const float2 offset = {offset_of(top.x), offset_of(top.y)};
        const float old_x = ptx::ex2_approx(state.maximum.x - offset.x),
                    old_y = ptx::ex2_approx(state.maximum.y - offset.y);
        state.maximum = top;
#pragma unroll
        for (int j = 0; j < count; ++j)
            states[j].value = states[j].value.times(make_float2(old_x, old_y));
        state.sum = make_float2(state.sum.x * old_x, state.sum.y * old_y);
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            const float wx = ptx::ex2_approx(rows[i].lse.x - offset.x),
                        wy = ptx::ex2_approx(rows[i].lse.y - offset.y);
            state.sum = make_float2(state.sum.x + wx, state.sum.y + wy);
#pragma unroll
            for (int j = 0; j < count; ++j)
                states[j].value.add(Vector(x[i][j]),
                                    make_float2(wx * rows[i].scale, wy * rows[i].scale));
        }
    }
#pragma unroll
    for (int j = 1; j < count; ++j) {
        states[j].maximum = state.maximum;
        states[j].sum = state.sum;
    }
}

// Merges one share of a tile of many parts, by all output threads: first each worker some of the
// parts, whose sums are then added in order. `scratch` has room for what all workers make of eight
// units.
template <typename T, int N, typename Fragments, typename Source>
__device__ __forceinline__ void merge_many(const KernelParams& p, const Source& source,
                                           const OutputRows<T>& out, Share share,
                                           MergeState* scratch, int thread) {
    using M = MergeLayout<N, Fragments::kGroupRows>;
    constexpr int ways = M::kWorkers, groups = 32 / M::kUnit;
    static_assert(ways == 8 * groups, "each group of lanes adds eight");
    const int lane = thread & 31, warp = thread >> 5, group_of_lanes = lane / M::kUnit,
              place = thread % M::kUnit, way = thread / M::kUnit;
#pragma unroll 1
    for (int first = share.begin; first < share.end; first += 8) {
        const int last = min(first + 8, share.end);
#pragma unroll 1
        for (int unit = first; unit < last;) {
            const int index = unit * M::kUnit + place, together = M::kTogether;
            const bool all = together == 1 || (unit % together == 0 && unit + together <= last);
            MergeState some[together];
            merge_some<N, ways, M::kUnit>(
                some, source, index, all,
                Fragments::kGroupRows * (index / M::kGroupVectors) + 2 * Fragments::rows_of(index),
                way);
#pragma unroll
            for (int j = 0; j < together; ++j)
                if (j == 0 || all)
                    scratch[((unit + j - first) * ways + way) * M::kUnit + place] = some[j];
            unit += all ? together : 1;
        }
        ptx::bar_sync(kOutputBarrier, kOutputThreads);
        // A warp adds up a unit, each group of lanes eight of the ways.
        const int unit = first + warp;
        if (unit < last) {
            MergeState total;
            const MergeState* some =
                scratch + (warp * ways + group_of_lanes * 8) * M::kUnit + place;
#pragma unroll
            for (int i = 0; i < 8; ++i) total.raise_maximum(some[i * M::kUnit].maximum);
#pragma unroll
            for (int away = M::kUnit; away < 32; away *= 2)
                total.raise_maximum(make_float2(__shfl_xor_sync(~0u, total.maximum.x, away),
                                                __shfl_xor_sync(~0u, total.maximum.y, away)));
#pragma unroll
            for (int i = 0; i < 8; ++i) total.add(some[i * M::kUnit]);
#pragma unroll
            for (int away = M::kUnit; away < 32; away *= 2) total.add_same(away);
            // All have the sum; those whose place it is write it.
            const int index = unit / groups * 32 + lane, group = index / M::kGroupVectors,
                      of_group = index % M::kGroupVectors;
            const bool own = group_of_lanes == unit % groups;
            Fragments::write(out, Fragments::place(out, group, index & 255), index & 255,
                             of_group >> 8, own, total.normalised());
            if (own && Fragments::begins_rows(of_group)) {
#pragma unroll 1
                for (int i = 0; i < 2; ++i) {
                    const int row = Fragments::row_of_tile(Fragments::kGroupRows * group +
                                                           2 * Fragments::rows_of(index) + i);
                    if (row < out.rows)
                        write_lse(p, out.first_row + row, out.q_begin,
                                  log2_sum_exp2(i ? total.maximum.y : total.maximum.x,
                                                i ? total.sum.y : total.sum.x));
                }
            }
        }
        ptx::bar_sync(kOutputBarrier, kOutputThreads);
    }
}

// Of `arrived`: how many parts are there, how many sharers gave up, and whether sharers give up.
constexpr int kGaveUp = 1 << 12, kAbandoned = 1 << 30;

// What `arrived` is when all sharers have given up and all parts are there.
__device__ inline int all_gave_up(int parts, int sharers) {
    return kAbandoned + sharers * kGaveUp + parts;
}

// Releases what all threads wrote before the barrier that this thread came from, and acquires what
// others released.
__device__ inline MergeRole MergeCounters::arrive(int parts, int sharers) {
    return ptx::atom_add_acq_rel(&arrived, 1) + 1 == all_gave_up(parts, sharers) ? MergeRole::all
                                                                                 : MergeRole::none;
}

__device__ inline void MergeCounters::arrive_sharer() { ptx::red_add_release(&arrived, 1); }

__device__ inline MergeRole MergeCounters::await(int parts) {
    constexpr int64_t patience = 100000;  // clocks
    const int64_t start = clock64();
    int seen;
    // Nobody begins to give up once all parts are there.
    while ((seen = ptx::ld_acquire(&arrived)) < parts)
        if (clock64() - start > patience && atomicCAS(&arrived, seen, seen + kAbandoned) == seen)
            return MergeRole::give_up;
    return seen == parts ? MergeRole::share : MergeRole::give_up;
}

__device__ inline MergeRole MergeCounters::give_up(int parts, int sharers) {
    return ptx::atom_add_acq_rel(&arrived, kGaveUp) + kGaveUp == all_gave_up(parts, sharers)
               ? MergeRole::all
               : MergeRole::none;
}

// Relaxed is enough: the block's last read of `arrived` has been answered.
__device__ inline int MergeCounters::leave() { return ptx::atom_inc_relaxed(&left) + 1; }

__device__ inline void MergeCounters::reset() {
    arrived = 0;
    left = 0;
}

}  // namespace mla::sm90::decode
