// Copies KV tiles to shared memory ahead of the computation.
//
// Of 16 tokens (of twice as many, where a KV tile has them for as many warps) each warp copies as
// many rows as every other warp: several lanes a row, one address per lane. What says where the next
// tokens lie (a page number, or slots) is read while those before them are copied.
#pragma once

#include <type_traits>

#include "config.cuh"
#include "place.cuh"
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

// The same for the latest group, or none.
__device__ __forceinline__ void wait_for_all_but(bool latest) {
    if (latest)
        ptx::cp_async_wait_group<1>();
    else
        ptx::cp_async_wait_group<0>();
}

template <class C>
class Loader {
  public:
    __device__ Loader(const KernelParams& p, const Place& place, typename C::Plan& plan,
                      LoaderState& state, uint32_t* valid)
        : p_(p), place_(place), plan_(plan), state_(state), valid_(valid) {
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
                for (int token = 0; token < C::kTokens; token += kStep)
                    valid |= copy_slots(s, to + token * p_.pitch) << token;
                if (place_.lane() == 0) valid_[s.stage] = valid;
            } else {
#pragma unroll
                for (int token = 0; token < C::kTokens; token += kStep)
                    copy_pages(s, to + token * p_.pitch);
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
    // Tokens that all threads copy at a time; lanes that copy one row, 16 bytes each at a time.
    static constexpr int kStep = C::kTokens >= 32 && C::kThreads >= 256 ? 32 : 16;
    static constexpr int kLanes = C::kThreads / kStep;
    static constexpr bool kInRegisters = C::kStateInRegisters;

    __device__ void put(const LoaderState& s) {
        if constexpr (kInRegisters) {
            state_ = s;
        } else {
            __syncwarp();
            if (place_.lane() == 0) state_ = s;
            __syncwarp();
        }
    }

    __device__ const int* table(const LoaderState& s) const {
        return p_.block_table + plan_.item(s.index).request * p_.block_table_stride;
    }

    // The row, of kStep, of which this thread copies a share, and the first of its 16.
    __device__ int own_row() const { return place_.thread() / kLanes; }
    __device__ int sixteen() const { return own_row() & ~15; }

    __device__ void begin_item(LoaderState& s) {
        const Item& item = plan_.item(s.index);
        s.tiles = item.tile_end - item.tile_begin;
        s.token = item.tile_begin * C::kTokens;
        if (p_.sparse) {
            look_ahead_slots(s);
        } else {
            s.token += sixteen();
            const int page = page_of(s.token);
            next_ = s.token < item.kv_len ? table(s)[page] : 0;
            begin_page(s, page);
        }
    }

    // Goes to the page that was looked up, which has the next token, and looks up the one after it.
    __device__ void begin_page(LoaderState& s, int page) {
        const int begins = page * p_.page_size;
        s.from =
            p_.cache + next_ * p_.cache_page_stride + (s.token - begins) * p_.cache_slot_stride;
        s.page_end = begins + p_.page_size;
        // The first token behind this page that this thread copies: pages are multiples of 16.
        const int next = s.page_end + (s.page_end - s.token) % kStep;
        if (next < plan_.item(s.index).kv_len)
            next_ = table(s)[kStep == 16 ? page + 1 : page_of(next)];
    }

    __device__ void copy_pages(LoaderState& s, uint32_t to) {
        const int left = plan_.item(s.index).kv_len - s.token;
        // Of the first row where there is none: no address behind the cache.
        const int row = own_row() % 16;
        const bool exists = row < left;
        copy_row(to, s.from + (exists ? row : 0) * p_.cache_slot_stride, exists);
        s.token += kStep;
        s.from += kStep * p_.cache_slot_stride;
        if (s.token >= s.page_end) begin_page(s, page_of(s.token));
    }

    // Answers which of the slots there are.
    __device__ uint32_t copy_slots(LoaderState& s, uint32_t to) {
        const bool exists = next_ >= 0 && next_ < p_.slots;
        const uint32_t valid = __ballot_sync(~0u, exists) & (kStep == 16 ? 0xffff : ~0u);
        const int row = own_row(), slot = __shfl_sync(~0u, exists ? next_ : 0, row);
        s.token += kStep;
        look_ahead_slots(s);
        copy_row(to, p_.cache + row_offset(slot), (valid >> row & 1) != 0);
        return valid;
    }

    // Lane l knows of slot l; where 16 are copied at a time, lane l + 16 knows of it, too.
    __device__ void look_ahead_slots(const LoaderState& s) {
        const int token = s.token + (place_.lane() & (kStep - 1));
        next_ = token < plan_.item(s.index).kv_len ? table(s)[token] : -1;
    }

    // This thread's share of its row, zeros if there is no such row.
    __device__ void copy_row(uint32_t to, const char* row, bool exists) const {
        const int byte = place_.thread() % kLanes * 16;
        to += own_row() * p_.pitch + byte;
        row += byte;
        copy_chunks<0>(to, row, exists, C::row_bytes(p_.rope_dim) - byte);
    }

    // What of the row is `at` bytes and further behind this lane's first, up to `bytes`.
    template <int at>
    __device__ static void copy_chunks(uint32_t to, const char* row, bool exists, int bytes) {
        if constexpr (at < C::row_bytes(64)) {
            // The latent values of every row take as much.
            constexpr bool always = at + kLanes * 16 <= C::kRopeOffset;
            if (always || at < bytes) ptx::cp_async_16_at<at, at>(to, row, exists);
            copy_chunks<at + kLanes * 16>(to, row, exists, bytes);
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
    const Place& place_;
    typename C::Plan& plan_;
    std::conditional_t<kInRegisters, LoaderState, LoaderState&> state_;
    uint32_t* valid_;
    // The page after the next token's, or this lane's next slot.
    int next_ = 0;
};

}  // namespace mla::sm80::decode
