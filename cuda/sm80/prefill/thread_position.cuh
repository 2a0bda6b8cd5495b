// Position of a thread in the CTA: its number, its rows, and the addresses of its operands.
#pragma once

#include "config.cuh"
#include "ptx/special.cuh"

namespace mla::sm80::prefill {

// Everything is computed anew at each use, so it occupies no register in between. The compiler
// takes each copy of the thread's number for a different number.
class ThreadPosition {
  public:
    __device__ ThreadPosition() : thread_(threadIdx.x) {}

    __device__ unsigned thread() const {
        unsigned thread = thread_;
#ifdef __CUDA_ARCH__
        asm volatile("" : "+r"(thread));
#endif
        return thread;
    }

    // The warp's first row.
    template <class C>
    __device__ int first_row() const {
        return thread() / 32 * C::kWarpRows;
    }

    // Offsets of the row that this lane names to ldmatrix: in the queries, in the stage of keys,
    // and in the stage of values. For the queries, the caller reads the thread's number when that
    // costs no time. The number would take a register if it were kept between two uses.
    template <class C>
    __device__ static int query_at(unsigned thread) {
        return C::QkRows::at(thread / 32 * C::kWarpRows + thread % 16, thread / 16 % 2);
    }
    template <class C>
    __device__ int key_at() const {
        const unsigned thread = this->thread(), row = thread % 8 + thread / 16 % 2 * 8;
        return C::QkRows::at(row, thread / 8 % 2);
    }
    template <class C>
    __device__ int value_at() const {
        const unsigned thread = this->thread();
        return C::VRows::at(thread % 16, thread / 16 % 2);
    }

  private:
    unsigned thread_;
};

}  // namespace mla::sm80::prefill
