#include "../launch.cuh"

namespace mla::sm90::sparse {
template cudaError_t launch_format<__half, Format::ds_mla>(const Launch&, const KernelParams&);
}
