// Copies KV tiles to shared memory ahead of the computation.
//
// Of 16 tokens each warp copies as many rows as every other warp: several lanes a row, one address
// per lane. What says where the next 16 tokens lie (a page number, or slots) is read while the 16
// before them are copied.
#pragma once

#include <type_traits>

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
                      uint32_t* valid)
        : p_(p), plan_(plan), state_(state), valid_(valid) {
        const int thread = threadIdx.x;
        row_ = thread / kLanes;
        byte_ = thread % kLanes * 16;
        row_bytes_ = C::row_bytes(p.rope_dim);
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
    // Lanes that copy one row, 16 bytes each at a time.
    static constexpr int kLanes = C::kThreads / 16;
    static constexpr bool kInRegisters = C::kStateInRegisters;

    __device__ void put(const LoaderState& s) {
        if constexpr (kInRegisters) {
            state_ = s;
        } else {
            __syncwarp();
            if ((threadIdx.x & 31) == 0) state_ = s;
            __syncwarp();
        }
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
        // Of row 0 where there is none: no address behind the cache.
        const bool exists = row_ < left;
        copy_row(to, s.from + (exists ? row_ : 0) * p_.cache_slot_stride, exists);
        s.token += 16;
        s.from += 16 * p_.cache_slot_stride;
        if (s.token == s.page_end) begin_page(s, page_of(s.token));
    }

    // Answers which of 16 slots there are.
    __device__ uint32_t copy_slots(LoaderState& s, uint32_t to) {
        const bool exists = next_ >= 0 && next_ < p_.slots;
        const uint32_t valid = __ballot_sync(~0u, exists) & 0xffff;
        // Lanes l and l + 16 know of slot l.
        const int slot = __shfl_sync(~0u, exists ? next_ : 0, row_);
        s.token += 16;
        look_ahead_slots(s);
        copy_row(to, p_.cache + row_offset(slot), (valid >> row_ & 1) != 0);
        return valid;
    }

    __device__ void look_ahead_slots(const LoaderState& s) {
        const int token = s.token + (threadIdx.x & 15);
        next_ = token < plan_.item(s.index).kv_len ? table(s)[token] : -1;
    }

    // This thread's share of its row, zeros if there is no such row.
    __device__ void copy_row(uint32_t to, const char* row, bool exists) const {
        to += row_ * p_.pitch + byte_;
        row += byte_;
        constexpr int kMost = C::row_bytes(64);
#pragma unroll
        for (int at = 0; at < kMost; at += kLanes * 16) {
            // The latent values of every row take as much.
            const bool always = at + kLanes * 16 <= C::kRopeOffset;
            if (always || at + byte_ < row_bytes_) ptx::cp_async_16(to + at, row + at, exists);
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
    std::conditional_t<kInRegisters, LoaderState, LoaderState&> state_;
    uint32_t* valid_;
    // The row of 16 that this thread copies, and its first byte of it; bytes of a row.
    int row_, byte_, row_bytes_;
    // The page after the next token's, or this lane's next slot.
    int next_ = 0;
};

}  // namespace mla::sm80::decode
