// Ragged prefill for every GPU since Ampere: FlashInfer's fa2.
#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/attention/variants.cuh>

#include "ragged.cuh"

using namespace flashinfer;

namespace {

// No custom mask, no sliding window, no soft cap, no ALiBi.
using Variant = DefaultAttention<false, false, false, false>;

template <uint32_t kTile, typename T, MaskMode kMask>
cudaError_t launch(BatchPrefillRaggedParams<T, T, T, int32_t> params, T* partial,
                   float* partial_lse, cudaStream_t stream) {
    return BatchPrefillWithRaggedKVCacheDispatched<kTile, fi::kKey, fi::kValue,
                                                   PosEncodingMode::kNone,
                                                   /*USE_FP16_QK_REDUCTION=*/false, kMask, Variant>(
        params, partial, partial_lse, /*enable_pdl=*/false, stream);
}

template <typename T, MaskMode kMask>
cudaError_t attend(const FiRaggedRun& run, const PrefillPlanInfo& info, cudaStream_t stream) {
    BatchPrefillRaggedParams<T, T, T, int32_t> params;
    params.q = fi::address<T>(run.query);
    params.k = fi::address<T>(run.key);
    params.v = fi::address<T>(run.value);
    params.o = fi::address<T>(run.out);
    params.lse = run.lse;
    params.q_indptr = const_cast<int32_t*>(run.query_starts);
    params.kv_indptr = const_cast<int32_t*>(run.key_starts);
    params.num_qo_heads = params.num_kv_heads = run.heads;
    params.group_size = uint_fastdiv(1);
    params.q_stride_n = run.query_token_stride;
    params.q_stride_h = run.query_head_stride;
    params.k_stride_n = run.key_token_stride;
    params.k_stride_h = run.key_head_stride;
    params.v_stride_n = run.value_token_stride;
    params.v_stride_h = run.value_head_stride;
    params.window_left = -1;
    params.sm_scale = run.softmax_scale;
    params.request_indices = fi::list_at(run, info.request_indices_offset);
    params.qo_tile_indices = fi::list_at(run, info.qo_tile_indices_offset);
    params.kv_tile_indices = fi::list_at(run, info.kv_tile_indices_offset);
    params.o_indptr = fi::list_at(run, info.o_indptr_offset);
    params.kv_chunk_size_ptr = fi::list_at(run, info.kv_chunk_size_ptr_offset);
    params.padded_batch_size = info.padded_batch_size;
    params.max_total_num_rows = info.total_num_rows;
    T* partial = nullptr;
    float* partial_lse = nullptr;
    if (info.split_kv) {
        params.merge_indptr = fi::list_at(run, info.merge_indptr_offset);
        partial = GetPtrFromBaseOffset<T>(run.workspace, info.v_offset);
        partial_lse = GetPtrFromBaseOffset<float>(run.workspace, info.s_offset);
    }
    switch (info.cta_tile_q) {
        case 16: return launch<16, T, kMask>(params, partial, partial_lse, stream);
        case 64: return launch<64, T, kMask>(params, partial, partial_lse, stream);
        case 128: return launch<128, T, kMask>(params, partial, partial_lse, stream);
        default: throw std::invalid_argument("query tile: accepted 16, 64 and 128");
    }
}

}  // namespace

extern "C" int32_t fi_ragged_fa2(const FiRaggedRun* run, void* stream) {
    return fi::guarded([&] {
        PrefillPlanInfo info;
        info.FromVector({run->numbers, run->numbers + 15});
        return fi::of_kind(*run, [&](auto zero, auto mask) {
            return attend<decltype(zero), decltype(mask)::kMode>(*run, info,
                                                                 static_cast<cudaStream_t>(stream));
        });
    });
}
