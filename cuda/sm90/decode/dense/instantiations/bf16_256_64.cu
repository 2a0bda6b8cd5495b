#include "../launch.cuh"

namespace mla::sm90::decode {
template cudaError_t launch_rows<__nv_bfloat16, RowDims<256, 64>>(const Launch&,
                                                                  const KernelParams&,
                                                                  const TensorMaps&);
}
