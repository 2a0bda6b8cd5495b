// Addresses of output rows, and the layout of a thread's output values in vectors of 16 bytes.
//
// Output threads store a partial result in vectors of 16 bytes, each with values of two rows. The
// vectors of one group of rows follow those of another, so each vector has a fixed place, and a
// slice of the combine has few rows. The layout of the accumulators decides the order of vectors
// within a group, and the pairs of rows. There are three: transposed output, output by rows, and
// the output of an e4m3 cache.
#pragma once

#include "../../../common/softmax.cuh"
#include "params.cuh"
#include "shared_memory.cuh"

namespace mla::sm90::decode {

// The query token of a row of a request. Exact, since a request has 2048 rows at most; a division
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
    // Rows of the request: this CTA has `rows` of them, from first_row on.
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

// The values of a vector. They are of two panels of the output, and within a panel the values of
// two rows alternate. Layouts without panels have other groups of four values in their place.
constexpr int kVectorTiles = kVectorValues / 4;
struct PackedVector {
    float value[kVectorValues] = {};

    PackedVector() = default;
    __device__ explicit PackedVector(uint4 bits) {
        const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
            value[2 * i] = two.x;
            value[2 * i + 1] = two.y;
        }
    }

    // The values that lie in the i-th panel.
    __device__ float4 tile(int i) const {
        return make_float4(value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]);
    }

    __device__ PackedVector times(float2 factors) const {
        PackedVector product;
#pragma unroll
        for (int i = 0; i < kVectorValues; ++i)
            product.value[i] = value[i] * (i & 1 ? factors.y : factors.x);
        return product;
    }

    __device__ void add(const PackedVector& other, float2 factors) {
#pragma unroll
        for (int i = 0; i < kVectorValues; ++i)
            value[i] = fmaf(other.value[i], i & 1 ? factors.y : factors.x, value[i]);
    }
};

// Groups of eight rows as they lie in the tile.
struct GroupsOfEight {
    static constexpr int kGroupRows = 8;
    // Number of the pair of rows, within a group, that the vector at an index has values of. The
    // pair's first row is twice this number.
    __device__ static int rows_of(int index) { return index & 3; }
    // True if a vector of a group is the first one of its rows.
    __device__ static bool begins_rows(int of_group) { return of_group < 4; }
    // The row of the query tile that a row of the partial result belongs to.
    __device__ static int row_of_tile(int row) { return row; }
};

// Vectors of the transposed output, where a row is a latent value and a column a query row. Vector
// v of output thread t (0..255) is at index v * 256 + t. It holds that thread's values of two
// panels and one group of eight query rows: v = latent / 256 * group + panel / 2. Each float4 holds
// two neighbouring query rows at one latent value, and the same rows at the eighth value after it.
template <int latent>
struct TransposedFragments : GroupsOfEight {
    static constexpr int kLatent = latent;

    // The destination of a lane in a group of rows.
    template <typename T>
    struct RowTarget {
        T* row;
        bool valid;
    };
    template <typename T>
    __device__ static RowTarget<T> target(const OutputRows<T>& out, int group, int thread) {
        // A lane writes values of one row.
        const int row = kGroupRows * group + (thread >> 2 & 7);
        return {out.row(row), row < out.rows};
    }
    // Writes combined vector `vector` of an output thread's group. Called by a whole warp; `own` is
    // true if this lane's vector is to be written.
    template <typename T>
    __device__ static void write(const OutputRows<T>& out, const RowTarget<T>& to, int thread,
                                 int vector, bool own, const PackedVector& v) {
#pragma unroll
        for (int i = 0; i < kVectorTiles; ++i) {
            // A lane writes values that eight neighbouring lanes have combined.
            const bool needed = __shfl_sync(~0u, own, 8 * (thread & 3));
            out.write(to.row, needed && to.valid, thread, vector * kVectorTiles + i, v.tile(i));
        }
    }
};

// The destination of a thread's values of two rows: a vector is two neighbouring latent values.
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

// Vectors of the output by rows. Within the sixteen query rows of a warp, vector v of thread t of
// output warpgroup g is at index v / 4 * 256 + v % 4 * 64 + 32 * g + t % 32; a row and the eighth
// after it are neighbours in the partial result. A float4 is of both rows at one latent value, and
// at the next.
struct RowFragments {
    static constexpr int kLatent = 512, kGroupRows = 16;
    __device__ static int rows_of(int index) { return index >> 2 & 7; }
    __device__ static bool begins_rows(int of_group) {
        return of_group < 32 && (of_group & 3) == 0;
    }
    __device__ static int row_of_tile(int row) {
        return (row & ~15) | (row >> 1 & 7) | (row & 1) << 3;
    }

    template <typename T>
    __device__ static TwoRows<T> target(const OutputRows<T>& out, int group, int thread) {
        const int row = kGroupRows * group + rows_of(thread);
        return {out, row, row + 8, (thread & 32) * 2 + (thread >> 6) * 16 + 2 * (thread & 3)};
    }
    template <typename T>
    __device__ static void write(const OutputRows<T>&, const TwoRows<T>& to, int, int vector,
                                 bool own, const PackedVector& v) {
#pragma unroll
        for (int i = 0; i < kVectorTiles; ++i) to.write(vector * 128 + i * 8, own, v.tile(i));
    }
};

// Vectors of the output of an e4m3 cache: as those of the transposed output, but a float4 is of two
// neighbouring rows at one latent value, and at the next.
struct Fp8Fragments : GroupsOfEight {
    static constexpr int kLatent = 512;

    template <typename T>
    __device__ static TwoRows<T> target(const OutputRows<T>& out, int group, int thread) {
        const int row = kGroupRows * group + 2 * rows_of(thread);
        return {out, row, row + 1, (thread >> 5) * 64 + (thread >> 2 & 7) * 8};
    }
    template <typename T>
    __device__ static void write(const OutputRows<T>&, const TwoRows<T>& to, int, int vector,
                                 bool own, const PackedVector& v) {
#pragma unroll
        for (int i = 0; i < kVectorTiles; ++i)
            to.write(2 * (vector * kVectorTiles + i), own, v.tile(i));
    }
};

}  // namespace mla::sm90::decode
