// Reads cache rows into contiguous tensors; each CTA reads a few rows.
//
//   warp 0                                all warps
//   +--------------------------------+    +-------------------------------------------+
//   | finds the rows, a lane each;   | -> | once they are there: a warp per row reads |
//   | copies them to shared memory   |    | octets, converts and stores them          |
//   | in bulk (before 9.0, all warps |    |                                           |
//   | copy them)                     |    |                                           |
//   +--------------------------------+    +-------------------------------------------+
//
// Finding a row takes dependent loads: its segment, the segment's first token, the page. Rows in
// flight to shared memory occupy no registers. An SM holds a dozen such CTAs, so finding, loading
// and storing overlap among them. Without Wide, warps read the cache itself, element by element.
#pragma once

#include "../common/status.cuh"
#include "../formats/formats.cuh"
#include "../ptx/sm90.cuh"

namespace mla {

constexpr int kGatherThreads = 128;
constexpr int kGatherWarps = kGatherThreads / 32;
// Maximum number of rows of a CTA.
constexpr int kGatherRows = 16;
// Maximum number of bytes of the rows of a CTA that has several rows. With this number, a dozen
// CTAs of an SM keep the memory busy. With twice the number, too few CTAs fit.
constexpr int64_t kGatherBytes = 10752;

constexpr int gather_rows(int64_t row_bytes) {
    int rows = kGatherRows;
    while (rows > 1 && rows * row_bytes > kGatherBytes) rows /= 2;
    return rows;
}

// The last segment of low..high that begins at or before row `row`. Segment `low` must begin there.
// Empty segments begin at the same row as the next one, and the last of these is taken.
__device__ __forceinline__ int last_segment(const MlaCacheGatherParams& p, int row, int low,
                                            int high) {
#pragma unroll 1
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (p.row_starts[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// The page of a row, or -1 if there is none, and the row's slot in the page.
struct FoundRow {
    int page = -1;
    uint32_t slot = 0;

    // The offset from the cache's first row, or its first rotary key, at these strides. It is -1 if
    // there is none.
    __device__ __forceinline__ int64_t offset(int64_t page_stride, int64_t slot_stride) const {
        return page < 0 ? -1 : page * page_stride + slot * slot_stride;
    }
};

// Finds this lane's row among `count` rows from `first` on. There is none if its page does not
// exist or if the lane has no row. Called by a whole warp: every step of the search compares 32
// segments at once. The last step also loads all other facts about the segment that it finds.
__device__ __forceinline__ FoundRow find_row(const MlaCacheGatherParams& p, int first, int count,
                                             int lane) {
    int low = 0, high = p.segments;
    // Starts ascend, so the lanes for which this holds are the first ones, and lane 0 is among
    // them.
    const auto last_before = [&](int64_t at, int start) {
        return 31 - __clz(__ballot_sync(~0u, at < high && start <= first) | 1);
    };
#pragma unroll 1
    while (high - low > 32) {
        const int step = (high - low + 31) / 32;
        const int64_t at = low + int64_t(lane) * step;
        low += last_before(at, at < high ? p.row_starts[at] : 0) * step;
        high = high - low < step ? high : low + step;
    }
    const int at = low + lane;
    // row_starts has one entry more than there are segments.
    int row_start = at <= p.segments ? p.row_starts[at] : 0;
    int token_start = at < p.segments ? p.token_starts[at] : 0;
    const int found = last_before(at, row_start);
    int segment = low + found;
    const int next_start =
        found < 31 ? __shfl_sync(~0u, row_start, found + 1) : p.row_starts[segment + 1];
    row_start = __shfl_sync(~0u, row_start, found);
    token_start = __shfl_sync(~0u, token_start, found);
    if (lane >= count) return {};
    const int row = first + lane;
    // Usually all rows are in one segment.
    if (segment + 1 < p.segments && next_start <= row) {
        segment = last_segment(p, row, segment + 1, p.segments);
        row_start = p.row_starts[segment];
        token_start = p.token_starts[segment];
    }
    const int token = token_start + row - row_start;
    if (token < 0) return {};
    const uint32_t column = uint32_t(token) / uint32_t(p.page_size),
                   slot = uint32_t(token) % uint32_t(p.page_size);
    if (column >= uint32_t(p.max_pages)) return {};
    const int page = p.block_table[segment * p.block_table_stride + column];
    if (page < 0 || page >= p.pages) return {};
    return {page, slot};
}

// Rows of a CTA and bytes of a row. For kR1Latent and kR1Rope, the compiler knows both.
struct GatherPlan {
    int rows;
    int row_bytes;
    // Bytes of the latent. In shared memory, the rotary key lies behind it, whatever the cache is.
    int latent_bytes;
    // True if rotary keys lie in a tensor of their own.
    bool split;
};

template <typename To, MlaCacheFormat Format, bool Wide, bool R1>
__global__ void __launch_bounds__(kGatherThreads, R1 ? 16 : 8)
    cache_gather_kernel(const __grid_constant__ MlaCacheGatherParams p,
                        const __grid_constant__ GatherPlan plan) {
    // With an alignment to 16 bytes, which bulk copies also accept, every gather was a microsecond
    // slower.
    extern __shared__ __align__(128) char staged[];
    __shared__ uint64_t arrived;
    __shared__ int64_t offsets[kGatherRows], rope_offsets[kGatherRows];
    constexpr RowShape r1 = Row<Format>::shape(kR1Latent, kR1Rope);
    constexpr int r1_bytes = int(r1.bytes);
    constexpr int r1_rows = gather_rows(r1_bytes);
    const int block_rows = R1 ? r1_rows : plan.rows, row_bytes = R1 ? r1_bytes : plan.row_bytes;
    const int latent_bytes = R1 ? int(r1.rope_offset) : plan.latent_bytes;
    const bool split = Row<Format>::kSplits && plan.split;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = int(blockIdx.x) * block_rows;
    const int rows = p.rows - first < block_rows ? p.rows - first : block_rows;
    const char* cache = static_cast<const char*>(p.cache);
    const char* cache_rope = static_cast<const char*>(p.cache_rope);
    const uint32_t bar = ptx::shared_address(&arrived);
#if __CUDA_ARCH__ >= 900
    constexpr bool bulk = Wide;
#else
    // Without bulk copies, all threads copy the rows to shared memory.
    constexpr bool bulk = false;
#endif

    if (warp == 0) {
        if (bulk && lane == 0) {
            ptx::mbarrier_init(bar, 1);
            ptx::fence_mbarrier_init();
        }
        const FoundRow found = find_row(p, first, rows, lane);
        const int64_t offset = found.offset(p.cache_page_stride, p.cache_slot_stride);
        if constexpr (bulk) {
            const int64_t start = __shfl_sync(~0u, offset, 0);
            const int there = __popc(__ballot_sync(~0u, offset >= 0));
            const bool neighbours =
                !split && there == rows &&
                __all_sync(~0u, lane >= rows || offset == start + lane * row_bytes);
            if (lane == 0) ptx::mbarrier_arrive_expect_tx(bar, there * row_bytes);
            __syncwarp();
            if (neighbours) {
                if (lane == 0)
                    ptx::cp_async_bulk(ptx::shared_address(staged), cache + start, rows * row_bytes,
                                       bar);
            } else if (offset >= 0) {
                const uint32_t to = ptx::shared_address(staged) + lane * row_bytes;
                ptx::cp_async_bulk(to, cache + offset, split ? latent_bytes : row_bytes, bar);
                if (split)
                    ptx::cp_async_bulk(to + latent_bytes,
                                       cache_rope + found.offset(p.cache_rope_page_stride,
                                                                 p.cache_rope_slot_stride),
                                       row_bytes - latent_bytes, bar);
            } else if (lane < rows) {
                // All ones is NaN in every format.
#pragma unroll 1
                for (int i = 0; i < row_bytes; i += 16)
                    *reinterpret_cast<uint4*>(staged + lane * row_bytes + i) = {~0u, ~0u, ~0u, ~0u};
            }
        } else if (lane < rows) {
            offsets[lane] = offset;
            rope_offsets[lane] = found.offset(p.cache_rope_page_stride, p.cache_rope_slot_stride);
        }
    }
    __syncthreads();
    if constexpr (bulk) {
        ptx::mbarrier_wait(bar, 0);
    } else if constexpr (Wide) {
        const int units = row_bytes / 16;
        for (int i = threadIdx.x; i < rows * units; i += kGatherThreads) {
            const int r = i / units, at = (i - r * units) * 16;
            uint4 x = {~0u, ~0u, ~0u, ~0u};
            if (offsets[r] >= 0)
                x = *reinterpret_cast<const uint4*>(
                    at < latent_bytes ? cache + offsets[r] + at
                                      : cache_rope + rope_offsets[r] + at - latent_bytes);
            *reinterpret_cast<uint4*>(staged + r * row_bytes + at) = x;
        }
        __syncthreads();
    }

    const int latent_dim = R1 ? kR1Latent : p.latent_dim, rope_dim = R1 ? kR1Rope : p.rope_dim;
    const int latent_octets = (latent_dim + kOctet - 1) / kOctet;
    const int rope_octets = (rope_dim + kOctet - 1) / kOctet;
    To* latent = static_cast<To*>(p.latent) + first * p.latent_row_stride;
    To* rope = static_cast<To*>(p.rope) + first * p.rope_row_stride;
    Octet<To> none;
#pragma unroll
    for (int e = 0; e < kOctet; ++e) none.x[e] = from_float<To>(__int_as_float(0x7fffffff));

#pragma unroll 1
    for (int r = warp; r < rows; r += kGatherWarps) {
        const char* row = Wide ? staged + r * row_bytes : cache + offsets[r];
        const bool there = Wide || offsets[r] >= 0;
        for (int octet = lane; octet < latent_octets; octet += 32) {
            Octet<To> x = none;
            if (there)
                x = Row<Format>::template value<To>(
                    Row<Format>::template latent<Wide>(row, octet, latent_dim, rope_dim),
                    p.cache_scale);
            store<Wide>(latent + r * p.latent_row_stride + octet * kOctet, x,
                        latent_dim - octet * kOctet);
        }
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * rope_octets; i += kGatherThreads) {
        const int r = i / rope_octets, octet = i % rope_octets;
        const char* key =
            Wide ? staged + r * row_bytes + latent_bytes : cache_rope + rope_offsets[r];
        const bool there = Wide || offsets[r] >= 0;
        Octet<To> x = none;
        if (there)
            x = Row<Format>::template value<To>(
                Row<Format>::template rope<Wide>(key, octet, rope_dim), p.cache_scale);
        store<Wide>(rope + r * p.rope_row_stride + octet * kOctet, x, rope_dim - octet * kOctet);
    }
}

using CacheGatherKernel = void (*)(MlaCacheGatherParams, GatherPlan);

template <MlaCacheFormat Format>
struct CacheGather {
    using Kernel = CacheGatherKernel;

    // `r1` is true if the widths are kR1Latent and kR1Rope. This is defined outside of the class,
    // so that only instantiations/ compiles kernels.
    static Kernel kernel(int dtype, bool wide, bool r1);

  private:
    template <typename To>
    static Kernel of(bool wide, bool r1) {
        if (!wide) return cache_gather_kernel<To, Format, false, false>;
        return r1 ? cache_gather_kernel<To, Format, true, true>
                  : cache_gather_kernel<To, Format, true, false>;
    }
};

template <MlaCacheFormat Format>
typename CacheGather<Format>::Kernel CacheGather<Format>::kernel(int dtype, bool wide, bool r1) {
    switch (dtype) {
        case MLA_DTYPE_BF16: return of<__nv_bfloat16>(wide, r1);
        case MLA_DTYPE_F16: return of<__half>(wide, r1);
        default: return of<float>(wide, r1);
    }
}

// instantiations/cache_<format>.cu compiles it. Without that file, nothing links.
#define MLA_COMPILED_ELSEWHERE(Format) extern template struct CacheGather<Format>;
MLA_CACHE_FORMATS(MLA_COMPILED_ELSEWHERE)
#undef MLA_COMPILED_ELSEWHERE

}  // namespace mla
