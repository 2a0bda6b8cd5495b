// The protocol by which the CTAs that share a query tile agree on who combines their partial
// results.
//
// A tile's keys are divided into `splits`, one per CTA. Each CTA writes its partial result to the
// workspace and counts itself in. The first `combiners` of the CTAs have nothing else to do. Each
// of them waits for the others and then combines its own slice of the output. No CTA may depend on
// one that may not be running. A combiner that has waited too long therefore makes all combiners
// fall back. Each of them then also writes the slice that it had kept to the workspace, and the
// last one to arrive combines everything.
//
//                      arrived = splits
//   [counting] ------------------------------> [all there]    each combiner combines its slice
//       |  a combiner's patience ends:
//       |  kFallenBack is added
//       v          all splits have arrived, and all combiners
//   [falling back] -------------------------> [complete]      whose addition completes it combines
//                  have added kYielded                        everything
//
// `arrived` counts splits in its lowest 12 bits, and combiners that have yielded above them.
// kFallenBack is bit 30. A compare-and-swap adds this flag to a value that lacks a split, so the
// flag never comes after [all there]. `left` counts the CTAs that have read the counters for the
// last time. The last of them sets both counters back to zero, for the next launch.
//
// If every CTA is known to run once it has work, as in prefill, no CTA falls back. It is then
// enough to count arrivals and departures: Arrivals and Departures.
//
// Every function is at most one atomic operation, which Memory implements. On the device, ptx::...
// implement it. On the host, plain numbers do, in a test that tries all orders
// (tests/division/split_protocol.rs).
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#include "../ptx/sm80.cuh"
#define MLA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MLA_HOST_DEVICE inline
#endif

namespace mla {

// Counters of one tile, in device memory: zero between launches.
struct SplitCounters {
    int32_t arrived, left;
};

// A CTA's next step for a tile: nothing; combine its slice; write its slice to the workspace and
// yield; or combine everything.
enum class SplitRole { none, slice, yield, everything };

constexpr int32_t kYielded = 1 << 12, kFallenBack = 1 << 30;
// Maximum number of splits, and of combiners, that can be counted.
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

// Counts CTAs or warps that store something that all of them wait for.
template <class Memory>
struct Arrivals {
    int32_t* arrived;

    // Called when the caller's data has been stored in the workspace.
    MLA_HOST_DEVICE void arrive() const { Memory::add_release(arrived, 1); }
    // Number of arrivals. The data that the arrived callers stored can be read afterwards.
    MLA_HOST_DEVICE int seen() const { return Memory::load_acquire(arrived); }
};

// Counts readers of counters. Relaxed order is enough: a reader that leaves already has the answer
// of its last read.
template <class Memory>
struct Departures {
    int32_t* left;

    // Counts the caller, and returns the number of readers that have left. The last one sets all
    // counters back to zero, including this one.
    MLA_HOST_DEVICE int leave() const { return Memory::increment(left) + 1; }
};

template <class Memory>
struct SplitProtocol {
    SplitCounters* counters;
    int splits, combiners;

    // Value of `arrived` when all combiners have yielded and all splits have arrived.
    MLA_HOST_DEVICE int complete() const { return kFallenBack + combiners * kYielded + splits; }

    // Called by a CTA that has other work after this tile, when its partial result is in the
    // workspace. If the role says so, the CTA combines everything. Then it leaves.
    MLA_HOST_DEVICE SplitRole arrive() const {
        return Memory::add_acq_rel(&counters->arrived, 1) + 1 == complete() ? SplitRole::everything
                                                                            : SplitRole::none;
    }
    // Called by a combiner when all of its partial result but its slice is in the workspace.
    MLA_HOST_DEVICE void arrive_combiner() const { arrivals().arrive(); }

    // A combiner then reads how many have arrived. The number decides its role. If the role is
    // none, it has to read again.
    MLA_HOST_DEVICE int seen() const { return arrivals().seen(); }
    MLA_HOST_DEVICE SplitRole role_of(int seen) const {
        return seen == splits  ? SplitRole::slice
               : seen > splits ? SplitRole::yield
                               : SplitRole::none;
    }
    // Called by a combiner that has waited long enough and whose role is none. Returns true if its
    // flag is the one that makes all combiners fall back. If not, the counters have changed, and it
    // has to read again.
    MLA_HOST_DEVICE bool fall_back(int seen) const {
        return Memory::exchange(&counters->arrived, seen, seen + kFallenBack);
    }

    // Called by a combiner that has written its slice to the workspace, too. Then it leaves.
    MLA_HOST_DEVICE SplitRole yield() const {
        return Memory::add_acq_rel(&counters->arrived, kYielded) + kYielded == complete()
                   ? SplitRole::everything
                   : SplitRole::none;
    }

    // Called once by every split's CTA, when it has read the counters for the last time. Returns
    // the number of CTAs that have left. The last of them resets the counters.
    MLA_HOST_DEVICE int leave() const { return Departures<Memory>{&counters->left}.leave(); }
    MLA_HOST_DEVICE void reset() const { *counters = {0, 0}; }

  private:
    MLA_HOST_DEVICE Arrivals<Memory> arrivals() const { return {&counters->arrived}; }
};

}  // namespace mla

#undef MLA_HOST_DEVICE
