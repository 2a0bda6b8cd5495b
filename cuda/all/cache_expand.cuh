// Keys and values of all heads from a paged cache: out (rows x columns) = latents (rows x 512)
// weights (columns x 512)^T. The latents are read in place, in their pages; the rotary parts of
// their rows are gathered separately.
//
// The GEMM is transposed. A warpgroup keeps the weights of 64 columns in registers, as A operands.
// Latents are B operands, so shared memory is read for the latents alone. A CTA has 128 columns and
// loops over tiles of 128 rows. The two CTAs of a cluster have the same tiles of rows, and each
// loads half of them for both. Without that, L2 would bound the kernel.
//
// The warps of a CTA:
//
//   warp 0              loads the weights, then the latents in panels of 64 values
//   warps 1 to 3        gather rotary parts
//   warpgroups 1 and 2  in pingpong: one multiplies a tile while the other rounds and stores
//
// The rows of a tile are all of one segment, so a segment's last tile may be short. TMA copies
// latents, 64 rows of a page at a time. If a segment does not begin at a multiple of 64 tokens, TMA
// copies them row by row. A tensor of rows is one segment of one page that has all of them.
//
// A row's sums do not depend on other rows, nor on its place in a tile.
//
// Needs code for sm_90a.
#pragma once

#include "../common/pipeline.cuh"
#include "../common/swizzle.cuh"
#include "../ptx/wgmma.cuh"
#include "cache_gather.cuh"

namespace mla {

constexpr int kExpandRows = 128, kExpandColumns = 128, kExpandDepth = 512;
constexpr int kExpandThreads = 384;
// CTAs of a cluster.
constexpr int kExpandCtas = 2;
// Maximum number of segments: the lanes of a warp have one each.
constexpr int kExpandSegments = 32;

// A panel is 64 values of 128 rows, or of 128 columns.
constexpr int kExpandPanels = kExpandDepth / 64, kExpandStages = 12;
constexpr int kExpandPanelBytes = 128 * 128;

struct ExpandMaps {
    // Boxes of 64 rows, and of one.
    CUtensorMap latents, latent_row;
    CUtensorMap weights, out;
};

struct ExpandPlan {
    MlaCacheGatherParams rows;
    void* out;
    int64_t out_row_stride;  // bytes
    // Number of column tiles for each CTA of a cluster, and number of runs into which the tiles of
    // rows are divided.
    int columns, runs;
};

struct ExpandMemory {
    uint8_t panels[kExpandStages][kExpandPanelBytes];
    // Rounded results of each warpgroup: 128 rows of 64 columns.
    uint8_t rounded[2][kExpandPanelBytes];
    Barrier<1> full[kExpandStages];
    // A lane of each consumer warp of both CTAs arrives.
    Barrier<8 * kExpandCtas> empty[kExpandStages];
    // Completes when the other warpgroup has enqueued its MMAs of a tile.
    Barrier<4> mma_order[2];
};
constexpr int kExpandBytes = sizeof(ExpandMemory) + 1024;
static_assert(kExpandBytes <= 232448, "the CTA fits an SM");

// A tile of rows.
struct ExpandTile {
    int segment;
    // First row in the output, and number of rows. All of them belong to the segment.
    int first_row, rows;
    // Token of the first row.
    int token;
};

// Finds tiles. All lanes of a warp do this together, and each lane has a segment.
class ExpandTiles {
  public:
    __device__ explicit ExpandTiles(const MlaCacheGatherParams& p) {
        const int lane = threadIdx.x % 32;
        const bool has = lane < p.segments;
        // No start leads outside of the output, whatever the array holds.
        row_ = has ? max(0, min(p.row_starts[lane], p.rows)) : p.rows;
        token_ = has ? p.token_starts[lane] : 0;
        rows_ = has ? max(0, min(p.row_starts[lane + 1], p.rows) - row_) : 0;
        const int tiles = (rows_ + kExpandRows - 1) / kExpandRows;
        end_ = tiles;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int before = __shfl_up_sync(~0u, end_, distance);
            if (lane >= distance) end_ += before;
        }
        begin_ = end_ - tiles;
    }

    __device__ int count() const { return __shfl_sync(~0u, end_, 31); }

    __device__ ExpandTile tile(int index) const {
        const int lane = __ffs(__ballot_sync(~0u, end_ > index)) - 1;
        const int before = (index - __shfl_sync(~0u, begin_, lane)) * kExpandRows;
        return {lane, __shfl_sync(~0u, row_, lane) + before,
                min(__shfl_sync(~0u, rows_, lane) - before, kExpandRows),
                __shfl_sync(~0u, token_, lane) + before};
    }

  private:
    int row_, token_, rows_, begin_, end_;
};

template <typename T>
struct Expansion {
    const ExpandPlan& p;
    const ExpandMaps& maps;
    ExpandMemory& s;
    // Rank of the CTA in its cluster.
    int rank;

    // Calls work(column tile, first and last tile of rows) for each item of this CTA. Neighbouring
    // CTAs have the same rows.
    template <typename Work>
    __device__ void for_each_item(int tiles, Work work) const {
        const int clusters = gridDim.x / kExpandCtas;
        for (int item = blockIdx.x / kExpandCtas; item < p.columns * p.runs; item += clusters) {
            const int run = item / p.columns;
            work((item - run * p.columns) * kExpandCtas + rank, int(int64_t(tiles) * run / p.runs),
                 int(int64_t(tiles) * (run + 1) / p.runs));
        }
    }

    // Warp 0 loads weights and latents.
    __device__ void produce() const {
        const int lane = threadIdx.x % 32;
        if (lane == 0) {
            ptx::prefetch_tensormap(&maps.latents);
            ptx::prefetch_tensormap(&maps.weights);
            ptx::prefetch_tensormap(&maps.out);
        }
        const ExpandTiles tiles(p.rows);
        PipelineState<kExpandStages> ring;
        for_each_item(tiles.count(), [&](int column, int begin, int end) {
            if (lane == 0)
                load_panels(ring, [&](int x, uint32_t to, uint32_t full) {
                    ptx::cp_async_bulk_tensor(&maps.weights, to, full, ptx::CachePolicy{}, x,
                                              column * kExpandColumns, 0);
                });
            __syncwarp();
            for (int index = begin; index < end; ++index) load_tile(tiles.tile(index), ring, lane);
        });
    }

    // Warps 1 to 3 gather rotary parts. Eight lanes copy a row of 64 values.
    __device__ void gather_rope() const {
        if (!p.rows.rope) return;
        const int lane = threadIdx.x % 32, chunk = lane % 8;
        const int warp = blockIdx.x * 3 + threadIdx.x / 32 - 1, warps = gridDim.x * 3;
        const char* cache = static_cast<const char*>(p.rows.cache_rope);
        char* rope = static_cast<char*>(p.rows.rope);
        for (int first = warp * 32; first < p.rows.rows; first += warps * 32) {
            const int count = min(p.rows.rows - first, 32);
            const int64_t offset =
                find_row(p.rows, first, count, lane)
                    .offset(p.rows.cache_rope_page_stride, p.rows.cache_rope_slot_stride);
#pragma unroll
            for (int i = 0; i < 32; i += 4) {
                const int row = i + lane / 8;
                const int64_t from = __shfl_sync(~0u, offset, row);
                if (row >= count) continue;
                // A page outside of the cache gives NaN.
                uint4 v = make_uint4(~0u, ~0u, ~0u, ~0u);
                if (from >= 0) v = *reinterpret_cast<const uint4*>(cache + from + chunk * 16);
                *reinterpret_cast<uint4*>(
                    rope + (first + row) * p.rows.rope_row_stride * sizeof(T) + chunk * 16) = v;
            }
        }
    }

    // Warpgroups 1 and 2: the consumers.
    __device__ void multiply_and_store(int group) const {
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        const ExpandTiles tiles(p.rows);
        PipelineState<kExpandStages> ring;
        uint32_t order_waits = 0;
        for_each_item(tiles.count(), [&](int column, int begin, int end) {
            uint32_t weights[kExpandDepth / 16][4];
            hold_weights(weights, ring, group * 64 + warp * 16, lane);
            for (int index = begin; index < end; ++index) {
                float d[64];
                // The first warpgroup begins.
                s.mma_order[group].wait((order_waits++ & 1) ^ (group == 0));
                multiply(d, weights, ring, group, lane);
                store(d, tiles.tile(index), column * kExpandColumns + group * 64, group, warp,
                      lane);
            }
        });
        ptx::cp_async_bulk_wait_group();
    }

  private:
    // Calls `load(first value, address, barrier)` for the panels of 128 rows or columns.
    template <typename Load>
    __device__ void load_panels(PipelineState<kExpandStages>& ring, Load load) const {
        for (int i = 0; i < kExpandPanels; ++i, ring.advance(1)) {
            s.empty[ring.stage].wait(ring.phase ^ 1);
            s.full[ring.stage].expect(kExpandPanelBytes);
            load(i * 64, ptx::shared_address(s.panels[ring.stage]), s.full[ring.stage].address());
        }
    }

    __device__ void load_tile(const ExpandTile& tile, PipelineState<kExpandStages>& ring,
                              int lane) const {
        constexpr int rows = kExpandRows / kExpandCtas;
        constexpr uint16_t all = (1 << kExpandCtas) - 1;
        static_assert(rows == 64, "a box");
        const bool whole = tile.token % rows == 0;
        const int first = rank * rows;
        const int2 begin = place(tile, first);
        if (lane == 0)
            load_panels(ring, [&](int x, uint32_t to, uint32_t full) {
                // Rows behind the segment's end have no page. TMA fills them, and they are not
                // stored.
                for (int row = first; row < first + rows; row += whole ? rows : 1) {
                    const int2 at = whole ? begin : place(tile, row);
                    ptx::cp_async_bulk_tensor_multicast(whole ? &maps.latents : &maps.latent_row,
                                                        to + row * 128, full, all, x, at.y, at.x);
                }
            });
        __syncwarp();
    }

    // Page and slot of a tile's row; page -1 if there is none.
    __device__ int2 place(const ExpandTile& tile, int row) const {
        const int token = tile.token + row;
        if (row >= tile.rows || token < 0) return {-1, 0};
        const uint32_t page = uint32_t(token) / uint32_t(p.rows.page_size);
        if (page >= uint32_t(p.rows.max_pages)) return {-1, 0};
        return {p.rows.block_table[tile.segment * p.rows.block_table_stride + page],
                int(uint32_t(token) - page * uint32_t(p.rows.page_size))};
    }

    // Loads the weights of a warp's sixteen columns as A operands.
    __device__ __forceinline__ void hold_weights(uint32_t (&weights)[kExpandDepth / 16][4],
                                                 PipelineState<kExpandStages>& ring, int column,
                                                 int lane) const {
#pragma unroll
        for (int i = 0; i < kExpandPanels; ++i) {
            s.full[ring.stage].wait(ring.phase);
            const uint32_t panel = ptx::shared_address(s.panels[ring.stage]);
#pragma unroll
            for (int k = 0; k < 4; ++k)
                ptx::ldmatrix_x4(weights[4 * i + k],
                                 panel + swizzled<128>(column + (lane & 15), 2 * k + (lane >> 4)));
            // TMA is going to write where a warp has read. An arrival does not wait until earlier
            // loads have returned, but the fence does.
            ptx::fence_proxy_async();
            __syncwarp();
            free(ring, lane);
            ring.advance(1);
        }
    }

    // Releases a stage in both CTAs, each of which loads half of it. Called by a warp that has read
    // the stage.
    __device__ void free(const PipelineState<kExpandStages>& ring, int lane) const {
        if (lane < kExpandCtas)
            ptx::mbarrier_arrive_cluster(ptx::mapa(s.empty[ring.stage].address(), lane));
    }

    __device__ __forceinline__ void multiply(float (&d)[64],
                                             const uint32_t (&weights)[kExpandDepth / 16][4],
                                             PipelineState<kExpandStages>& ring, int group,
                                             int lane) const {
        PipelineState<kExpandStages> at = ring.warp_uniform(), done = at;
#pragma unroll
        for (int i = 0; i < kExpandPanels; ++i) {
            s.full[at.stage].wait(at.phase);
            const uint64_t b = ptx::wgmma_descriptor(ptx::shared_address(s.panels[at.stage]));
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k)
                ptx::WgmmaFromRegisters<T, kExpandRows>::run(d, weights[4 * i + k], b + 2 * k,
                                                             i > 0 || k > 0);
            ptx::wgmma_commit_group();
            if (i == kExpandPanels - 1 && lane == 0) s.mma_order[group ^ 1].arrive();
            if (i > 0) {
                ptx::wgmma_wait_group<1>();
                free(done, lane);
                done.advance(1);
            }
            at.advance(1);
        }
        ptx::wgmma_wait_group<0>();
        free(done, lane);
        ring.advance(kExpandPanels);
    }

    __device__ __forceinline__ void store(const float (&d)[64], const ExpandTile& tile, int column,
                                          int group, int warp, int lane) const {
        const uint32_t rounded = ptx::shared_address(s.rounded[group]);
        const bool first_thread = warp == 0 && lane == 0;
        if (first_thread) ptx::cp_async_bulk_wait_group_read();
        sync(group);
        // The row whose address a lane gives for its matrix, and the chunk of the matrix's eight
        // columns.
        const int matrix = lane / 8, row = matrix / 2 * 8 + lane % 8, chunk = 2 * warp + matrix % 2;
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
            const float* v = &d[4 * i];
            ptx::stmatrix_x4_trans(rounded + swizzled<128>(8 * i + row, chunk),
                                   ptx::cvt_rn_x2<T>(v[0], v[1]), ptx::cvt_rn_x2<T>(v[2], v[3]),
                                   ptx::cvt_rn_x2<T>(v[4], v[5]), ptx::cvt_rn_x2<T>(v[6], v[7]));
        }
        ptx::fence_proxy_async();
        sync(group);
        // TMA leaves out rows behind the output's end.
        if (tile.rows == kExpandRows || tile.first_row + tile.rows == p.rows.rows) {
            if (first_thread)
                ptx::cp_async_bulk_tensor_store(&maps.out, rounded, column, tile.first_row, 0, 0);
        } else {
            store_rows(rounded, column, tile, warp * 32 + lane);
        }
    }

    __device__ void store_rows(uint32_t rounded, int column, const ExpandTile& tile,
                               int thread) const {
        char* out =
            static_cast<char*>(p.out) + tile.first_row * p.out_row_stride + column * int(sizeof(T));
#pragma unroll 1
        for (int i = thread; i < tile.rows * 8; i += 128) {
            const int row = i / 8, chunk = i % 8;
            *reinterpret_cast<uint4*>(out + row * p.out_row_stride + chunk * 16) =
                ptx::ld_shared_v4(rounded + swizzled<128>(row, chunk));
        }
    }

    __device__ static void sync(int group) {
        asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
    }
};

template <typename T>
__global__ void __launch_bounds__(kExpandThreads, 1)
    cache_expand_kernel(const __grid_constant__ ExpandPlan p,
                        const __grid_constant__ ExpandMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint8_t memory[];
    // The 128-byte swizzle of panels is relative to multiples of 1024 bytes.
    auto& s = *reinterpret_cast<ExpandMemory*>((reinterpret_cast<uintptr_t>(memory) + 1023) &
                                               ~uintptr_t(1023));
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < kExpandStages; ++i) {
            s.full[i].init();
            s.empty[i].init();
        }
        s.mma_order[0].init();
        s.mma_order[1].init();
        ptx::fence_mbarrier_init();
    }
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
    const Expansion<T> expansion{p, maps, s, int(ptx::cluster_ctarank())};
    if (warp < 4) {
        ptx::setmaxnreg_dec<40>();
        if (warp == 0)
            expansion.produce();
        else
            expansion.gather_rope();
    } else {
        ptx::setmaxnreg_inc<232>();
        expansion.multiply_and_store(warp / 4 - 1);
    }
    // Before this barrier completes, the other CTA may copy to this one's shared memory, and arrive
    // at its barriers.
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
#endif
}

}  // namespace mla
