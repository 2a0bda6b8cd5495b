// Pipeline states of a CTA's buffers.
#pragma once

#include <cstdint>

#include "config.cuh"

namespace mla::sm90::prefill {

// Pipeline state: a stage, and the parity of the phase that a consumer waits for there.
struct Position {
    int stage = 0;
    uint32_t phase = 0;

    __device__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Slot in which the tile of a number is announced, and the parity of the phase that readers wait
// for.
struct Slot {
    int index;
    uint32_t phase;

    __device__ explicit Slot(int number)
        : index(number % kAnnounced), phase(number / kAnnounced & 1) {}
};

}  // namespace mla::sm90::prefill
