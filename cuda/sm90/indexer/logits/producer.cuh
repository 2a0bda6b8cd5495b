// The producer warp. It loads the queries of an item once, and then the item's keys and their
// scales, tile by tile.
#pragma once

#include "../../../common/page_position.cuh"
#include "params.cuh"

namespace mla::sm90::logits {

template <typename C>
struct Producer {
    const KernelParams& p;
    Shared<C>& s;
    const int lane;
    const ptx::CachePolicy policy;
    PipelineState<C::kStages> ring;
    PipelineState<2> items;

    __device__ __forceinline__ Producer(const KernelParams& p, Shared<C>& s)
        : p(p),
          s(s),
          lane(threadIdx.x % 32),
          policy(p.stream_once ? ptx::createpolicy_evict_first() : ptx::CachePolicy{}) {}

    // True after griddepcontrol.wait. Before it, this warp may read the first item and the pages of
    // its keys, but not its queries.
    bool waited = false;

    __device__ __forceinline__ void run() {
        if (!p.facts_ahead) wait();
        if (p.equal_ranges)
            run_range();
        else
            run_items();
        if (!waited) wait();
        publish({});
    }

    __device__ __forceinline__ void wait() {
        waited = true;
        ptx::griddepcontrol_wait();
        // The next kernel is released only after the wait. When it starts, everything that was
        // written before this kernel began is therefore complete.
        ptx::griddepcontrol_launch_dependents();
    }

    // Loads the queries of an item, and its keys.
    __device__ __forceinline__ void load(const WorkItem& item, const int32_t* table) {
        const int end = item.key + item.keys;
        const bool whole = p.box == kTileKeys;
        const PagePosition first =
            whole ? find(table, item.key + lane * kTileKeys, end) : PagePosition{-1, 0};
        if (!waited) wait();
        // The queries come before the keys, because this warp takes a while to issue the copy of
        // each tile.
        publish(item);
        if (whole)
            load_whole_tiles(table, first, item.key, end);
        else
            for (int position = item.key; position < end; position += kTileKeys)
                load_boxes(table, position, end);
    }

    // Goes through this CTA's range of all tiles, one request after the other.
    __device__ __forceinline__ void run_range() {
        const indexer::TileRange range =
            indexer::tile_range_of<C::kBlock>(p.rows, p.count, blockIdx.x, gridDim.x, lane);
        int before = range.before, tile = range.begin;
        for (int request = range.request; tile < range.end; ++request) {
            const auto of = indexer::RequestRows::of(p.rows, request, p.count);
            const int32_t* table = p.rows.block_table + request * p.rows.block_table_stride;
            for (int row = of.begin; row < of.end && tile < range.end; row += C::kBlock) {
                const int seen = of.seen(p.rows, row, C::kBlock);
                const int behind = before + indexer::tiles_for(seen);
                if (tile < behind) {
                    const int key = (tile - before) * kTileKeys;
                    const int end = min((range.end - before) * kTileKeys, seen);
                    load({row, row, min(row + C::kBlock, of.end), of.length, of.last - row, key,
                          end - key},
                         table);
                    tile = behind;
                }
                before = behind;
            }
        }
    }

    __device__ __forceinline__ void run_items() {
        const int items = p.blocks * p.ranges;
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
            // Items are ordered by range first. Short requests do not reach the later ranges, which
            // therefore come last.
            const int block = item % p.blocks, range = item / p.blocks;
            const int first = block * C::kBlock, last = min(first + C::kBlock, p.count);
            for (int row = first; row < last;) {
                const indexer::Row of = indexer::find_row(p.rows, row, lane);
                // There is at least one row, whatever the starts are. Otherwise, the loop would not
                // end.
                const int rows = max(1, min(last - row, of.behind + 1));
                const int seen = indexer::seen_by(p.rows, of.length, of.behind - (rows - 1));
                const int begin = range * p.keys_of_range;
                const int end = min(seen, begin + p.keys_of_range);
                if (begin < end)
                    load({first, row, row + rows, of.length, of.behind, begin, end - begin},
                         of.table);
                row += rows;
            }
        }
    }

    // Publishes an item and loads its queries. An empty item marks the end.
    __device__ __forceinline__ void publish(const WorkItem& item) {
        s.queries_empty[items.stage].wait(items.phase ^ 1);
        if (lane == 0) {
            s.items[items.stage] = item;
            if (item.keys > 0) {
                s.queries_full[items.stage].expect(C::kQueryBytes);
                for (int row = 0; row < C::kBlock * C::kHeads; row += C::kColumns)
                    ptx::cp_async_bulk_tensor(
                        &p.queries, ptx::shared_address(s.queries[items.stage]) + row * kWidth,
                        s.queries_full[items.stage].address(), ptx::CachePolicy{}, 0,
                        item.first * C::kHeads + row, 0);
            } else {
                s.queries_full[items.stage].arrive();
            }
        }
        __syncwarp();
        items.advance(1);
    }

    __device__ __forceinline__ int column_of(int position) const {
        return p.rows.page_shift >= 0 ? position >> p.rows.page_shift : position / p.rows.page_size;
    }

    // The place of a key. Its page is -1 if the block table has no page of the cache there.
    __device__ __forceinline__ PagePosition find(const int32_t* table, int position,
                                                 int end) const {
        const int column = column_of(position);
        if (position >= end || column >= p.rows.max_pages) return {-1, 0};
        const int page = table[column];
        return {page < p.pages ? page : -1, position - column * p.rows.page_size};
    }
    __device__ __forceinline__ const uint8_t* scales_at(const PagePosition& at) const {
        return p.cache + at.page * p.page_stride + int64_t(p.rows.page_size) * kWidth +
               at.offset * 4;
    }

    // Loads tiles of which each lies within one page. A lane looks up one of 32 tiles while the
    // tiles before these are loaded. `next` is its result for the first 32.
    __device__ __forceinline__ void load_whole_tiles(const int32_t* table, PagePosition next,
                                                     int begin, int end) {
        for (int base = begin; base < end; base += 32 * kTileKeys) {
            const PagePosition own = next;
            next = find(table, base + (32 + lane) * kTileKeys, end);
            const int count = min((end - base + kTileKeys - 1) / kTileKeys, 32);
            for (int i = 0; i < count; ++i) {
                const PagePosition at = {__shfl_sync(~0u, own.page, i),
                                         __shfl_sync(~0u, own.offset, i)};
                if (lane == 0) load_whole_tile(at);
                ring.advance(1);
            }
        }
    }

    __device__ __forceinline__ void load_whole_tile(const PagePosition& at) {
        const auto& full = s.keys_full[ring.stage];
        s.keys_empty[ring.stage].wait(ring.phase ^ 1);
        float* scales = s.scales[ring.stage];
        if (at.page >= 0) {
            full.expect(kTileBytes + kTileKeys * 4);
            ptx::cp_async_bulk(ptx::shared_address(scales), scales_at(at), kTileKeys * 4,
                               full.address());
        } else {
            for (int i = 0; i < kTileKeys; ++i) scales[i] = 0;
            full.expect(kTileBytes);
        }
        load_box(ptx::shared_address(s.keys[ring.stage]), at);
    }

    // Page `pages` is behind the tensor's last page. TMA reads zeros there.
    __device__ __forceinline__ void load_box(uint32_t to, const PagePosition& at) {
        ptx::cp_async_bulk_tensor(&p.keys, to, s.keys_full[ring.stage].address(), policy, 0,
                                  at.offset, at.page >= 0 ? at.page : p.pages);
    }

    // Loads a tile in boxes, because its keys are in several pages, or its page is smaller than a
    // tile.
    __device__ __forceinline__ void load_boxes(const int32_t* table, int position, int end) {
        s.keys_empty[ring.stage].wait(ring.phase ^ 1);
        for (int key = lane; key < kTileKeys; key += 32) {
            const PagePosition at = find(table, position + key, end);
            s.scales[ring.stage][key] =
                at.page >= 0 ? *reinterpret_cast<const float*>(scales_at(at)) : 0.f;
        }
        __syncwarp();
        if (lane == 0) s.keys_full[ring.stage].expect(kTileBytes);
        __syncwarp();
        const uint32_t to = ptx::shared_address(s.keys[ring.stage]);
        for (int key = lane * p.box; key < kTileKeys; key += 32 * p.box)
            load_box(to + key * kWidth, find(table, position + key, end));
        ring.advance(1);
    }
};

}  // namespace mla::sm90::logits
