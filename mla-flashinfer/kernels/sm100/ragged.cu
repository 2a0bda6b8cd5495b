// Ragged prefill on Blackwell: CUTLASS's kernel, as FlashInfer keeps it.
#include <flashinfer/attention/blackwell/fmha_cutlass_sm100.cuh>
#include <flashinfer/cutlass_utils.cuh>

#include "ragged.cuh"

using namespace flashinfer;

namespace {

constexpr int kQueryTile = FI_CUTLASS_QUERY_TILE, kKeyTile = 128;

template <typename T, bool kCausal>
cudaError_t attend(const FiRaggedRun& run, const fi::CutlassPlan& plan, cudaStream_t stream) {
    using KeyShape = cute::Shape<cute::Int<kQueryTile>, cute::Int<kKeyTile>, cute::Int<fi::kKey>>;
    using ValueShape =
        cute::Shape<cute::Int<kQueryTile>, cute::Int<fi::kValue>, cute::Int<kKeyTile>>;
    using Mask = std::conditional_t<kCausal, cutlass::fmha::collective::CausalMask,
                                    cutlass::fmha::collective::ResidualMask>;
    const auto stride = [](int64_t elements) { return static_cast<int>(elements); };
    // TMA gets a description of the output that begins before its first row, by the number of rows
    // of the longest request. The output therefore has to lie at a place with that number of rows
    // in front of it.
    const int64_t row = static_cast<int64_t>(run.heads) * fi::kValue;
    T* out = static_cast<T*>(run.workspace) + plan.max_query_len * row;
    const cudaError_t status = run_fmha_fwd<T, T, int32_t, KeyShape, ValueShape, Mask>(
        run.workspace, fi::address<T>(run.query), fi::address<T>(run.key),
        fi::address<T>(run.value), fi::address<int32_t>(run.query_starts),
        fi::address<int32_t>(run.key_starts), fi::list_at(run, plan.work_starts),
        fi::list_at(run, plan.tiles), fi::list_at(run, plan.heads),
        fi::list_at(run, plan.requests_of_works), out, run.lse,
        /*mask_mode_code=*/kCausal, run.softmax_scale, 1, 1, 1, 1, run.heads, run.heads, fi::kKey,
        fi::kValue, stride(run.query_token_stride), stride(run.query_head_stride),
        stride(run.key_token_stride), stride(run.key_head_stride), stride(run.value_token_stride),
        stride(run.value_head_stride), static_cast<int>(plan.requests), run.query_tokens,
        run.key_tokens, static_cast<int>(plan.max_query_len), stream);
    if (status != cudaSuccess) return status;
    return cudaMemcpyAsync(run.out, out, run.query_tokens * row * sizeof(T),
                           cudaMemcpyDeviceToDevice, stream);
}

}  // namespace

extern "C" int32_t fi_ragged_cutlass(const FiRaggedRun* run, void* stream) {
    return fi::guarded([&] {
        fi::CutlassPlan plan;
        std::memcpy(&plan, run->numbers, sizeof plan);
        // No query sees a key.
        if (plan.requests == 0) return cudaSuccess;
        return fi::of_kind(*run, [&](auto zero, auto mask) {
            using T = cutlass_dtype_t<decltype(zero)>;
            return attend<T, decltype(mask)::kIsCausal>(*run, plan,
                                                        static_cast<cudaStream_t>(stream));
        });
    });
}
