// Output of a tile of rows: written at once if one CTA did all of it, otherwise left in the
// workspace and combined by whichever CTA arrives last.
//
// Many parts are combined in two steps: groups of `fan` parts first, each by its last arriver, then
// the groups. Sums are made in the order of the parts, whoever makes them.
#pragma once

#include "softmax.cuh"

namespace mla::sm80::decode {

// The accumulators of a thread: of each tile of 16 rows, rows lane / 4 and 8 + lane / 4.
template <class C>
using Accumulators = float[C::kWarpTiles][C::kColumns / 8][4];

template <class C>
class Output {
  public:
    __device__ Output(const KernelParams& p, typename C::Statistics& statistics, int row_group,
                      int column_group)
        : p_(p), statistics_(statistics), row_group_(row_group), column_group_(column_group) {}

    // After a barrier that follows the softmax's `finish`.
    __device__ void write(const Item& item, Accumulators<C>& o) {
        if (item.parts > 1 && !combine(item, o)) return;
        write_rows(item, o);
    }

  private:
    // What of the workspace belongs to a part: a team has at most the end of one tile of rows and
    // the beginning of another.
    __device__ float* partial(const Item& item, int part) const {
        const int64_t entry = int64_t(cta_of(item, part)) * 2 + (part == 0);
        return p_.partials + entry * C::kPartialFloats;
    }

    __device__ int cta_of(const Item& item, int part) const {
        return (item.first_team + part) * p_.pair + blockIdx.x % p_.pair;
    }

    // Leaves this part to the last arriver; true in the CTA that has all of it.
    __device__ bool combine(const Item& item, Accumulators<C>& o) {
        // Every thread writes the same, and reads it after a barrier.
        int fan = 4;
        while (fan * fan < item.parts) ++fan;
        statistics_.fan = fan;
        store(partial(item, item.part), o);
        if (!arrive(item, false)) return false;
        sum_parts(item, false, o);
        if (item.parts <= statistics_.fan) return true;
        // All threads have read what is now overwritten.
        __syncthreads();
        store(partial(item, first_of(item, false)), o);
        if (!arrive(item, true)) return false;
        sum_parts(item, true, o);
        return true;
    }

    // Of the parts that are summed: a group's, or the first of each group.
    __device__ int first_of(const Item& item, bool groups) const {
        return groups ? 0 : item.part / statistics_.fan * statistics_.fan;
    }
    __device__ int last_of(const Item& item, bool groups) const {
        return groups ? item.parts : min(first_of(item, false) + statistics_.fan, item.parts);
    }
    __device__ int step_of(bool groups) const { return groups ? statistics_.fan : 1; }

    // Whether this CTA is the last to arrive at a counter, which is then zero again.
    __device__ bool arrive(const Item& item, bool groups) {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            const int first = first_of(item, groups), step = step_of(groups);
            const int expected = (last_of(item, groups) - first + step - 1) / step;
            const int which = groups ? 2 : first > 0;
            unsigned* counter = p_.counters + cta_of(item, first) * kCountersPerCta + which;
            const bool last = atomicAdd(counter, 1u) == unsigned(expected - 1);
            if (last) *counter = 0;
            statistics_.last_arriver = last;
        }
        __syncthreads();
        const bool last = statistics_.last_arriver;
        if (last) __threadfence();
        return last;
    }

    __device__ void store(float* to, const Accumulators<C>& o) const {
        float4* vectors = reinterpret_cast<float4*>(to) + threadIdx.x;
#pragma unroll
        for (int tile = 0; tile < C::kWarpTiles; ++tile)
#pragma unroll
            for (int i = 0; i < C::kColumns / 8; ++i) {
                const float* x = o[tile][i];
                vectors[(tile * (C::kColumns / 8) + i) * C::kThreads] =
                    make_float4(x[0], x[1], x[2], x[3]);
            }
        float* rows = to + C::kFragments * C::kThreads * 4;
        if (threadIdx.x < C::kRows) {
            rows[threadIdx.x] = statistics_.maximum[threadIdx.x];
            rows[C::kRows + threadIdx.x] = statistics_.sum[threadIdx.x];
        }
    }

    // The sum of parts in `o` and in the statistics.
    __device__ void sum_parts(const Item& item, bool groups, Accumulators<C>& o) {
        const int first = first_of(item, groups), step = step_of(groups);
        constexpr int kRowsAt = C::kFragments * C::kThreads * 4;
        // Every row's maximum, and its sum under it.
        if (threadIdx.x < C::kRows) {
            float maximum = -INFINITY, sum = 0.f;
            for (int part = first; part < last_of(item, groups); part += step)
                maximum = fmaxf(maximum, load(partial(item, part) + kRowsAt + threadIdx.x));
            for (int part = first; part < last_of(item, groups); part += step) {
                const float* rows = partial(item, part) + kRowsAt + threadIdx.x;
                sum += load(rows + C::kRows) * weight(load(rows), maximum);
            }
            statistics_.maximum[threadIdx.x] = maximum;
            statistics_.sum[threadIdx.x] = sum;
        }
        __syncthreads();
#pragma unroll
        for (int tile = 0; tile < C::kWarpTiles; ++tile)
#pragma unroll
            for (int i = 0; i < C::kColumns / 8; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) o[tile][i][j] = 0.f;
#pragma unroll 1
        for (int part = first; part < last_of(item, groups); part += step) {
            const float* from = partial(item, part);
            const float4* vectors = reinterpret_cast<const float4*>(from) + threadIdx.x;
#pragma unroll
            for (int tile = 0; tile < C::kWarpTiles; ++tile) {
                float weights[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = row_of(tile, half);
                    weights[half] = weight(load(from + kRowsAt + row), statistics_.maximum[row]);
                }
#pragma unroll
                for (int i = 0; i < C::kColumns / 8; ++i) {
                    const float4 x = __ldcg(vectors + (tile * (C::kColumns / 8) + i) * C::kThreads);
                    o[tile][i][0] += x.x * weights[0];
                    o[tile][i][1] += x.y * weights[0];
                    o[tile][i][2] += x.z * weights[1];
                    o[tile][i][3] += x.w * weights[1];
                }
            }
        }
    }

    // Others wrote it: the first-level cache may hold what was there before.
    __device__ static float load(const float* from) { return __ldcg(from); }

    __device__ static float weight(float maximum, float of_all) {
        return SoftmaxState<Base2>{maximum, 0.f}.factor(of_all);
    }

    // Row of the CTA's tile.
    __device__ int row_of(int tile, int half) const {
        return row_group_ * C::kWarpRows + tile * 16 + half * 8 + (threadIdx.x & 31) / 4;
    }

    __device__ void write_rows(const Item& item, const Accumulators<C>& o) const {
        using T = typename C::Element;
        const int quad = threadIdx.x & 3;
        const int rows = item.q_len * p_.heads;
#pragma unroll
        for (int tile = 0; tile < C::kWarpTiles; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int of_tile = row_of(tile, half), row = item.first_row + of_tile;
                if (row >= rows) continue;
                const int token = row / p_.heads, head = row - token * p_.heads;
                const float sum = statistics_.sum[of_tile], maximum = statistics_.maximum[of_tile];
                const float scale = sum == 0.f ? 0.f : p_.out_scale / sum;
                char* to = static_cast<char*>(p_.out) +
                           2 * ((item.q_begin + token) * p_.out_token_stride +
                                head * p_.out_head_stride + column_group_ * C::kColumns);
                write_row(reinterpret_cast<T*>(to), o[tile], half * 2, scale, quad);
                if (p_.lse && column_group_ == 0 && quad == 0) {
                    p_.lse[head * p_.lse_head_stride + item.q_begin + token] =
                        natural_lse(maximum, sum);
                }
            }
    }

    // Of a cache of bytes, two fragments have the even and the odd columns of sixteen.
    __device__ static void write_row(typename C::Element* to, const float (&o)[C::kColumns / 8][4],
                                     int begin, float scale, int quad) {
        using T = typename C::Element;
#pragma unroll
        for (int i = 0; i < C::kColumns / 8; i += 2) {
            const float a[2] = {o[i][begin] * scale, o[i][begin + 1] * scale};
            const float b[2] = {o[i + 1][begin] * scale, o[i + 1][begin + 1] * scale};
            if constexpr (C::kBytes) {
                const uint2 words = {ptx::cvt_rn_x2<T>(a[0], b[0]), ptx::cvt_rn_x2<T>(a[1], b[1])};
                *reinterpret_cast<uint2*>(to + i * 8 + quad * 4) = words;
            } else {
                *reinterpret_cast<uint32_t*>(to + i * 8 + quad * 2) = ptx::cvt_rn_x2<T>(a[0], a[1]);
                *reinterpret_cast<uint32_t*>(to + i * 8 + 8 + quad * 2) =
                    ptx::cvt_rn_x2<T>(b[0], b[1]);
            }
        }
    }

    const KernelParams& p_;
    typename C::Statistics& statistics_;
    int row_group_, column_group_;
};

}  // namespace mla::sm80::decode
