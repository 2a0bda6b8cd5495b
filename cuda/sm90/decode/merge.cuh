// Partial results: where they lie, how they are merged, and how output rows are written.
//
// An output warpgroup's accumulators are the transposed output: row = latent value, column = query row. They travel as
// float4: vector v of output thread t (0..255) holds accumulators 4 v .. 4 v + 3 of that thread, at index v * 256 + t.
// With N / 8 column groups, v = tile * (N / 8) + group.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/matrix.cuh"
#include "../../common/mbarrier.cuh"
#include "layout.cuh"

namespace mla::sm90::decode {

constexpr int kOutputThreads = 256;

// Writes output rows from accumulator fragments.
template <typename T>
struct OutputRows {
    T* out;
    int64_t token_stride, head_stride;
    int heads, q_begin;
    // Rows of the request: this block's tile starts at first_row and has `rows` of them.
    int first_row, rows;

    __device__ T* row(int r) const {
        const int row = first_row + r, token = row / heads;
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

__device__ __forceinline__ void write_lse(const KernelParams& p, int row, int q_begin, float maximum, float sum) {
    if (!p.lse) return;
    const int token = row / p.heads;
    constexpr float ln2 = 0.69314718055994531f;
    p.lse[(row - token * p.heads) * p.lse_head_stride + q_begin + token] =
        sum > 0.f ? (maximum + __log2f(sum)) * ln2 : -INFINITY;
}

// Reads the partial results of a cluster's blocks from their shared memory.
struct ClusterSource {
    uint32_t fragments;  // this block's address of the fragments; the same in every block
    uint32_t first_rank, rank_step;

    __device__ float4 vector(int part, int index) const {
        return load_cluster4(cluster_address(fragments + index * 16, first_rank + part * rank_step));
    }
};

// Reads the partial results of several clusters from the workspace.
struct WorkspaceSource {
    const float* base;      // the partials
    size_t slot_floats;
    int slot_of_first;      // slot of part 0; part k > 0 lies in slot_of_rest + k * step
    int slot_of_rest, step;

    __device__ const float* slot(int part) const {
        return base + (part ? slot_of_rest + part * step : slot_of_first) * slot_floats;
    }
};

}  // namespace mla::sm90::decode
