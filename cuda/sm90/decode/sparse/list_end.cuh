// Finds the ends of lists. Engines fill lists with -1 behind the valid entries. A walk that looks
// there for further entries waits for memory again and again. The output warpgroups have nothing to
// do before an item's first tile. They therefore look for the end of the next item's lists.
#pragma once

#include "params.cuh"
#include "ptx/sm90.cuh"

namespace mla::sm90::sparse {

constexpr int kOutputThreads = 256;
constexpr int kOutputWarps = kOutputThreads / 32;

// The ends of the lists of this item and of the next one. Each output warp searches an equal share
// of the groups of the CTA's split, and reports the end of the last valid entry that it finds.
struct ListEnds {
    // A lane of each output warp arrives at `full`, and every loading thread at `empty`.
    uint64_t full[2], empty[2];
    int of_warp[2][kSources][kOutputWarps];

    __device__ void initialise() {
        for (uint64_t& bar : full) ptx::mbarrier_init(ptx::shared_address(&bar), kOutputWarps);
        for (uint64_t& bar : empty) ptx::mbarrier_init(ptx::shared_address(&bar), 128);
    }

    // Returns the end of a list of this CTA's `n`-th item. Called by a whole loading warp.
    __device__ int behind_last(uint32_t n, int source, int lane) {
        ptx::mbarrier_wait(ptx::shared_address(&full[n & 1]), n >> 1 & 1);
        return __reduce_max_sync(~0u, of_warp[n & 1][source][lane & (kOutputWarps - 1)]);
    }
    // Called when the item no longer needs its ends, even if it has not asked for them.
    __device__ void release(uint32_t n) {
        // No warp may be two items ahead of another one.
        ptx::mbarrier_wait(ptx::shared_address(&full[n & 1]), n >> 1 & 1);
        ptx::mbarrier_arrive(ptx::shared_address(&empty[n & 1]));
    }

    // Finds the ends of the lists of `token`, which is the token of the `n`-th item. Called by the
    // output warps; `warp` is the number of this one. A list whose entries are all valid is usually
    // followed by another such list. An end is therefore searched only for the first item, and if
    // the previous item had a shorter list.
    __device__ void find(const KernelParams& p, int token, uint32_t n, int split, int splits,
                         int warp, int lane) {
        const int parity = n & 1;
        ptx::mbarrier_wait(ptx::shared_address(&empty[parity]), (n >> 1 & 1) ^ 1);
#pragma unroll 1
        for (int k = 0; k < kSources; ++k) {
            const Source& source = p.sources[k];
            int end = source.width;
            const int before = lane == 0 && n > 0 ? of_warp[parity ^ 1][k][warp] : 0;
            if (!source.counts && __shfl_sync(~0u, before, 0) < end)
                end = end_of(source, token, split * kListGroup + warp * splits * kListGroup,
                             kOutputWarps * splits * kListGroup, lane);
            if (lane == 0) of_warp[parity][k][warp] = end;
        }
        if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&full[parity]));
    }

  private:
    // Returns the end of the last group with a valid entry. Only groups that begin at `first` and
    // every `step` entries from there are searched. Returns the end of the list if no group comes
    // behind that one, and 0 if no group has a valid entry.
    __device__ static int end_of(const Source& source, int token, int first, int step, int lane) {
        const int* list = source.lists + token * source.list_stride;
        constexpr int at_once = 8;
        const int very_last = first + (source.width - 1 - first) / step * step;
#pragma unroll 1
        for (int last = very_last; last >= first; last -= at_once * step) {
            int entries[at_once], end = 0;
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const int at = last - i * step;
                entries[i] = at >= first && at + lane < source.width ? list[at + lane] : -1;
            }
#pragma unroll
            for (int i = at_once - 1; i >= 0; --i)
                if (uint32_t(entries[i]) < source.slots) end = last - i * step + kListGroup;
            end = __reduce_max_sync(~0u, end);
            if (end > 0) return end > very_last ? source.width : end;
        }
        return 0;
    }
};

}  // namespace mla::sm90::sparse
