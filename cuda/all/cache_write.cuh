// Writes cache rows, a warp per token, and rotates queries in further blocks of the same launch.
//
//   row blocks                                       query blocks
//   +--------------------------------+               +--------------------------------+
//   | warp: the token's slot and its |               | thread: 8 pairs of one head of |
//   | octets in flight together,     |               | one token: load, turn, store   |
//   | then quantise and store        |               |                                |
//   +--------------------------------+               +--------------------------------+
//
// A row of 512 + 64 values is 64 + 8 octets: three accesses per lane. Several tokens per warp, in turn or loaded ahead,
// were slower at every size but the largest quantised ones: what counts is the number of warps.
#pragma once

#include "../common/instructions.cuh"
#include "../common/status.cuh"
#include "cache_row.cuh"
#include "rotary.cuh"

namespace mla {

constexpr int kWriteThreads = 128;
constexpr int kWriteWarps = kWriteThreads / 32;

// What the checks found out, beside the parameters themselves.
struct WritePlan {
    // Blocks that write rows; those after them rotate queries.
    uint32_t row_blocks;
    // Threads that share a token's queries.
    uint32_t query_threads;
};

template <typename Source, bool Wide>
__device__ void turn_queries(const MlaCacheWriteParams& p, const WritePlan& plan) {
    constexpr int pairs = Wide ? kOctet : 1;
    const uint32_t thread = (blockIdx.x - plan.row_blocks) * kWriteThreads + threadIdx.x;
    const uint32_t token = thread / plan.query_threads, item = thread % plan.query_threads;
    if (token >= uint32_t(p.tokens)) return;
    const uint32_t half = p.rope_dim / 2, per_head = half / pairs;
    const int64_t head = item / per_head;
    const Source* from = static_cast<const Source*>(p.query_rope) + token * p.query_token_stride + head * p.query_head_stride;
    Source* to = static_cast<Source*>(p.query_rope_out) + token * p.query_out_token_stride + head * p.query_out_head_stride;
    turn_pairs<Wide, Source, pairs>(p, token, from, to, int(item % per_head) * pairs);
}

template <typename Source, int Format, bool Wide, bool Turned>
__global__ void __launch_bounds__(kWriteThreads, Wide && sizeof(Source) == 2 ? (Turned ? 8 : 10) : 4) cache_write_kernel(const __grid_constant__ MlaCacheWriteParams p,
                                                                    const __grid_constant__ WritePlan plan) {
    // What follows in a layer is a product that need not wait to bring in its weights.
    let_the_next_kernel_start();
    if (Turned && blockIdx.x >= plan.row_blocks) {
        turn_queries<Source, Wide>(p, plan);
        return;
    }
    const int lane = threadIdx.x % 32;
    const int64_t token = int64_t(blockIdx.x) * kWriteWarps + threadIdx.x / 32;
    if (token >= p.tokens) return;
    const int64_t slot = p.slots[token];
    const Source* latent = static_cast<const Source*>(p.latent) + token * p.latent_token_stride;
    const Source* rope = static_cast<const Source*>(p.rope) + token * p.rope_token_stride;
    const int latent_octets = (p.latent_dim + kOctet - 1) / kOctet;
    const int rope_octets = (p.rope_dim + kOctet - 1) / kOctet;

    constexpr int batch = 2;
    Octet<Source> x[batch], r;
    const auto read_latent = [&](int base) {
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            const int octet = base + 32 * i + lane;
            if (octet < latent_octets) x[i] = load<Wide>(latent + octet * kOctet, p.latent_dim - octet * kOctet);
        }
    };
    const auto read_rope = [&](int octet) {
        if (octet < rope_octets) r = load<Wide>(rope + octet * kOctet, p.rope_dim - octet * kOctet);
    };
    read_latent(0);
    read_rope(lane);
    // The same for the whole warp.
    if (slot < 0 || slot >= p.pages * p.page_size) return;
    char* row = static_cast<char*>(p.cache) + row_offset(slot, p.page_size, p.cache_page_stride, p.cache_slot_stride);

    for (int base = 0; base < latent_octets; base += 32 * batch) {
        if (base) read_latent(base);
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            const int octet = base + 32 * i + lane;
            const bool mine = octet < latent_octets;
            const float scale = latent_scale<Format>(x[i], mine, p.cache_scale);
            if (mine) Row<Format>::template put_latent<Wide>(row, octet, x[i], scale, p.latent_dim);
        }
    }
    for (int octet = lane; octet < rope_octets; octet += 32) {
        if (octet != lane) read_rope(octet);
        if constexpr (Turned) r = turned<Wide>(r, rope, octet, Angles(p, token), p.rotary_style, p.rope_dim);
        Row<Format>::template put_rope<Wide>(row, octet, r, p.cache_scale, p.latent_dim, p.rope_dim);
    }
}

template <int Format>
struct CacheWrite {
    using Kernel = void (*)(MlaCacheWriteParams, WritePlan);

    static Kernel kernel(int dtype, bool wide, bool turned) {
        switch (dtype) {
            case MLA_DTYPE_BF16: return of<__nv_bfloat16>(wide, turned);
            case MLA_DTYPE_F16: return of<__half>(wide, turned);
            default: return of<float>(wide, turned);
        }
    }

  private:
    template <typename Source>
    static Kernel of(bool wide, bool turned) {
        if (turned) return wide ? cache_write_kernel<Source, Format, true, true> : cache_write_kernel<Source, Format, false, true>;
        return wide ? cache_write_kernel<Source, Format, true, false> : cache_write_kernel<Source, Format, false, false>;
    }
};

extern template struct CacheWrite<MLA_CACHE_F32>;
extern template struct CacheWrite<MLA_CACHE_F16>;
extern template struct CacheWrite<MLA_CACHE_BF16>;
extern template struct CacheWrite<MLA_CACHE_FP8>;
extern template struct CacheWrite<MLA_CACHE_FP8_DS_MLA>;

}  // namespace mla
