// An order of launches: what is enqueued behind it begins when everything before it has ended.

#include "helpers.cuh"

namespace mla {
namespace {

// It is launched without programmatic dependence, and so begins when all work before it on the
// stream has ended; its dependents begin when it has, since it never lets them go ahead.
__global__ void __launch_bounds__(32) fence_kernel() {}

}  // namespace

MlaStatus load_fence_kernels() { return load("fence", fence_kernel); }

}  // namespace mla

extern "C" MlaStatus mla_fence(void* stream) {
    return mla::launch("fence", mla::fence_kernel, dim3(1), dim3(32), stream);
}
