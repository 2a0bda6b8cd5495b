// How the CTAs that share a query tile agree on who combines their partial results.
//
// A tile's keys are divided into `splits`, one per CTA. Each CTA writes its partial result to the
// workspace and counts itself in. The first `combiners` of them have nothing else to do: each waits
// for the others and then combines its own slice of the output. Nobody depends on a CTA that may
// not be running: a combiner that has waited too long makes all of them fall back, that is, each
// writes what it had kept for itself to the workspace, too, and whoever comes last combines
// everything.
//
//                      arrived = splits
//   [counting] ------------------------------> [all there]    each combiner combines its slice
//       |  a combiner's patience ends:
//       |  kFallenBack is added
//       v          all splits have arrived, and all combiners
//   [falling back] -------------------------> [complete]      whose addition completes it combines
//                  have added kYielded                        everything
//
// `arrived` counts splits in its lowest 12 bits and combiners that have yielded above them, and
// kFallenBack is its 30th bit. The flag is added by a comparison and exchange of a value that lacks
// a split, so that it never comes after [all there]. `left` counts the CTAs that will not look at
// the counters again; the last of them sets both back to zero, for the next launch.
//
// Where every CTA is known to run once it has work, as in prefill, nobody falls back, and counting
// arrivals and departures is all there is to it: Arrivals and Departures.
//
// Every function is at most one atomic operation, and Memory says how it is done: ptx::... on the
// device, plain numbers where a test tries all orders on the host (tests/split_protocol.rs).
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#include "../ptx/sm80.cuh"
#define MLA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MLA_HOST_DEVICE inline
#endif

namespace mla {

// Of one tile, in device memory: zero between launches.
struct SplitCounters {
    int32_t arrived, left;
};

// What a CTA does next for a tile: nothing, combine its slice, write what it kept to the workspace
// and yield, or combine everything.
enum class SplitRole { none, slice, yield, everything };

constexpr int32_t kYielded = 1 << 12, kFallenBack = 1 << 30;
// So many splits, and so many combiners, can be counted.
constexpr int32_t kMaxSplits = kYielded - 1;

#ifdef __CUDACC__
struct DeviceMemory {
    __device__ static __forceinline__ int add_acq_rel(int32_t* at, int n) {
        return ptx::atom_add_acq_rel(at, n);
    }
    __device__ static __forceinline__ void add_release(int32_t* at, int n) {
        ptx::red_add_release(at, n);
    }
    __device__ static __forceinline__ int increment(int32_t* at) {
        return ptx::atom_inc_relaxed(at);
    }
    __device__ static __forceinline__ int load_acquire(const int32_t* at) {
        return ptx::ld_acquire(at);
    }
    __device__ static __forceinline__ bool exchange(int32_t* at, int from, int to) {
        return atomicCAS(at, from, to) == from;
    }
};
#endif

// Those who store something that all of them wait for.
template <class Memory>
struct Arrivals {
    int32_t* arrived;

    // What this one stores is in the workspace.
    MLA_HOST_DEVICE void arrive() const { Memory::add_release(arrived, 1); }
    // How many have arrived. What as many stored can be read.
    MLA_HOST_DEVICE int seen() const { return Memory::load_acquire(arrived); }
};

// Those who look at counters. Relaxed is enough: the last read of whoever leaves has been answered.
template <class Memory>
struct Departures {
    int32_t* left;

    // How many have left. The last one sets all counters back to zero, this one, too.
    MLA_HOST_DEVICE int leave() const { return Memory::increment(left) + 1; }
};

template <class Memory>
struct SplitProtocol {
    SplitCounters* counters;
    int splits, combiners;

    // What `arrived` is when all combiners have yielded and all splits are there.
    MLA_HOST_DEVICE int complete() const { return kFallenBack + combiners * kYielded + splits; }

    // By a CTA that has other work after this tile: its partial result is in the workspace. It may
    // turn out that the tile is left to this CTA. Then it leaves.
    MLA_HOST_DEVICE SplitRole arrive() const {
        return Memory::add_acq_rel(&counters->arrived, 1) + 1 == complete() ? SplitRole::everything
                                                                            : SplitRole::none;
    }
    // By a combiner: all of its partial result but its slice is in the workspace.
    MLA_HOST_DEVICE void arrive_combiner() const { arrivals().arrive(); }

    // Then a combiner looks whether the others are there, and says what that means for it: none if
    // it has to look again.
    MLA_HOST_DEVICE int seen() const { return arrivals().seen(); }
    MLA_HOST_DEVICE SplitRole role_of(int seen) const {
        return seen == splits  ? SplitRole::slice
               : seen > splits ? SplitRole::yield
                               : SplitRole::none;
    }
    // By a combiner that has waited long enough and whose role is none: whether its flag was the
    // one that makes all of them fall back. If not, the counters have changed, and it has to look
    // again.
    MLA_HOST_DEVICE bool fall_back(int seen) const {
        return Memory::exchange(&counters->arrived, seen, seen + kFallenBack);
    }

    // By a combiner that has written its slice to the workspace, too. Then it leaves.
    MLA_HOST_DEVICE SplitRole yield() const {
        return Memory::add_acq_rel(&counters->arrived, kYielded) + kYielded == complete()
                   ? SplitRole::everything
                   : SplitRole::none;
    }

    // By every split's CTA once, when it will not look at the counters again: how many have left.
    // The last of them resets the counters.
    MLA_HOST_DEVICE int leave() const { return Departures<Memory>{&counters->left}.leave(); }
    MLA_HOST_DEVICE void reset() const { *counters = {0, 0}; }

  private:
    MLA_HOST_DEVICE Arrivals<Memory> arrivals() const { return {&counters->arrived}; }
};

}  // namespace mla

#undef MLA_HOST_DEVICE
