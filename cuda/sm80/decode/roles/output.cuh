// An output warp. It has 32 query rows by a quarter of the latent columns. Together with the other
// output warps, it copies KV tiles, and it multiplies P by them.
#pragma once

#include "../combine.cuh"
#include "../loader.cuh"
#include "role_barrier.cuh"

namespace mla::sm80::decode {

template <class C>
class OutputWarp {
    using Barrier = RoleBarrier<C>;

  public:
    __device__ OutputWarp(const KernelParams& p, const ThreadPosition& position,
                          typename C::Scheduler& scheduler, typename C::WarpShared& own)
        : p_(p),
          position_(position),
          scheduler_(scheduler),
          own_(own),
          loader_(p, position, scheduler, own) {}

    __device__ void run() {
        if (!loader_.has(0)) return;
        begin_copies();
        own_.index = 0;
        __syncwarp();
        while (loader_.has(read(own_.index))) {
            // The previous item has left its output in P's place. After this barrier, score warps
            // may use it again.
            if (read(own_.index) > 0) Barrier::sync();
            begin_item();
            Accumulators<C> o = {};
#pragma unroll 1
            while (true) {
                // This copies to the stage of the tile before this one. After the barrier, all
                // warps have read that tile.
                const RowCopy<C> copy = loader_.prepare();
                wait_for_all_but(p_.stages > 3);
                Barrier::sync();
                add_values(o, copy);
                ptx::cp_async_commit_group();
                const int next = stage() + 1 == p_.stages ? 0 : stage() + 1;
                const unsigned left = (state_ >> kLeft) - 1;
                state_ = (buffer() ^ 1) | next << kStage | left << kLeft;
                if (left == 0) break;
            }
            Output<C>(p_, ptx::dynamic_shared(), position_.row_group(), position_.column_group())
                .write(item(), o, own_.scheduler.share);
            const int next = read(own_.index) + 1;
            __syncwarp();
            own_.index = next;
            __syncwarp();
        }
    }

  private:
    // These are read anew each time, because registers are few.
    __device__ static int read(const int& x) { return ptx::ld_shared_s32(ptx::shared_address(&x)); }
    __device__ const WorkItem& item() const { return scheduler_.item(read(own_.index)); }

    // The buffer, one of two, that has P of the current tile; the tile's stage.
    __device__ int buffer() const { return state_ & 1; }
    __device__ int stage() const { return state_ >> kStage & 3; }

    __device__ void begin_item() {
        const WorkItem& item = this->item();
        const unsigned tiles = item.tile_end - item.tile_begin;
        state_ = (state_ & ((1 << kLeft) - 1)) | tiles << kLeft;
        // Number of the item's last tiles in which some row does not see some token.
        own_.cleared = !p_.causal || item.q_len == 1
                           ? 0
                           : max(item.tile_end - max(item.unmasked, 0) / C::kTokens, 0);
        __syncwarp();
    }

    // Begins to copy tiles to all stages but one. The last stage's tile follows while the first
    // tile is multiplied.
    __device__ void begin_copies() {
        for (int i = 1; i < p_.stages; ++i) {
            const RowCopy<C> copy = loader_.prepare();
            if (copy.flags != 0) copy.issue_all();
            ptx::cp_async_commit_group();
        }
        wait_for_copies(p_.stages - 2);
        Barrier::sync();
    }

    __device__ void add_values(Accumulators<C>& o, const RowCopy<C>& copy) {
        rescale(o);
        char* stage =
            ptx::dynamic_shared() + C::kStagesOffset + this->stage() * (C::kTokens * p_.pitch);
        if (p_.causal && int(state_ >> kLeft) <= read(own_.cleared)) {
            // Row groups clear values for each other. All of them have made their scores of these
            // values.
            Gemms<C>(p_, position_).clear_nonfinite(stage, position_.row_group());
            C::sync_output();
        }
        const uint32_t p = address_of_p();
        // Loads 16 rows by 16 tokens: bit 5 of the address is bit 1 of a row's exchanged chunk.
        const auto load_p = [p](int i, int unit, uint32_t (&a)[4]) {
            ptx::ldmatrix_x4(a, (p ^ (unit * 32)) + i * 16 * C::kProbabilityPitch);
        };
        Gemms<C>(p_, position_).values(load_p, ptx::shared_address(stage), o, [&](int i) {
            issue(copy, i);
        });
    }

    // Issues one chunk of the copies after each of the first MMAs. Many chunks in a row would delay
    // all warps' loads from shared memory.
    __device__ void issue(const RowCopy<C>& copy, int i) const { issue_one<0>(copy, i); }
    template <int chunk>
    __device__ void issue_one(const RowCopy<C>& copy, int i) const {
        if constexpr (chunk < RowCopy<C>::kChunks) {
            if (i == chunk) copy.template issue<chunk>();
            issue_one<chunk + 1>(copy, i);
        }
    }

    __device__ void rescale(Accumulators<C>& o) const {
        const auto& s = *reinterpret_cast<const typename C::Statistics*>(ptx::dynamic_shared() +
                                                                         C::kStatisticsOffset);
        const int first = position_.row_group() * C::kWarpTiles;
        const int2 any = *reinterpret_cast<const int2*>(&s.any_rescale[buffer()][first]);
        if ((any.x | any.y) == 0) return;
#pragma unroll
        for (int i = 0; i < C::kWarpTiles; ++i) {
            if ((i == 0 ? any.x : any.y) == 0) continue;
            const float* from = &s.rescale[buffer()][(first + i) * 16 + position_.lane() / 4];
            const float low = from[0], high = from[8];
#pragma unroll
            for (int j = 0; j < C::kColumns / 8; ++j) {
                o[i][j][0] *= low;
                o[i][j][1] *= low;
                o[i][j][2] *= high;
                o[i][j][3] *= high;
            }
        }
    }

    // Address of this lane's row of P's first 16 tokens.
    __device__ uint32_t address_of_p() const {
        const int lane = position_.lane();
        const int row = position_.row_group() * C::kWarpRows + (lane & 15);
        return ptx::shared_address(ptx::dynamic_shared() + C::kProbabilityOffset +
                                   buffer() * C::kProbabilityBytes +
                                   C::probability_offset(row, lane >> 4));
    }

    const KernelParams& p_;
    const ThreadPosition& position_;
    typename C::Scheduler& scheduler_;
    typename C::WarpShared& own_;
    Loader<C> loader_;
    // One register holds the buffer, the stage, and the number of tiles that the item still has.
    static constexpr int kStage = 1, kLeft = 3;
    static_assert(C::kMaxCtaStages <= 4);
    unsigned state_ = 0;
};

}  // namespace mla::sm80::decode
