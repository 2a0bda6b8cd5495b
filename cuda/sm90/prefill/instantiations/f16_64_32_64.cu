#include <cuda_fp16.h>

#include "../launch_kernel.cuh"

template cudaError_t mla::sm90::prefill::launch<mla::sm90::prefill::Tile_64_32_64<__half>>(const Launch&, const KernelParams&, const Maps&);
