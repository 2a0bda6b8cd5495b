// Reads cache rows into contiguous tensors, one warp per row.
//
// A row is found in four dependent loads (its segment, the segment's first token, the page, then the row), all but the
// last from L1 or L2; what hides them is the number of warps, each of which then has three loads per lane in flight.
#pragma once

#include "../common/status.cuh"
#include "cache_row.cuh"

namespace mla {

constexpr int kGatherThreads = 128;
constexpr int kGatherWarps = kGatherThreads / 32;

// The segment that row `row` belongs to: the last one that begins at or before it. Each step asks 32 places at once, so
// a thousand segments take two. Empty segments begin where the next one does, and the last of equals is taken.
__device__ __forceinline__ int find_segment(const int32_t* row_starts, int segments, int row, int lane) {
    int low = 0, high = segments;
    while (high - low > 1) {
        const int step = (high - low + 31) / 32;
        const int probe = low + lane * step;
        const bool begins = probe < high && row_starts[probe] <= row;
        const unsigned votes = __ballot_sync(~0u, begins);
        // Lane 0 holds by construction, except where row_starts does not begin at 0.
        const int last = votes ? 31 - __clz(votes) : 0;
        low += last * step;
        high = min(high, low + step);
    }
    return low;
}

template <typename To, int Format, bool Wide>
__global__ void __launch_bounds__(kGatherThreads, 8) cache_gather_kernel(const __grid_constant__ MlaCacheGatherParams p) {
    const int64_t row = int64_t(blockIdx.x) * kGatherWarps + threadIdx.x / 32;
    if (row >= p.rows) return;
    const int lane = threadIdx.x % 32;
    const int segment = find_segment(p.row_starts, p.segments, int(row), lane);
    const int token = p.token_starts[segment] + int(row) - p.row_starts[segment];
    const int column = token / p.page_size;
    int page = -1;
    if (token >= 0 && column < p.max_pages) page = p.block_table[segment * p.block_table_stride + column];
    const bool exists = page >= 0 && page < p.pages;
    const char* from = static_cast<const char*>(p.cache) + page * p.cache_page_stride + token % p.page_size * p.cache_slot_stride;
    To* latent = static_cast<To*>(p.latent) + row * p.latent_row_stride;
    To* rope = static_cast<To*>(p.rope) + row * p.rope_row_stride;
    const int latent_octets = (p.latent_dim + kOctet - 1) / kOctet;
    const int rope_octets = (p.rope_dim + kOctet - 1) / kOctet;
    if (!exists) {
        Octet<To> none;
#pragma unroll
        for (int e = 0; e < kOctet; ++e) none.x[e] = from_float<To>(__int_as_float(0x7fffffff));
        for (int octet = lane; octet < latent_octets; octet += 32) store<Wide>(latent + octet * kOctet, none, p.latent_dim - octet * kOctet);
        for (int octet = lane; octet < rope_octets; octet += 32) store<Wide>(rope + octet * kOctet, none, p.rope_dim - octet * kOctet);
        return;
    }

    constexpr int batch = 2;
    Octet<To> x[batch], r;
    const auto read_latent = [&](int base) {
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            const int octet = base + 32 * i + lane;
            if (octet < latent_octets) x[i] = Row<Format>::template latent<Wide, To>(from, octet, p.latent_dim, p.cache_scale);
        }
    };
    const auto read_rope = [&](int octet) {
        if (octet < rope_octets) r = Row<Format>::template rope<Wide, To>(from, octet, p.latent_dim, p.rope_dim, p.cache_scale);
    };
    read_latent(0);
    read_rope(lane);
    for (int base = 0; base < latent_octets; base += 32 * batch) {
        if (base) read_latent(base);
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            const int octet = base + 32 * i + lane;
            if (octet < latent_octets) store<Wide>(latent + octet * kOctet, x[i], p.latent_dim - octet * kOctet);
        }
    }
    for (int octet = lane; octet < rope_octets; octet += 32) {
        if (octet != lane) read_rope(octet);
        store<Wide>(rope + octet * kOctet, r, p.rope_dim - octet * kOctet);
    }
}

template <int Format>
struct CacheGather {
    using Kernel = void (*)(MlaCacheGatherParams);

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
