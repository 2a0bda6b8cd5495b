// Copies KV tiles to shared memory ahead of the computation.
//
// The warps share the rows of 16 tokens evenly, or of 32 tokens if a KV tile has 32 and at least
// 256 threads copy. Several lanes copy a row, with one address per lane. The location of the next
// tokens (a page number, or slots) is read while the tokens before them are copied.
#pragma once

#include <type_traits>

#include "config.cuh"
#include "ptx/sm80.cuh"
#include "thread_position.cuh"

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

// Waits for all groups, or for all but the latest one.
__device__ __forceinline__ void wait_for_all_but(bool latest) {
    if (latest)
        ptx::cp_async_wait_group<1>();
    else
        ptx::cp_async_wait_group<0>();
}

// A thread's share of the copy of one row, 16 bytes at a time. If there is no such row, zeros are
// copied.
template <class C>
struct RowCopy {
    // Number of tokens that all threads copy at a time; number of lanes that copy one row.
    static constexpr int kStep = C::kTokens >= 32 && C::kThreads >= 256 ? 32 : 16;
    static constexpr int kLanes = C::kThreads / kStep;
    static constexpr int kChunks = (C::row_bytes(64) + kLanes * 16 - 1) / (kLanes * 16);

    static constexpr int kLast = kChunks - 1;

    // All chunks but the last are of latents, and every row has them. The last chunk is of rotary
    // keys, which come from another tensor in a split cache.
    static constexpr int kRopeAt = kLast * kLanes * 16;
    static_assert(C::kGrouped || kRopeAt == C::kRopeOffset);

    uint32_t to = 0;
    const char* from = nullptr;
    // Three flags in one register: there is something to copy; the row exists; this lane copies a
    // part of the last chunk, which not every lane does.
    static constexpr int kAny = 1, kExists = 2, kRope = 4;
    int flags = 0;

    template <int chunk>
    __device__ void issue() const {
        if (flags & (chunk == kLast ? kRope : kAny)) copy<chunk>();
    }

    // Issues all copies, for a row that is copied at least in part.
    template <int chunk = 0>
    __device__ void issue_all() const {
        if constexpr (chunk < kLast) {
            copy<chunk>();
            issue_all<chunk + 1>();
        } else {
            issue<chunk>();
        }
    }

  private:
    template <int chunk>
    __device__ void copy() const {
        constexpr int at = chunk * kLanes * 16;
        ptx::cp_async_16_at<at, at>(to, from, (flags & kExists) != 0);
    }
};

template <class C>
class Loader {
    using Copy = RowCopy<C>;
    static constexpr int kStep = Copy::kStep, kLanes = Copy::kLanes;

  public:
    __device__ Loader(const KernelParams& p, const ThreadPosition& position,
                      typename C::Scheduler& scheduler, typename C::WarpShared& own)
        : p_(p), position_(position), scheduler_(scheduler), own_(own), state_(own.loader) {
        LoaderState s = {};
        s.more = scheduler_.first();
        if (s.more) begin_item(s);
        put(s);
    }

    // Begins to copy the next KV tile into the stage that was read longest ago.
    __device__ void next() {
        static_assert(!C::kRoles);
        advance([](const Copy& copy) { copy.issue_all(); });
        ptx::cp_async_commit_group();
    }

    // Like next(), but returns the copy. The caller issues and commits it when the stage is free.
    __device__ Copy prepare() {
        static_assert(C::kRoles && C::kTokens == kStep);
        Copy all;
        advance([&](const Copy& copy) { all = copy; });
        return all;
    }

    // True if there is another tile to copy.
    __device__ bool more() const { return state_.more != 0; }

    // True if item `index` exists. It must be one of the items made so far, or the next one.
    __device__ bool has(int index) const { return index < state_.index || state_.more != 0; }

  private:
    static constexpr bool kInRegisters = C::kStateInRegisters;

    // If there is a next tile, calls `take` for each row, with what this thread copies of it.
    template <typename Take>
    __device__ void advance(const Take& take) {
        LoaderState s = state_;
        if (s.more) {
            const uint32_t to = ptx::shared_address(ptx::dynamic_shared() + C::kStagesOffset) +
                                s.stage * (C::kTokens * p_.pitch);
            if (p_.sparse) {
                uint32_t valid = 0;
#pragma unroll
                for (int token = 0; token < C::kTokens; token += kStep)
                    valid |= copy_slots(s, to + token * p_.pitch, take) << token;
                if (position_.lane() == 0) own_.valid[s.stage] = valid;
            } else {
#pragma unroll
                for (int token = 0; token < C::kTokens; token += kStep)
                    copy_pages(s, to + token * p_.pitch, take);
            }
            if constexpr (!kInRegisters) {
                // These are read again, because registers are few in the meantime.
                s.tiles = state_.tiles;
                s.index = state_.index;
            }
            if (--s.tiles == 0) {
                if constexpr (C::kRoles) {
                    // The state is a new one, so that no register keeps anything of the item that
                    // has ended.
                    LoaderState next = {};
                    next.index = s.index;
                    next.stage = s.stage;
                    s = next;
                }
                s.more = scheduler_.next(++s.index);
                if (s.more) begin_item(s);
            }
        }
        if constexpr (!kInRegisters) s.stage = state_.stage;
        s.stage = s.stage + 1 == p_.stages ? 0 : s.stage + 1;
        put(s);
    }

    __device__ void put(const LoaderState& s) {
        if constexpr (kInRegisters) {
            state_ = s;
        } else {
            __syncwarp();
            if (position_.lane() == 0) state_ = s;
            __syncwarp();
        }
    }

    __device__ const int* table(const LoaderState& s) const {
        return p_.block_table + scheduler_.item(s.index).request * p_.block_table_stride;
    }

    // The row, one of kStep, that this thread copies a share of, and the first of the 16 rows
    // around it.
    __device__ int own_row() const { return position_.thread() / kLanes; }
    __device__ int sixteen() const { return own_row() & ~15; }
    // The first byte of a row that this thread copies.
    __device__ int own_byte() const { return position_.thread() % kLanes * 16; }

    // Warps with roles do not take a split cache, because its second address would spill their
    // registers.
    __device__ bool is_split() const { return !C::kGrouped && !C::kRoles && p_.split; }

    __device__ void begin_item(LoaderState& s) {
        const WorkItem& item = scheduler_.item(s.index);
        s.tiles = item.tile_end - item.tile_begin;
        s.left = item.kv_len - item.tile_begin * C::kTokens;
        if (p_.sparse) {
            look_ahead_slots(s);
        } else {
            s.left -= sixteen();
            const int page = page_of(token_of(s));
            next_ = s.left > 0 ? table(s)[page] : 0;
            begin_page(s, page);
        }
    }

    // Goes to the page that was looked up, which has the next token, and looks up the one after it.
    __device__ void begin_page(LoaderState& s, int page) {
        const int begins = page * p_.page_size, token = token_of(s);
        if (is_split()) {
            __syncwarp();
            if (position_.lane() == 0) own_.page = next_;
            __syncwarp();
        }
        s.from = p_.cache + next_ * p_.cache_page_stride + (token - begins) * p_.cache_slot_stride;
        s.page_left = begins + p_.page_size - token;
        // Distance to the first token behind this page that this thread copies. Page sizes are
        // multiples of 16.
        const int further = s.page_left + s.page_left % kStep;
        if (further < s.left) next_ = table(s)[kStep == 16 ? page + 1 : page_of(token + further)];
    }

    // The next token, counted from the request's first.
    __device__ int token_of(const LoaderState& s) const {
        return scheduler_.item(s.index).kv_len - s.left;
    }

    template <typename Take>
    __device__ void copy_pages(LoaderState& s, uint32_t to, const Take& take) {
        // A row that does not exist takes the address of the first row, so that no address is past
        // the cache.
        const int row = own_row() % 16;
        const bool exists = row < s.left;
        Copy copy = row_copy(to, s.from + (exists ? row : 0) * p_.cache_slot_stride, exists);
        if (is_split())
            copy_rope(copy, own_.page * p_.cache_rope_page_stride +
                                int64_t(p_.page_size - s.page_left + (exists ? row : 0)) *
                                    p_.cache_rope_slot_stride);
        take(copy);
        s.left -= kStep;
        s.from += kStep * p_.cache_slot_stride;
        s.page_left -= kStep;
        if (s.page_left <= 0) begin_page(s, page_of(token_of(s)));
    }

    // Copies the rows of the next slots. Returns a bit for each slot, set if the slot exists.
    template <typename Take>
    __device__ uint32_t copy_slots(LoaderState& s, uint32_t to, const Take& take) {
        const bool exists = next_ >= 0 && next_ < p_.slots;
        const uint32_t valid = __ballot_sync(~0u, exists) & (kStep == 16 ? 0xffff : ~0u);
        const int row = own_row(), slot = __shfl_sync(~0u, exists ? next_ : 0, row);
        s.left -= kStep;
        look_ahead_slots(s);
        Copy copy =
            row_copy(to, p_.cache + row_offset(slot, p_.cache_page_stride, p_.cache_slot_stride),
                     (valid >> row & 1) != 0);
        if (is_split())
            copy_rope(copy, row_offset(slot, p_.cache_rope_page_stride, p_.cache_rope_slot_stride));
        take(copy);
        return valid;
    }

    // Lane l looks up slot l. If 16 slots are copied at a time, lane l + 16 looks it up, too.
    __device__ void look_ahead_slots(const LoaderState& s) {
        const int lane = position_.lane() & (kStep - 1);
        next_ = lane < s.left ? table(s)[token_of(s) + lane] : -1;
    }

    // This thread's share of its row.
    __device__ Copy row_copy(uint32_t to, const char* row, bool exists) const {
        const int byte = own_byte();
        return {to + own_row() * p_.pitch + byte, row + byte,
                Copy::kAny | (exists ? Copy::kExists : 0) |
                    (Copy::kRopeAt + byte < C::row_bytes(p_.rope_dim) ? Copy::kRope : 0)};
    }

    // Copies this thread's share of its row's rotary key, which lies at `offset` in the tensor of
    // rotary keys. `copy` is then of the latent alone.
    __device__ void copy_rope(Copy& copy, int64_t offset) const {
        const char* rope = p_.cache_rope + offset;
        if (copy.flags & Copy::kRope)
            ptx::cp_async_16(copy.to + Copy::kRopeAt, rope + own_byte(),
                             (copy.flags & Copy::kExists) != 0);
        copy.flags &= ~Copy::kRope;
    }

    __device__ int page_of(int token) const {
        return p_.page_shift >= 0 ? token >> p_.page_shift : token / p_.page_size;
    }

    __device__ int64_t row_offset(int slot, int64_t page_stride, int64_t slot_stride) const {
        const int page = page_of(slot);
        return page * page_stride + int64_t(slot - page * p_.page_size) * slot_stride;
    }

    const KernelParams& p_;
    const ThreadPosition& position_;
    typename C::Scheduler& scheduler_;
    typename C::WarpShared& own_;
    std::conditional_t<kInRegisters, LoaderState, LoaderState&> state_;
    // The page after that of the next token, or this lane's next slot.
    int next_ = 0;
};

}  // namespace mla::sm80::decode
