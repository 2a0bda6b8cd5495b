// Pipeline states of a ring of stages, and mbarriers that know their number of arrivals.
#pragma once

#include "ptx/sm90.cuh"

namespace mla {

// Pipeline state in a ring of `stages` stages. `phase` is the parity that a consumer waits for at
// this stage. A producer waits for the other parity until the stage is released.
template <int stages>
struct PipelineState {
    int stage = 0;
    uint32_t phase = 0;

    PipelineState() = default;
    // The state after `n` stages.
    __device__ explicit PipelineState(int n) : stage(n % stages), phase(n / stages & 1) {}
    // The state `n` stages ago; `n` is below `stages`.
    __device__ PipelineState back(int n) const {
        PipelineState r;
        r.stage = stage < n ? stage - n + stages : stage - n;
        r.phase = stage < n ? phase ^ 1 : phase;
        return r;
    }
    // Advances by a stage.
    __device__ void advance() {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
    // Advances by `n` stages, at most `stages`.
    __device__ void advance(int n) {
        stage += n;
        if (stage >= stages) {
            stage -= stages;
            phase ^= 1;
        }
    }
    // Advances by any number of stages.
    __device__ void skip(int n) {
        const int to = stage + n, rounds = unsigned(to) / unsigned(stages);
        stage = to - rounds * stages;
        phase ^= rounds & 1;
    }
    // The same state, in a form that the compiler knows to be the same in all lanes. Values
    // computed from it stay in uniform registers, where wgmma descriptors have to be.
    __device__ PipelineState warp_uniform() const {
        PipelineState r = *this;
        r.stage = __shfl_sync(~0u, stage, 0);
        r.phase = __shfl_sync(~0u, phase, 0);
        return r;
    }
};

// Pipeline state in one register: the number of stages used so far.
template <int stages>
struct PipelineCounter {
    uint32_t count = 0;

    __device__ uint32_t stage() const { return count % stages; }
    __device__ uint32_t phase() const { return count / stages & 1; }
};

// An mbarrier in shared memory. Its phases complete after `arrivals` arrivals and the bytes that
// were expected; `arrivals` is 0 if the number is known at run time only.
template <uint32_t arrivals>
struct Barrier {
    uint64_t bits;

    __device__ uint32_t address() const { return ptx::shared_address(&bits); }
    // Called by one thread; ptx::fence_mbarrier_init() and a barrier of the CTA follow.
    __device__ void init() const {
        static_assert(arrivals > 0, "the number is given at run time");
        ptx::mbarrier_init(address(), arrivals);
    }
    __device__ void init(uint32_t count) const {
        static_assert(arrivals == 0, "the type has the number");
        ptx::mbarrier_init(address(), count);
    }
    __device__ void arrive() const { ptx::mbarrier_arrive(address()); }
    // Arrives, and expects bytes that TMA will deliver.
    __device__ void expect(uint32_t bytes) const {
        ptx::mbarrier_arrive_expect_tx(address(), bytes);
    }
    __device__ void wait(uint32_t parity) const { ptx::mbarrier_wait(address(), parity); }
};

}  // namespace mla
