// Writes cache rows, one warp per token, and rotates queries in further blocks of the same launch.
//
//   row blocks (4 tokens each)                       query blocks
//   +--------------------------------+               +--------------------------------+
//   | warp: slot, 3 octets per lane  |               | thread: 8 pairs of one head of |
//   | in flight, quantise, store     |               | one token: load, turn, store   |
//   +--------------------------------+               +--------------------------------+
//
// A row of 512 + 64 values is 64 + 8 octets: three accesses per lane, all issued before the slot is looked at.
#pragma once

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
    uint32_t query_blocks_per_token;
    bool wide;
};

template <typename Source, bool Wide>
__device__ void turn_queries(const MlaCacheWriteParams& p, uint32_t block, uint32_t blocks_per_token) {
    constexpr int pairs = Wide ? kOctet : 1;
    const uint32_t token = block / blocks_per_token;
    const int item = int(block % blocks_per_token) * kWriteThreads + int(threadIdx.x);
    const int half = p.rope_dim / 2, per_head = half / pairs;
    const int head = item / per_head;
    if (head >= p.heads) return;
    const Source* from = static_cast<const Source*>(p.query_rope) + token * p.query_token_stride + head * p.query_head_stride;
    Source* to = static_cast<Source*>(p.query_rope_out) + token * p.query_out_token_stride + head * p.query_out_head_stride;
    turn_pairs<Wide, Source, pairs>(from, to, item % per_head * pairs, Angles(p, token), p.rotary_style, half);
}

template <typename Source, int Format, bool Wide>
__global__ void __launch_bounds__(kWriteThreads) cache_write_kernel(const __grid_constant__ MlaCacheWriteParams p,
                                                                    const __grid_constant__ WritePlan plan) {
    if (blockIdx.x >= plan.row_blocks) {
        turn_queries<Source, Wide>(p, blockIdx.x - plan.row_blocks, plan.query_blocks_per_token);
        return;
    }
    const int64_t token = int64_t(blockIdx.x) * kWriteWarps + threadIdx.x / 32;
    if (token >= p.tokens) return;
    const int lane = threadIdx.x % 32;
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
        if (p.positions) r = turned<Wide>(r, rope, octet, Angles(p, token), p.rotary_style, p.rope_dim);
        Row<Format>::template put_rope<Wide>(row, octet, r, p.cache_scale, p.latent_dim, p.rope_dim);
    }
}

template <int Format>
struct CacheWrite {
    using Kernel = void (*)(MlaCacheWriteParams, WritePlan);

    static Kernel kernel(int dtype, bool wide) {
        switch (dtype) {
            case MLA_DTYPE_BF16: return wide ? cache_write_kernel<__nv_bfloat16, Format, true> : cache_write_kernel<__nv_bfloat16, Format, false>;
            case MLA_DTYPE_F16: return wide ? cache_write_kernel<__half, Format, true> : cache_write_kernel<__half, Format, false>;
            default: return wide ? cache_write_kernel<float, Format, true> : cache_write_kernel<float, Format, false>;
        }
    }
};

extern template struct CacheWrite<MLA_CACHE_F32>;
extern template struct CacheWrite<MLA_CACHE_F16>;
extern template struct CacheWrite<MLA_CACHE_BF16>;
extern template struct CacheWrite<MLA_CACHE_FP8>;
extern template struct CacheWrite<MLA_CACHE_FP8_DS_MLA>;

}  // namespace mla
