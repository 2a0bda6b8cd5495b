// Host version of cuda/ptx/sm90.cuh, as far as the loading warps of sparse decode need it:
// mbarriers with the arrivals and bytes of a phase, and bulk copies that land at random times.
#pragma once

#include "sm80.cuh"
#include "sm89.cuh"

namespace mla::emulator {

// The bits of an mbarrier.
struct Mbarrier {
    uint16_t count, pending;
    uint32_t parity : 1, bytes : 31;

    // The hardware answers an arrival at a complete count with a launch failure.
    void arrive() {
        if (pending == 0) fail("an arrival at a barrier whose count is complete");
        --pending;
        complete();
    }
    void deliver(uint32_t delivered) {
        bytes -= delivered;
        complete();
    }
    void complete() {
        ++progress();
        if (pending > 0 || bytes > 0) return;
        parity ^= 1;
        pending = count;
    }

    // Number of events at all barriers: if it stands still, no thread will go on.
    static uint64_t& progress() {
        static uint64_t events = 0;
        return events;
    }
    [[noreturn]] static void fail(const char* what) {
        std::printf("FAIL %s\n", what);
        std::fflush(stdout);
        std::_Exit(1);
    }
};
static_assert(sizeof(Mbarrier) == 8);

inline Mbarrier& mbarrier_at(uint32_t bar) {
    return *reinterpret_cast<Mbarrier*>(emulated().shared_at(bar, 8));
}

// A bulk copy in flight.
struct Flight {
    uint32_t to;
    const void* from;
    uint32_t bytes, bar;
};

// The copies of a CTA that are in flight, and its place in a cluster.
struct Hopper {
    std::vector<Flight> flights;
    // Called when a copy begins.
    std::function<void(const Flight&)> begins;
    uint32_t rank = 0, ranks = 1;

    static Hopper& current() {
        static Hopper hopper;
        return hopper;
    }
    // Lands the copy of this index.
    void land(size_t at) {
        const Flight f = flights[at];
        flights.erase(flights.begin() + at);
        std::memcpy(emulated().shared_at(f.to, 16), f.from, f.bytes);
        mbarrier_at(f.bar).deliver(f.bytes);
    }
};

}  // namespace mla::emulator

namespace mla::ptx {

inline void mbarrier_init(uint32_t bar, uint32_t arrivals) {
    emulator::mbarrier_at(bar) = {uint16_t(arrivals), uint16_t(arrivals), 0, 0};
}
inline void fence_mbarrier_init() {}
inline void fence_proxy_async() {}
inline void mbarrier_arrive(uint32_t bar) {
    emulated().perhaps_yield();
    emulator::mbarrier_at(bar).arrive();
}
inline void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
    emulated().perhaps_yield();
    emulator::mbarrier_at(bar).bytes += bytes;
    emulator::mbarrier_at(bar).arrive();
}
inline void mbarrier_wait(uint32_t bar, uint32_t parity) {
    emulated().perhaps_yield();
    while (emulator::mbarrier_at(bar).parity == parity) emulated().yield();
}

struct CachePolicy {};
inline CachePolicy createpolicy_evict_first() { return {}; }
inline void cp_async_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t bar,
                          CachePolicy = {}) {
    const emulator::Flight flight = {to, from, bytes, bar};
    emulator::Hopper::current().begins(flight);
    emulator::Hopper::current().flights.push_back(flight);
    emulated().perhaps_yield();
}

inline uint32_t clusterid() { return blockIdx.x; }
inline uint32_t nclusterid() { return gridDim.x; }
inline uint32_t cluster_ctarank() { return emulator::Hopper::current().rank; }
inline uint32_t cluster_nctarank() { return emulator::Hopper::current().ranks; }

}  // namespace mla::ptx
