// FlashInfer's parameters of absorbed decode, from ours.
#pragma once

#include <flashinfer/attention/mla.cuh>

#include "dtype.cuh"
#include "flashinfer.h"

namespace fi {

constexpr uint32_t kLatent = 512, kRope = 64;

// The rows of partial results: two of a query tile of 64 for every SM, as the plan assumes.
constexpr int64_t partial_rows(int64_t sms) { return 2 * sms * 64; }

template <typename T>
flashinfer::MLAParams<T, T, T, int32_t> mla_params(const FiMlaRun& run) {
    const auto list = [&run](int index) {
        return const_cast<int32_t*>(run.lists) + static_cast<int64_t>(index) * run.capacity;
    };
    // Rows that the workspace has room for: a row is an output of T and its log-sum-exp.
    const int64_t rows = run.workspace_bytes / (kLatent * sizeof(T) + sizeof(float));
    flashinfer::MLAParams<T, T, T, int32_t> params{};
    params.q_nope = address<T>(run.query_latent);
    params.q_pe = address<T>(run.query_rope);
    params.ckv = address<T>(run.cache);
    params.kpe = address<T>(run.cache_rope);
    params.partial_o = static_cast<T*>(run.workspace);
    params.partial_lse = reinterpret_cast<float*>(params.partial_o + rows * kLatent);
    params.final_o = static_cast<T*>(run.out);
    params.final_lse = run.lse;
    params.q_indptr = list(0);
    params.kv_indptr = list(1);
    params.partial_indptr = list(2);
    params.merge_packed_offset_start = list(3);
    params.merge_packed_offset_end = list(4);
    params.merge_partial_packed_offset_start = list(5);
    params.merge_partial_packed_offset_end = list(6);
    params.merge_partial_stride = list(7);
    params.q_len = list(8);
    params.kv_len = list(9);
    params.q_start = list(10);
    params.kv_start = list(11);
    params.kv_end = list(12);
    params.work_indptr = list(13);
    params.kv_indices = const_cast<int32_t*>(run.block_table);
    params.block_size = flashinfer::uint_fastdiv(run.page_size);
    params.num_heads = flashinfer::uint_fastdiv(run.heads);
    params.q_nope_stride_n = run.query_latent_token_stride;
    params.q_nope_stride_h = run.query_latent_head_stride;
    params.q_pe_stride_n = run.query_rope_token_stride;
    params.q_pe_stride_h = run.query_rope_head_stride;
    params.ckv_stride_page = run.page_stride;
    params.ckv_stride_n = run.row_stride;
    params.kpe_stride_page = run.rope_page_stride;
    params.kpe_stride_n = run.rope_row_stride;
    params.o_stride_n = run.out_token_stride;
    params.o_stride_h = run.out_head_stride;
    params.sm_scale = run.softmax_scale;
    params.return_lse_base_on_e = true;
    return params;
}

}  // namespace fi
