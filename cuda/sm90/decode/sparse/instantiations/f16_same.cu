#include "../launch.cuh"

namespace mla::sm90::sparse {
template cudaError_t launch_format<__half, Format::same>(const Launch&, const KernelParams&);
}
