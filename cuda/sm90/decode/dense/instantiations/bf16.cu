// Kernels for queries of bf16, and a cache of bf16 or e4m3.
#include "../launch.cuh"

namespace mla::sm90::decode {
template cudaError_t launch_rows<__nv_bfloat16, RowDims<512, 64>>(const Launch&,
                                                                  const KernelParams&,
                                                                  const TensorMaps&);
}
