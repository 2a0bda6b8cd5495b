// Runs the split protocol on counters in host memory, one step at a time. Tests try all orders of
// steps.

#include "../../../common/split_protocol.cuh"
#include "../../../common/status.cuh"
#include "sm90/mla_sm90_division.h"

namespace mla {
namespace {

// Plain memory, without atomics, because the caller does one step after the other.
struct HostMemory {
    __host__ __device__ static int add_acq_rel(int32_t* at, int n) {
        const int before = *at;
        *at += n;
        return before;
    }
    __host__ __device__ static void add_release(int32_t* at, int n) { *at += n; }
    __host__ __device__ static int increment(int32_t* at) { return (*at)++; }
    __host__ __device__ static int load_acquire(const int32_t* at) { return *at; }
    __host__ __device__ static bool exchange(int32_t* at, int from, int to) {
        if (*at != from) return false;
        *at = to;
        return true;
    }
};

static_assert(sizeof(SplitCounters) == sizeof(MlaSplitCounters), "the header declares them");
static_assert(int(SplitRole::everything) == MLA_SPLIT_EVERYTHING, "the header numbers the roles");

}  // namespace
}  // namespace mla

using namespace mla;

extern "C" MlaStatus mla_split_step(int32_t step, MlaSplitCounters* counters, int32_t splits,
                                    int32_t combiners, int32_t seen, int32_t* answer) {
    if (!counters) return refuse("counters", 0, "a pointer");
    if (splits < 1 || splits > kMaxSplits) return refuse("splits", splits, "1..=4095");
    if (combiners < 1 || combiners > splits) return refuse("combiners", combiners, "1..=splits");
    const SplitProtocol<HostMemory> protocol{reinterpret_cast<SplitCounters*>(counters), splits,
                                             combiners};
    int32_t unasked;
    int32_t& result = answer ? *answer : unasked;
    switch (step) {
        case MLA_SPLIT_ARRIVE: result = int(protocol.arrive()); break;
        case MLA_SPLIT_ARRIVE_COMBINER: protocol.arrive_combiner(); break;
        case MLA_SPLIT_LOOK: result = protocol.seen(); break;
        case MLA_SPLIT_ROLE_OF: result = int(protocol.role_of(seen)); break;
        case MLA_SPLIT_FALL_BACK: result = protocol.fall_back(seen); break;
        case MLA_SPLIT_YIELDED: result = int(protocol.yield()); break;
        case MLA_SPLIT_LEAVE: result = protocol.leave(); break;
        case MLA_SPLIT_RESET: protocol.reset(); break;
        default: return refuse("step", step, "a value of MlaSplitStep (0..=7)");
    }
    return ok();
}
