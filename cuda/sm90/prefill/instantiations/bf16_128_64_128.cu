#include <cuda_bf16.h>

#include "../launch_kernel.cuh"

template cudaError_t mla::sm90::prefill::launch<mla::sm90::prefill::Tile_128_64_128<__nv_bfloat16>>(const Launch&, const KernelParams&, const Maps&);
