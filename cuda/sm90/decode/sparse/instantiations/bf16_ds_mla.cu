#include "../launch.cuh"

namespace mla::sm90::sparse {
template cudaError_t launch_format<__nv_bfloat16, Format::ds_mla>(const Launch&,
                                                                  const KernelParams&);
}
