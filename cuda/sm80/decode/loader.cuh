// Copies KV tiles to shared memory ahead of the computation.
//
// A warp copies what it reads: its quarter of the latent columns and of the rotary ones. Row groups
// read the same, so each of their warps copies its share of the rows. What says where the next 16
// tokens lie (a page number, or slots) is read while the 16 before them are copied.
#pragma once

#include "config.cuh"
#include "ptx/sm80.cuh"

namespace mla::sm80::decode {

// Waits until at most `groups` of the latest copies are in flight.
__device__ __forceinline__ void wait_for_copies(int groups) {
    static_assert(kMaxStages == 6);
    if (groups >= 3) {
        if (groups >= 5)
            ptx::cp_async_wait_group<5>();
        else if (groups == 4)
            ptx::cp_async_wait_group<4>();
        else
            ptx::cp_async_wait_group<3>();
    } else {
        if (groups == 2)
            ptx::cp_async_wait_group<2>();
        else if (groups == 1)
            ptx::cp_async_wait_group<1>();
        else
            ptx::cp_async_wait_group<0>();
    }
}

template <class C>
class Loader {
  public:
    __device__ Loader(const KernelParams& p, typename C::Plan& plan, LoaderState& state,
                      uint32_t* valid, int row_group, int column_group)
        : p_(p), plan_(plan), state_(state), valid_(valid) {
        const int lane = threadIdx.x & 31;
        row_ = row_group * kOwnRows + lane / kChunks;
        byte_ = column_group * C::kColumns * C::kLatentBytes + lane % kChunks * 16;
        rope_row_ = row_group * kOwnRows + lane / kRopeChunks;
        rope_byte_ = C::kRopeOffset + (column_group * kRopeChunks + lane % kRopeChunks) * 16;
        has_rope_ = 16 * column_group < p.rope_dim && lane < kOwnRows * kRopeChunks;
        scale_byte_ = C::kScaleOffset + column_group * 4;
        LoaderState s = {};
        s.more = plan_.next(0);
        if (s.more) begin_item(s);
        put(s);
    }

    // Begins to copy the next KV tile into the stage that was read longest ago.
    __device__ void next() {
        LoaderState s = state_;
        if (s.more) {
            const uint32_t to = ptx::shared_address(ptx::dynamic_shared() + C::kStagesOffset) +
                                s.stage * (C::kTokens * p_.pitch);
            if (p_.sparse) {
                uint32_t valid = 0;
#pragma unroll
                for (int unit = 0; unit < C::kTokens / 16; ++unit)
                    valid |= copy_slots(s, to + unit * 16 * p_.pitch) << 16 * unit;
                if ((threadIdx.x & 31) == 0) valid_[s.stage] = valid;
            } else {
#pragma unroll
                for (int unit = 0; unit < C::kTokens / 16; ++unit)
                    copy_pages(s, to + unit * 16 * p_.pitch);
            }
            if (--s.tiles == 0) {
                s.more = plan_.next(++s.index);
                if (s.more) begin_item(s);
            }
        }
        ptx::cp_async_commit_group();
        s.stage = s.stage + 1 == p_.stages ? 0 : s.stage + 1;
        put(s);
    }

    // Whether item `index` exists, if it is one of those made so far or the next one.
    __device__ bool has(int index) const { return index < state_.index || state_.more; }

  private:
    // Chunks of 16 bytes of a row's latent columns, and rows that the warp copies at once.
    static constexpr int kChunks = C::kColumns * C::kLatentBytes / 16;
    static constexpr int kRowsAtOnce = 32 / kChunks;
    static constexpr int kOwnRows = 16 / C::kRowGroups;
    static constexpr int kRopeChunks = C::kRopeBytes;

    __device__ void put(const LoaderState& s) {
        __syncwarp();
        if ((threadIdx.x & 31) == 0) state_ = s;
        __syncwarp();
    }

    __device__ const int* table(const LoaderState& s) const {
        return p_.block_table + plan_.item(s.index).request * p_.block_table_stride;
    }

    __device__ void begin_item(LoaderState& s) {
        const Item& item = plan_.item(s.index);
        s.tiles = item.tile_end - item.tile_begin;
        s.token = item.tile_begin * C::kTokens;
        if (p_.sparse) {
            look_ahead_slots(s);
        } else {
            const int page = page_of(s.token);
            next_ = s.token < item.kv_len ? table(s)[page] : 0;
            begin_page(s, page);
            s.from += (s.token - page * p_.page_size) * p_.cache_slot_stride;
        }
    }

    // Goes to the page that was looked up, and looks up the one after it.
    __device__ void begin_page(LoaderState& s, int page) {
        s.from = p_.cache + next_ * p_.cache_page_stride;
        s.page_end = (page + 1) * p_.page_size;
        if (s.page_end < plan_.item(s.index).kv_len) next_ = table(s)[page + 1];
    }

    __device__ void copy_pages(LoaderState& s, uint32_t to) {
        const int left = plan_.item(s.index).kv_len - s.token;
        const char* from = s.from;
        const int stride = int(p_.cache_slot_stride);
        const auto row_begin = [&](int row) { return from + int64_t(row) * stride; };
        if (left >= 16)
            copy_rows(to, row_begin, [](int) { return true; });
        else
            copy_rows(to, row_begin, [&](int row) { return row < left; });
        s.token += 16;
        s.from += 16 * p_.cache_slot_stride;
        if (s.token == s.page_end) begin_page(s, page_of(s.token));
    }

    // Answers which of 16 slots there are.
    __device__ uint32_t copy_slots(LoaderState& s, uint32_t to) {
        const bool own_exists = next_ >= 0 && next_ < p_.slots;
        const uint32_t valid = __ballot_sync(~0u, own_exists) & 0xffff;
        // Lanes l and l + 16 know where row l begins.
        const char* own = p_.cache + (own_exists ? row_offset(next_) : 0);
        s.token += 16;
        look_ahead_slots(s);
        copy_rows(
            to,
            [&](int row) {
                return reinterpret_cast<const char*>(
                    __shfl_sync(~0u, reinterpret_cast<unsigned long long>(own), row));
            },
            [&](int row) { return (valid >> row & 1) != 0; });
        return valid;
    }

    __device__ void look_ahead_slots(const LoaderState& s) {
        const int token = s.token + (threadIdx.x & 15);
        next_ = token < plan_.item(s.index).kv_len ? table(s)[token] : -1;
    }

    // `row_begin(row)` is called by the whole warp; `exists(row)` answers whether there is such a
    // row.
    template <typename RowBegin, typename Exists>
    __device__ void copy_rows(uint32_t to, const RowBegin& row_begin, const Exists& exists) {
#pragma unroll
        for (int i = 0; i < kOwnRows / kRowsAtOnce; ++i) {
            const int row = row_ + i * kRowsAtOnce;
            ptx::cp_async_16(to + row * p_.pitch + byte_, row_begin(row) + byte_, exists(row));
        }
        const char* rope = row_begin(rope_row_ & 15);
        if (has_rope_)
            ptx::cp_async_16(to + rope_row_ * p_.pitch + rope_byte_, rope + rope_byte_,
                             exists(rope_row_));
        if constexpr (C::kGrouped) {
            const int lane = threadIdx.x & 31, first = row_ - lane / kChunks;
            const int row = first + lane % kOwnRows;
            const char* scales = row_begin(row);
            if (lane < kOwnRows)
                ptx::cp_async_4(to + row * p_.pitch + scale_byte_, scales + scale_byte_,
                                exists(row));
        }
    }

    __device__ int page_of(int token) const {
        return p_.page_shift >= 0 ? token >> p_.page_shift : token / p_.page_size;
    }

    __device__ int64_t row_offset(int slot) const {
        const int page = page_of(slot);
        return page * p_.cache_page_stride +
               int64_t(slot - page * p_.page_size) * p_.cache_slot_stride;
    }

    const KernelParams& p_;
    typename C::Plan& plan_;
    LoaderState& state_;
    uint32_t* valid_;
    // What this lane copies of a row, and of which one first.
    int row_, byte_, rope_row_, rope_byte_, scale_byte_;
    bool has_rope_;
    // The page after the next token's, or this lane's next slot.
    int next_ = 0;
};

}  // namespace mla::sm80::decode
