// Rows that a value spoiled which they do not see.
//
// Under causal attention the last KV tiles of a query tile have keys that some of its rows do not
// see. Their weights are 0, but 0 times a NaN or an infinity is a NaN, and so a column of values
// with one of these spoils that column of all rows. To look for it among the values would cost time
// in every launch. So each warp of a consumer looks at what it stores, which is a few instructions,
// and notes tiles with a NaN. When it has no other work it looks whether hidden values are the
// reason, and if so computes these rows and columns once more, one key after the other. It takes
// long, and happens where an input is broken.
#pragma once

#include "../../common/finite.cuh"
#include "../../common/octet.cuh"
#include "../../common/softmax.cuh"
#include "../../ptx/sm90.cuh"
#include "params.cuh"
#include "softmax.cuh"
#include "tile.cuh"

namespace mla::sm90::prefill {

// Where a warp of the consumers notes what it has to look at.
struct SpoiledList {
    Spoiled* entries;
    int* count;

    __device__ SpoiledList(const KernelParams& p, int* counts, int warp)
        : entries(p.spoiled + (blockIdx.x * kConsumerWarps + warp) * kMostSpoiled),
          count(counts + warp) {}

    // By one lane, always the same. What there is no room for stays as it is: NaN.
    __device__ void clear() const { *count = 0; }
    __device__ void add(const Spoiled& rows) const {
        if (*count < kMostSpoiled) entries[(*count)++] = rows;
    }
};

// By a whole warp, when its stores are done.
template <typename Tile>
struct Repair {
    const KernelParams& p;
    int lane;

    using T = typename Tile::Element;

    __device__ void repair_all(const SpoiledList& list) const {
#pragma unroll 1
        for (int i = 0; i < *list.count; i++) repair({list.entries[i], 0, Tile::kValue});
    }

    // The rows of a warp, and the columns to look at.
    struct Rows {
        Spoiled first;
        int column, columns;
    };
    __device__ void repair(const Rows& rows) const {
        Place at = place(rows.first.token);
        // 64 columns at a time.
#pragma unroll 1
        for (at.column = 2 * lane; at.column < rows.columns + 2 * lane; at.column += 64)
            repair(rows, at);
    }

  private:
    // The rows' keys, and which two columns of theirs are this lane's.
    struct Place {
        int key_start, key_len, column;
        // How many keys the first row would see if there were no end to them.
        int seen;

        // How many keys the i-th of the rows sees.
        __device__ int sees(int i) const { return max(min(key_len, seen + i), 0); }
    };

    __device__ Place place(int token) const {
        int request = lane;
        uint32_t found;
        while (!(found = __ballot_sync(~0u, request < p.requests && p.cu_q[request] <= token &&
                                                token < p.cu_q[request + 1])))
            request += 32;
        request = __shfl_sync(~0u, request, __ffs(found) - 1);
        const int query_start = p.cu_q[request], key_start = p.cu_k[request];
        const int query_len = p.cu_q[request + 1] - query_start,
                  key_len = p.cu_k[request + 1] - key_start;
        return {key_start, key_len, 0, token - query_start + key_len - query_len + 1};
    }

    __device__ const T* value(const Rows& rows, const Place& at, int key) const {
        return static_cast<const T*>(p.value) + (at.key_start + key) * p.value_token_stride +
               rows.first.head * p.value_head_stride + rows.column + at.column;
    }

    __device__ void repair(const Rows& rows, const Place& at) const {
        // The last key whose value is not finite, among those that may be hidden.
        int2 last = {-1, -1};
        const int end = min(at.key_len, at.sees(0) + kQueries + Tile::kKeys);
#pragma unroll 8
        for (int key = at.sees(0); at.column < rows.columns && key < end; key++) {
            const uint32_t bits =
                not_finite<T>(*reinterpret_cast<const uint32_t*>(value(rows, at, key)));
            if (bits & 0xffff) last.x = key;
            if (bits >> 16) last.y = key;
        }
        const int count = min(kWarpRows, at.key_len + 1 - at.seen);
#pragma unroll 1
        for (int row = 0; row < count; row++) {
            const int sees = at.sees(row);
            // Later rows see more.
            if (!__any_sync(~0u, max(last.x, last.y) >= sees)) break;
            const float2 out = attend(rows, at, row, sees);
            T* to = static_cast<T*>(p.out) +
                    (int64_t(rows.first.token) + row) * p.out_token_stride +
                    rows.first.head * p.out_head_stride + rows.column + at.column;
            if (last.x >= sees) to[0] = from_float<T>(out.x);
            if (last.y >= sees) to[1] = from_float<T>(out.y);
        }
    }

    // Attention of one row to the keys that it sees, and no others.
    __device__ float2 attend(const Rows& rows, const Place& at, int row, int sees) const {
        SoftmaxState<Base2> state;
        float2 out = {0.f, 0.f};
#pragma unroll 1
        for (int first = 0; first < sees; first += 32) {
            float score = -INFINITY;
            if (first + lane < sees)
                score = this->score(rows, row, at.key_start + first + lane) * p.scale_log2;
            float top = score;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2)
                top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
            const float factor = state.raise(fmaxf(state.maximum, top));
            const float weight = Base2::exp(score - offset_of(state.maximum));
            float sum = weight;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2)
                sum += __shfl_xor_sync(~0u, sum, distance);
            state.sum += sum;
            out.x *= factor;
            out.y *= factor;
            // A lane's weight is 0 where there is no key.
            const int count = min(32, sees - first);
#pragma unroll 1
            for (int i = 0; i < count; i += 8) {
                uint32_t pair[8];
#pragma unroll
                for (int j = 0; j < 8; j++)
                    pair[j] =
                        at.column < rows.columns && i + j < count
                            ? *reinterpret_cast<const uint32_t*>(value(rows, at, first + i + j))
                            : 0;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const float of_key = __shfl_sync(~0u, weight, i + j);
                    const float2 values = floats(pair[j]);
                    out.x = fmaf(of_key, values.x, out.x);
                    out.y = fmaf(of_key, values.y, out.y);
                }
            }
            // What is not finite stays so.
            if (!__any_sync(~0u, at.column < rows.columns &&
                                     (fabsf(out.x) < INFINITY || fabsf(out.y) < INFINITY)))
                break;
        }
        const float factor = row_factor(state.sum);
        return {out.x * factor, out.y * factor};
    }

    __device__ float score(const Rows& rows, int row, int64_t key) const {
        const T* query = static_cast<const T*>(p.query) +
                         (int64_t(rows.first.token) + row) * p.query_token_stride +
                         rows.first.head * p.query_head_stride;
        const float sum =
            add_product<Tile::kNope>(0.f, query,
                                     static_cast<const T*>(p.key) + key * p.key_token_stride +
                                         rows.first.head * p.key_head_stride);
        return add_product<Tile::kRope>(sum, query + Tile::kNope,
                                        static_cast<const T*>(p.key_rope) +
                                            key * p.key_rope_token_stride +
                                            rows.first.head * p.key_rope_head_stride);
    }

    __device__ static float2 floats(uint32_t pair) {
        float values[2];
        to_floats(reinterpret_cast<const Group<T, 2>&>(pair), values);
        return {values[0], values[1]};
    }

    template <int width>
    __device__ static float add_product(float sum, const T* a, const T* b) {
#pragma unroll 4
        for (int i = 0; i < width; i += kOctet) {
            const uint4 x = *reinterpret_cast<const uint4*>(a + i),
                        y = *reinterpret_cast<const uint4*>(b + i);
            sum =
                add_pair(add_pair(add_pair(add_pair(sum, x.x, y.x), x.y, y.y), x.z, y.z), x.w, y.w);
        }
        return sum;
    }
    __device__ static float add_pair(float sum, uint32_t a, uint32_t b) {
        const float2 x = floats(a), y = floats(b);
        return fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
    }
};

}  // namespace mla::sm90::prefill
