// Ragged prefill on Hopper: FlashInfer's fa3.
#include <flashinfer/attention/hopper/default_params.cuh>
#include <flashinfer/attention/hopper/prefill_sm90.cuh>
#include <flashinfer/attention/hopper/variants.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/cutlass_utils.cuh>

#include "ragged.cuh"

using namespace flashinfer;

namespace {

template <typename T, MaskMode kMask, bool kSameForAllHeads>
cudaError_t launch(BatchPrefillRaggedParams<T, T, T, int32_t> params, cudaStream_t stream) {
    return BatchPrefillWithRaggedKVCacheDispatched<fi::kKey, fi::kValue, kMask,
                                                   /*LEFT_SLIDING_WINDOW=*/false, kSameForAllHeads,
                                                   DefaultAttention</*use_logits_soft_cap=*/false>>(
        params, /*enable_pdl=*/false, stream);
}

template <typename T, MaskMode kMask>
cudaError_t attend(const FiRaggedRun& run, const PrefillPlanSM90Info& info, cudaStream_t stream) {
    BatchPrefillRaggedParams<T, T, T, int32_t> params{};
    params.q_ptr = fi::address<T>(run.query);
    params.k_ptr = fi::address<T>(run.key);
    params.v_ptr = fi::address<T>(run.value);
    params.o_ptr = fi::address<T>(run.out);
    params.lse_ptr = run.lse;
    params.qo_tile_indices = fi::list_at(run, info.qo_tile_indices_offset);
    params.qo_indptr = fi::list_at(run, info.qo_indptr_offset);
    params.kv_indptr = fi::list_at(run, info.kv_indptr_offset);
    params.qo_lens = fi::list_at(run, info.qo_len_offset);
    params.kv_lens = fi::list_at(run, info.kv_len_offset);
    params.head_indices = fi::list_at(run, info.head_indices_offset);
    params.work_indptr = fi::list_at(run, info.work_indptr_offset);
    params.batch_indices = fi::list_at(run, info.batch_indices_offset);
    params.additional_params.sm_scale = run.softmax_scale;
    params.q_stride_n = run.query_token_stride;
    params.q_stride_h = run.query_head_stride;
    params.k_stride_n = run.key_token_stride;
    params.k_stride_h = run.key_head_stride;
    params.v_stride_n = run.value_token_stride;
    params.v_stride_h = run.value_head_stride;
    params.o_stride_n = run.out_token_stride;
    params.o_stride_h = run.out_head_stride;
    params.nnz_qo = run.query_tokens;
    params.nnz_kv = run.key_tokens;
    params.num_qo_heads = params.num_kv_heads = run.heads;
    params.group_size = 1;
    params.window_left = -1;
    params.causal = run.causal != 0;
    return info.same_schedule_for_all_heads ? launch<T, kMask, true>(params, stream)
                                            : launch<T, kMask, false>(params, stream);
}

}  // namespace

extern "C" int32_t fi_ragged_fa3(const FiRaggedRun* run, void* stream) {
    return fi::guarded([&] {
        PrefillPlanSM90Info info;
        info.FromVector({run->numbers, run->numbers + 9});
        return fi::of_kind(*run, [&](auto zero, auto mask) {
            using T = cutlass_dtype_t<decltype(zero)>;
            return attend<T, decltype(mask)::kMode>(*run, info, static_cast<cudaStream_t>(stream));
        });
    });
}
