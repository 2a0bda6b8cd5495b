// Recomputes output rows that a non-finite value of a masked key has turned into NaN.
//
// Under causal attention, the last KV tiles of a query tile have keys that some of its rows do not
// see. The weights of these keys are 0, but 0 times NaN or infinity is NaN. One value that is not
// finite therefore contaminates its column in all rows. A search for such values would cost time in
// every launch. Instead, each consumer warp checks the output that it stores, which takes a few
// instructions, and notes tiles with a NaN. When it has no other work, it checks if masked values
// are the reason. If so, it computes these rows and columns again, key by key. This is slow, but
// happens only for broken inputs.
#pragma once

#include "../../common/finite.cuh"
#include "../../common/octet.cuh"
#include "../../common/softmax.cuh"
#include "../../ptx/sm90.cuh"
#include "config.cuh"
#include "params.cuh"
#include "softmax.cuh"

namespace mla::sm90::prefill {

// List in which a consumer warp notes rows to check.
struct ContaminatedList {
    ContaminatedRows* entries;
    int* count;

    __device__ ContaminatedList(const KernelParams& p, int* counts, int warp)
        : entries(p.contaminated + (blockIdx.x * kConsumerWarps + warp) * kMaxContaminated),
          count(counts + warp) {}

    // One lane calls these, always the same one. If the list has no room for rows, these stay NaN.
    __device__ void clear() const { *count = 0; }
    __device__ void add(const ContaminatedRows& rows) const {
        if (*count < kMaxContaminated) entries[(*count)++] = rows;
    }
};

// A whole warp calls this when its stores are done.
template <typename Config>
struct Repair {
    const KernelParams& p;
    int lane;

    using T = typename Config::Element;

    __device__ void repair_all(const ContaminatedList& list) const {
#pragma unroll 1
        for (int i = 0; i < *list.count; i++) repair({list.entries[i], 0, Config::kValue});
    }

    // The rows of a warp, and the columns to check.
    struct Rows {
        ContaminatedRows first;
        int column, columns;
    };
    __device__ void repair(const Rows& rows) const {
        RequestKeys at = keys_of(rows.first.token);
        // 64 columns at a time.
#pragma unroll 1
        for (at.column = 2 * lane; at.column < rows.columns + 2 * lane; at.column += 64)
            repair(rows, at);
    }

  private:
    // Keys of the rows' request, and the first of the lane's two columns.
    struct RequestKeys {
        int key_start, key_len, column;
        // Number of keys that the first row would see if the request had keys without end.
        int seen;

        // Number of keys that the i-th row sees.
        __device__ int sees(int i) const { return max(min(key_len, seen + i), 0); }
    };

    __device__ RequestKeys keys_of(int token) const {
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

    __device__ const T* value(const Rows& rows, const RequestKeys& at, int key) const {
        return static_cast<const T*>(p.value) + (at.key_start + key) * p.value_token_stride +
               rows.first.head * p.value_head_stride + rows.column + at.column;
    }

    __device__ void repair(const Rows& rows, const RequestKeys& at) const {
        // For each of the two columns: the last key that may be masked and whose value is not
        // finite.
        int2 last = {-1, -1};
        const int end = min(at.key_len, at.sees(0) + kQueries + Config::kKeys);
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
            // Later rows see more keys.
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
    __device__ float2 attend(const Rows& rows, const RequestKeys& at, int row, int sees) const {
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
            // The weight of a lane without a key is 0.
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
            // An output that is not finite stays so. The loop ends when the warp has no other
            // outputs.
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
            add_product<Config::kNope>(0.f, query,
                                       static_cast<const T*>(p.key) + key * p.key_token_stride +
                                           rows.first.head * p.key_head_stride);
        return add_product<Config::kRope>(sum, query + Config::kNope,
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
