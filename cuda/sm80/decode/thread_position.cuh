// Position of a thread in the CTA: its number, its columns and its rows.
#pragma once

#include "params.cuh"

namespace mla::sm80::decode {

// Each member function computes its result anew, so that it occupies no register in the meantime.
// The compiler takes each copy of the thread's number for a different number.
class ThreadPosition {
  public:
    __device__ ThreadPosition() : thread_(threadIdx.x) {}

    __device__ unsigned thread() const { return hide(thread_); }
    // Returns the same number, but the compiler does not know that it is the same.
    __device__ static unsigned hide(unsigned x) {
#ifdef __CUDA_ARCH__
        asm volatile("" : "+r"(x));
#endif
        return x;
    }
    __device__ int lane() const { return thread() % 32; }
    __device__ int column_group() const { return thread() / 32 % kColumnGroups; }
    __device__ int row_group() const { return thread() / (32 * kColumnGroups); }

  private:
    unsigned thread_;
};

}  // namespace mla::sm80::decode
