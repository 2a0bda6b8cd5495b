#include "../launch.cuh"

namespace mla::sm90::decode {
template cudaError_t launch_rows<__half, RowDims<256, 32>>(const Launch&, const KernelParams&,
                                                           const TensorMaps&);
}
