// A fence between launches: work enqueued behind it begins when everything before it has ended.

#include "helpers.cuh"

namespace mla {
namespace {

// This kernel is launched without programmatic dependent launch, so it begins when all earlier work
// of the stream has ended. It never releases its dependents early, so they begin when it has ended.
__global__ void __launch_bounds__(32) fence_kernel() {}

}  // namespace

MlaStatus load_fence_kernels() { return load("fence", fence_kernel); }

}  // namespace mla

extern "C" MlaStatus mla_fence(void* stream) {
    return mla::launch("fence", mla::fence_kernel, dim3(1), dim3(32), stream);
}
