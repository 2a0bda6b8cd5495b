// Kernels for queries of f16, and a cache of e4m3 with a scale for each token.
#include "../launch.cuh"

namespace mla::sm90::decode {
template cudaError_t launch_token_scales<__half>(const Launch&, const KernelParams&,
                                                 const TensorMaps&);
}
