#include "../launch.cuh"

namespace mla::sm90::sparse {
template cudaError_t launch_rows<__half, PerTokenRows<0>>(const Launch&, const KernelParams&);
}
