#include <cuda_bf16.h>

#include "../launch_kernel.cuh"

namespace mla::sm90::prefill {
template cudaError_t launch<Tile_64_32_64<__nv_bfloat16>>(const Launch&, const KernelParams&,
                                                          const Maps&);
template cudaError_t load<Tile_64_32_64<__nv_bfloat16>>();
}  // namespace mla::sm90::prefill
