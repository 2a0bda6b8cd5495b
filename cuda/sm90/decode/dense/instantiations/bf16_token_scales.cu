// Kernels for queries of bf16, and a cache of e4m3 with a scale for each token.
#include "../launch.cuh"

namespace mla::sm90::decode {
template cudaError_t launch_token_scales<__nv_bfloat16>(const Launch&, const KernelParams&,
                                                        const TensorMaps&);
}
