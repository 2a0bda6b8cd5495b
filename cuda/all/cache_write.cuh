// Writes cache rows, a warp per token, and rotates queries in further CTAs of the same launch.
//
//   row CTAs                                         query CTAs
//   +--------------------------------+               +--------------------------------+
//   | warp: the token's slot and its |               | thread: 8 pairs of one head of |
//   | octets in flight together,     |               | one token: load, rotate, store |
//   | then quantise and store        |               |                                |
//   +--------------------------------+               +--------------------------------+
//
// A row of 512 + 64 values is 64 + 8 octets: three accesses per lane. Several tokens per warp (one
// after another, or loaded ahead) were slower or no faster. So were rows that bulk copies brought
// through shared memory (docs/log/helpers.md).
#pragma once

#include "../common/status.cuh"
#include "../formats/formats.cuh"
#include "../ptx/sm90.cuh"
#include "rotary.cuh"

namespace mla {

constexpr int kWriteThreads = 128;

// Results of the checks, in addition to the parameters themselves.
struct WritePlan {
    // Number of CTAs that write rows. The CTAs after them rotate queries.
    uint32_t row_blocks;
    // Number of threads that share a token's queries.
    uint32_t query_threads;
    // Inverse of cache_scale, for MLA_CACHE_FP8.
    Inverse inverse;
};

// The work of thread `thread` among those that rotate queries.
template <typename Source, bool Wide>
__device__ __forceinline__ void rotate_queries(const MlaCacheWriteParams& p, const WritePlan& plan,
                                               uint32_t thread) {
    constexpr int pairs = Wide ? kOctet : 1;
    const uint32_t token = thread / plan.query_threads, item = thread % plan.query_threads;
    if (token >= uint32_t(p.tokens)) return;
    const uint32_t half = p.rope_dim / 2, per_head = half / pairs;
    const int64_t head = item / per_head;
    const Source* from = static_cast<const Source*>(p.query_rope) + token * p.query_token_stride +
                         head * p.query_head_stride;
    Source* to = static_cast<Source*>(p.query_rope_out) + token * p.query_out_token_stride +
                 head * p.query_out_head_stride;
    rotate_pairs<Wide, Source, pairs>(p, token, from, to, int(item % per_head) * pairs);
}

// The rotary key of a slot whose row begins at `row`.
template <MlaCacheFormat Format>
__device__ __forceinline__ char* rope_of(const MlaCacheWriteParams& p, char* row, uint32_t slot,
                                         int latent_dim) {
    if constexpr (Row<Format>::kSplits)
        return static_cast<char*>(p.cache_rope) +
               row_offset(slot, p.page_size, p.cache_rope_page_stride, p.cache_rope_slot_stride);
    else
        return row + int(Row<Format>::shape(latent_dim, 0).rope_offset);
}

// The work of CTA `block` of `Threads` threads.
template <typename Source, MlaCacheFormat Format, bool Wide, bool Rotated, bool R1, int Threads>
__device__ __forceinline__ void write_block(const MlaCacheWriteParams& p, const WritePlan& plan,
                                            uint32_t block) {
    if (Rotated && block >= plan.row_blocks) {
        rotate_queries<Source, Wide>(p, plan, (block - plan.row_blocks) * Threads + threadIdx.x);
        return;
    }
    const int lane = threadIdx.x % 32;
    const int64_t token = int64_t(block) * (Threads / 32) + threadIdx.x / 32;
    const int latent_dim = R1 ? kR1Latent : p.latent_dim, rope_dim = R1 ? kR1Rope : p.rope_dim;
    const Source* latent = static_cast<const Source*>(p.latent) + token * p.latent_token_stride;
    const Source* rope = static_cast<const Source*>(p.rope) + token * p.rope_token_stride;
    const int latent_octets = (latent_dim + kOctet - 1) / kOctet;
    const int rope_octets = (rope_dim + kOctet - 1) / kOctet;

    constexpr int batch = 2;
    Octet<Source> x[batch], r;
    const auto read_latent = [&](int base) {
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            const int octet = base + 32 * i + lane;
            if (octet < latent_octets)
                x[i] = load<Wide>(latent + octet * kOctet, latent_dim - octet * kOctet);
        }
    };
    const auto read_rope = [&](int octet) {
        if (octet < rope_octets) r = load<Wide>(rope + octet * kOctet, rope_dim - octet * kOctet);
    };
    // The slot is the same for the whole warp. All loads are in one condition. If there were a
    // return before them, the compiler would move the loads of the latent behind the check of the
    // slot. That would add a second wait.
    int64_t slot = -1;
    if (token < p.tokens) {
        read_latent(0);
        read_rope(lane);
        slot = p.slots[token];
    }
    if (slot < 0 || slot >= p.pages * p.page_size) return;
    char* row = static_cast<char*>(p.cache) +
                row_offset(slot, p.page_size, p.cache_page_stride, p.cache_slot_stride);
    Scale cache_scale = {p.cache_scale, plan.inverse};
    if constexpr (Row<Format>::kTokenScale) {
        float amax = 0.f;
        for (int base = 0; base < latent_octets; base += 32 * batch) {
            if (base) read_latent(base);
#pragma unroll
            for (int i = 0; i < batch; ++i)
                if (base + 32 * i + lane < latent_octets) amax = largest_magnitude(x[i], amax);
        }
        if (latent_octets > 32 * batch) read_latent(0);
        cache_scale.value = Row<Format>::token_scale(amax);
        if (lane == 0) Row<Format>::put_scale(row, cache_scale.value, latent_dim, rope_dim);
    }

    for (int base = 0; base < latent_octets; base += 32 * batch) {
        if (base) read_latent(base);
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            const int octet = base + 32 * i + lane;
            const bool mine = octet < latent_octets;
            const Scale scale = Row<Format>::latent_scale(x[i], mine, cache_scale);
            if (mine) Row<Format>::template put_latent<Wide>(row, octet, x[i], scale, latent_dim);
        }
    }
    for (int octet = lane; octet < rope_octets; octet += 32) {
        if (octet != lane) read_rope(octet);
        if constexpr (Rotated)
            r = rotated<Wide>(r, rope, octet, Angles(p, token), p.rotary_style, rope_dim);
        Row<Format>::template put_rope<Wide>(rope_of<Format>(p, row, uint32_t(slot), latent_dim),
                                             octet, r, cache_scale, rope_dim);
    }
}

// Number of CTAs of an SM. A row that is copied, or quantised from 16 bits, needs 32 registers a
// thread. All 64 warps of the SM then have a row in flight. Quotients by a token's scale need more
// registers.
template <typename Source, MlaCacheFormat Format>
constexpr int write_blocks(bool wide, bool rotated, bool r1) {
    return !wide || sizeof(Source) == 4      ? 4
           : rotated                         ? (r1 ? 10 : 8)
           : r1 && !Row<Format>::kTokenScale ? 16
                                             : 10;
}

template <typename Source, MlaCacheFormat Format, bool Wide, bool Rotated, bool R1>
__global__ void __launch_bounds__(kWriteThreads, (write_blocks<Source, Format>(Wide, Rotated, R1)))
    cache_write_kernel(const __grid_constant__ MlaCacheWriteParams p,
                       const __grid_constant__ WritePlan plan) {
    // The next kernel of a layer may be a GEMM that need not wait to load its weights.
    ptx::griddepcontrol_launch_dependents();
    write_block<Source, Format, Wide, Rotated, R1, kWriteThreads>(p, plan, blockIdx.x);
}

// A write as planned for the kernels.
struct WriteLaunch {
    WritePlan plan;
    int64_t blocks;
    // `wide`: everything can be accessed 16 bytes at a time. `rotated`: something is rotated. `r1`:
    // the widths are kR1Latent and kR1Rope.
    bool wide, rotated, r1;
};

// Checks every argument, for CTAs of `threads` threads. Without tokens there is nothing to
// launch, and only `blocks` is set.
MlaStatus plan_write(const MlaCacheWriteParams& p, int threads, WriteLaunch& launch);

using CacheWriteKernel = void (*)(MlaCacheWriteParams, WritePlan);

template <MlaCacheFormat Format>
struct CacheWrite {
    using Kernel = CacheWriteKernel;

    // `r1` is true if the widths are kR1Latent and kR1Rope. This is defined outside of the class,
    // so that only instantiations/ compiles kernels.
    static Kernel kernel(int dtype, bool wide, bool rotated, bool r1);

  private:
    template <typename Source, bool Rotated>
    static Kernel of(bool wide, bool r1) {
        if (!wide) return cache_write_kernel<Source, Format, false, Rotated, false>;
        return r1 ? cache_write_kernel<Source, Format, true, Rotated, true>
                  : cache_write_kernel<Source, Format, true, Rotated, false>;
    }
};

template <MlaCacheFormat Format>
typename CacheWrite<Format>::Kernel CacheWrite<Format>::kernel(int dtype, bool wide, bool rotated,
                                                               bool r1) {
    switch (dtype) {
        case MLA_DTYPE_BF16:
            return rotated ? of<__nv_bfloat16, true>(wide, r1) : of<__nv_bfloat16, false>(wide, r1);
        case MLA_DTYPE_F16:
            return rotated ? of<__half, true>(wide, r1) : of<__half, false>(wide, r1);
        default: return rotated ? of<float, true>(wide, r1) : of<float, false>(wide, r1);
    }
}

// instantiations/cache_<format>.cu compiles it. Without that file, nothing links.
#define MLA_COMPILED_ELSEWHERE(Format) extern template struct CacheWrite<Format>;
MLA_CACHE_FORMATS(MLA_COMPILED_ELSEWHERE)
#undef MLA_COMPILED_ELSEWHERE

}  // namespace mla
