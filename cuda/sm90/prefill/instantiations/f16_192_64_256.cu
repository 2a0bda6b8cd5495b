#include <cuda_fp16.h>

#include "../launch_kernel.cuh"

namespace mla::sm90::prefill {
template cudaError_t launch<Tile_192_64_256<__half>>(const Launch&, const KernelParams&,
                                                     const Maps&);
template cudaError_t load<Tile_192_64_256<__half>>();
}  // namespace mla::sm90::prefill
