// Kernels for queries of f16, and a cache of f16 or e4m3.
#include "../launch.cuh"

namespace mla::sm90::decode {
template cudaError_t launch_rows<__half, RowDims<512, 64>>(const Launch&, const KernelParams&,
                                                           const TensorMaps&);
}
