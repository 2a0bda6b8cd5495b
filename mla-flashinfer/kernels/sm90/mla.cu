// Absorbed decode on Hopper: FlashInfer's fa3.
#include <flashinfer/attention/mla_hopper.cuh>

#include "mla.cuh"

using namespace flashinfer;

extern "C" int32_t fi_mla_fa3(const FiMlaRun* run, void* stream) {
    return fi::guarded([&] {
        return fi::of_dtype(run->dtype, [&](auto zero) {
            return mla::BatchMLAPageAttentionHopper<MaskMode::kCausal, fi::kLatent, fi::kRope>(
                fi::mla_params<decltype(zero)>(*run), run->grid_x, run->grid_y,
                static_cast<cudaStream_t>(stream));
        });
    });
}
