// Where the warps of a CTA stand in the buffers that they hand on.
#pragma once

#include <cstdint>

#include "tile.cuh"

namespace mla::sm90::prefill {

// A pipeline's position: which stage, and the parity of the phase that a consumer waits for there.
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

// Where the tile of a number is announced, and the parity of the phase that its readers wait for.
struct Slot {
    int index;
    uint32_t phase;

    __device__ explicit Slot(int number)
        : index(number % kAnnounced), phase(number / kAnnounced & 1) {}
};

}  // namespace mla::sm90::prefill
