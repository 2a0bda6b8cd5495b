// Absorbed decode for every GPU since Ampere: FlashInfer's fa2.
#include "mla.cuh"

using namespace flashinfer;

extern "C" int32_t fi_mla_fa2(const FiMlaRun* run, void* stream) {
    return fi::guarded([&] {
        return fi::of_dtype(run->dtype, [&](auto zero) {
            return mla::BatchMLAPagedAttention<MaskMode::kCausal, fi::kLatent, fi::kRope>(
                fi::mla_params<decltype(zero)>(*run), run->grid_x, run->grid_y,
                static_cast<cudaStream_t>(stream));
        });
    });
}
