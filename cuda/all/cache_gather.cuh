// Reads cache rows into contiguous tensors, a warp for every so many rows.
//
// A row is found in dependent loads: its segment, the segment's first token, the page, then the row. All but the last are
// done once for all rows of a warp, each lane finding one; then the warp goes row by row, loading the next before it
// stores this one. A warp's rows are as far apart as there are warps, so that all warps together move through the output
// from one end to the other.
#pragma once

#include "../common/status.cuh"
#include "cache_row.cuh"

namespace mla {

constexpr int kGatherThreads = 128;
constexpr int kGatherWarps = kGatherThreads / 32;
// The segment that row `row` belongs to: the last one that begins at or before it. Empty segments begin where the next one
// does, and the last of equals is taken.
__device__ __forceinline__ int find_segment(const MlaCacheGatherParams& p, int row) {
    int low = 0, high = p.segments;
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (p.row_starts[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// The first byte of the row that belongs at `row` of the output, or -1 where its page does not exist.
__device__ __forceinline__ int64_t find_row(const MlaCacheGatherParams& p, int row) {
    const int segment = find_segment(p, row);
    const int token = p.token_starts[segment] + row - p.row_starts[segment];
    const int column = token / p.page_size;
    if (token < 0 || column >= p.max_pages) return -1;
    const int page = p.block_table[segment * p.block_table_stride + column];
    if (page < 0 || page >= p.pages) return -1;
    return page * p.cache_page_stride + token % p.page_size * p.cache_slot_stride;
}

// `warps` is at least a 32nd of the rows: each lane finds one.
template <typename To, int Format, bool Wide>
__global__ void __launch_bounds__(kGatherThreads, Wide && sizeof(To) == 2 && Format != MLA_CACHE_F32 ? 8 : 4)
    cache_gather_kernel(const __grid_constant__ MlaCacheGatherParams p, int warps) {
    const int lane = threadIdx.x % 32;
    const int first = int(blockIdx.x) * kGatherWarps + int(threadIdx.x / 32);
    if (first >= warps || first >= p.rows) return;
    const int rows = (p.rows - first - 1) / warps + 1;
    const int64_t own_offset = lane < rows ? find_row(p, first + lane * warps) : -1;
    const char* cache = static_cast<const char*>(p.cache);
    To* latent = static_cast<To*>(p.latent) + first * p.latent_row_stride;
    To* rope = static_cast<To*>(p.rope) + first * p.rope_row_stride;
    const int latent_octets = (p.latent_dim + kOctet - 1) / kOctet;
    const int rope_octets = (p.rope_dim + kOctet - 1) / kOctet;

    constexpr int batch = 2;
    struct Octets {
        typename Row<Format>::Latent latent[batch];
        typename Row<Format>::Rope rope;
    };
    const auto read_latent = [&](Octets& to, int64_t offset, int base) {
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            const int octet = base + 32 * i + lane;
            if (octet < latent_octets) to.latent[i] = Row<Format>::template latent<Wide>(cache + offset, octet, p.latent_dim);
        }
    };
    const auto read_rope = [&](int64_t offset, int octet) {
        return Row<Format>::template rope<Wide>(cache + offset, octet, p.latent_dim, p.rope_dim);
    };
    const auto read = [&](Octets& to, int64_t offset) {
        if (offset < 0) return;
        read_latent(to, offset, 0);
        if (lane < rope_octets) to.rope = read_rope(offset, lane);
    };
    Octet<To> none;
#pragma unroll
    for (int e = 0; e < kOctet; ++e) none.x[e] = from_float<To>(__int_as_float(0x7fffffff));

    Octets next;
    int64_t offset = __shfl_sync(~0u, own_offset, 0);
    read(next, offset);
    for (int i = 0; i < rows; ++i) {
        Octets own = next;
        // The same for the whole warp; beyond the last row it is -1, or that of the first lane again and not used.
        const int64_t next_offset = __shfl_sync(~0u, own_offset, i + 1);
        if (i + 1 < rows) read(next, next_offset);
        for (int base = 0; base < latent_octets; base += 32 * batch) {
            if (base && offset >= 0) read_latent(own, offset, base);
#pragma unroll
            for (int j = 0; j < batch; ++j) {
                const int octet = base + 32 * j + lane;
                if (octet >= latent_octets) continue;
                const Octet<To> x = offset < 0 ? none : Row<Format>::template value<To>(own.latent[j], p.cache_scale);
                store<Wide>(latent + octet * kOctet, x, p.latent_dim - octet * kOctet);
            }
        }
        for (int octet = lane; octet < rope_octets; octet += 32) {
            if (octet != lane && offset >= 0) own.rope = read_rope(offset, octet);
            const Octet<To> x = offset < 0 ? none : Row<Format>::template value<To>(own.rope, p.cache_scale);
            store<Wide>(rope + octet * kOctet, x, p.rope_dim - octet * kOctet);
        }
        offset = next_offset;
        latent += warps * p.latent_row_stride;
        rope += warps * p.rope_row_stride;
    }
}

template <int Format>
struct CacheGather {
    using Kernel = void (*)(MlaCacheGatherParams, int);

    static Kernel kernel(int dtype, bool wide) {
        switch (dtype) {
            case MLA_DTYPE_BF16: return wide ? cache_gather_kernel<__nv_bfloat16, Format, true> : cache_gather_kernel<__nv_bfloat16, Format, false>;
            case MLA_DTYPE_F16: return wide ? cache_gather_kernel<__half, Format, true> : cache_gather_kernel<__half, Format, false>;
            default: return wide ? cache_gather_kernel<float, Format, true> : cache_gather_kernel<float, Format, false>;
        }
    }
};

extern template struct CacheGather<MLA_CACHE_F32>;
extern template struct CacheGather<MLA_CACHE_F16>;
extern template struct CacheGather<MLA_CACHE_BF16>;
extern template struct CacheGather<MLA_CACHE_FP8>;
extern template struct CacheGather<MLA_CACHE_FP8_DS_MLA>;

}  // namespace mla
