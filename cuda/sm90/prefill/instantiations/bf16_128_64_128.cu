#include "../launch.cuh"

namespace mla::sm90::prefill {
template cudaError_t launch<TileR1<__nv_bfloat16>, true>(const Launch&, const KernelParams&, const Maps&);
template cudaError_t launch<TileR1<__nv_bfloat16>, false>(const Launch&, const KernelParams&, const Maps&);
}  // namespace mla::sm90::prefill
