// The prologue, which runs before the work is planned. The lengths and the block table arrive, and
// the first KV tile and the queries are brought into L2.
#pragma once

#include "context.cuh"

namespace mla::sm90::decode {

// Run by warps 2 and 3 while the lengths are in flight, and by one warp of the scores.
template <class C>
struct Prologue {
    using L = typename C::L;
    using T = typename C::T;
    static constexpr int N = C::N;

    const Context<C>& c;
    const KernelParams& p = c.p;
    typename C::Control& s = c.s;

    // Begins to copy the lengths.
    __device__ void fetch_lengths(int lane) const {
#pragma unroll 1
        for (int i = lane; i < p.requests; i += 32)
            ptx::cp_async_4(ptx::shared_address(s.lens + i), p.kv_lens + i);
    }
    // Waits for the lengths, and publishes them.
    __device__ void finish_lengths() const {
        ptx::cp_async_wait_all();
        s.lengths_full.arrive();
    }

    __device__ void fetch_table(int lane) const {
        const int64_t entries = p.block_table_entries;
        if (c.table_is_small()) {
            if ((reinterpret_cast<uintptr_t>(p.block_table) & 15) == 0 && (entries & 3) == 0) {
#pragma unroll 1
                for (int i = lane * 4; i < entries; i += 128)
                    ptx::cp_async_16(c.table_copy() + i * 4, p.block_table + i, true);
            } else {
#pragma unroll 1
                for (int i = lane; i < entries; i += 32)
                    ptx::cp_async_4(c.table_copy() + i * 4, p.block_table + i);
            }
        } else {
            const int64_t entry = (int64_t(c.cta()) * 32 + lane) * 32;
            if (entry < entries) ptx::prefetch_global_l2(p.block_table + entry);
        }
    }

    // Waits for the copy of the table. Returns the location of the KV tile with which this CTA
    // probably begins. Its page is -1 if the location is not known, or if the tile's tokens are not
    // contiguous.
    __device__ PagePosition finish_table(const TileScheduler& scheduler) const {
        ptx::cp_async_wait_all();
        __syncwarp();
        s.lengths_full.wait(0);
        const Start start = scheduler.likely_start();
        PagePosition first_tile = {-1, 0};
        if (p.run == kTileTokens && start.request >= 0) {
            // The entry of a request without tokens may be anything; TMA leaves out a page that the
            // cache does not have.
            const int token = start.kv_tile * kTileTokens, page = c.page_of(token);
            const int64_t entry = start.request * p.block_table_stride + page;
            if (entry < p.block_table_entries)
                first_tile = {c.table_is_small()
                                  ? ptx::ld_shared_s32(c.table_copy() + int(entry) * 4)
                                  : p.block_table[entry],
                              token - page * p.page_size};
        }
        // After these arrivals, the copy of the table may be overwritten.
        __syncwarp();
        s.table_full.arrive();
        return first_tile;
    }

    // Prefetches the queries of a small batch into L2: at most `max_rows` rows, of which each CTA
    // has some. TMA asks for queries only when there are work items, and then in many CTAs at the
    // same time.
    __device__ void prefetch_queries(int lane) const {
        constexpr int max_rows = 32, latent_lines = C::Dims::kLatentPanels,
                      lines = C::Dims::kPanels;
        const int rows = p.requests * p.query_len * p.heads,
                  own = unsigned(rows + c.ctas() - 1) / c.ctas();
        if (!p.even_query || p.cu_q_lens || own > max_rows) return;
#pragma unroll 1
        for (int i = lane; i < own * lines; i += 32) {
            const int of_block = unsigned(i) / lines, line = i - of_block * lines,
                      row = c.cta() * own + of_block;
            const char* latent =
                static_cast<const char*>(p.q_latent) + row * p.q_latent_head_stride * 2;
            const char* rope = static_cast<const char*>(p.q_rope) + row * p.q_rope_head_stride * 2;
            if (row < rows)
                ptx::prefetch_global_l2(line < latent_lines ? latent + line * 128 : rope);
        }
        __syncwarp();
    }
};

}  // namespace mla::sm90::decode
