#include <cuda_fp16.h>

#include "../launch_kernel.cuh"

namespace mla::sm90::prefill {
template cudaError_t launch<Tile_128_64_128<__half>>(const Launch&, const KernelParams&,
                                                     const Maps&);
template cudaError_t load<Tile_128_64_128<__half>>();
}  // namespace mla::sm90::prefill
