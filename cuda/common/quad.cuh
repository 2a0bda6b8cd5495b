// Collective operations of a quad: the four lanes that hold a row of an MMA's operand or
// accumulator.
#pragma once

#include <cstdint>

namespace mla {

// Transposes words within a quad. Before the call, words[i] of lane q is word i of row q; after it,
// word q of row i. `q` is the lane's number in its quad.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int q) {
    const auto exchange = [](uint32_t& a, uint32_t& b, bool upper, int distance) {
        const uint32_t got = __shfl_xor_sync(~0u, upper ? a : b, distance);
        (upper ? a : b) = got;
    };
    exchange(words[0], words[1], q & 1, 1);
    exchange(words[2], words[3], q & 1, 1);
    exchange(words[0], words[2], q & 2, 2);
    exchange(words[1], words[3], q & 2, 2);
}

}  // namespace mla
