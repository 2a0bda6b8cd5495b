// The fields that the shim fills.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

struct DecodingSchedMeta {
    int fields[8];
};

struct DenseAttnDecodeParams {
    cudaStream_t stream;
    void *q_ptr, *k_ptr, *o_ptr;
    float *softmax_lse_ptr, *softmax_lseaccum_ptr, *oaccum_ptr;
    int *block_table, *seqlens_k_ptr, *num_splits_ptr;
    DecodingSchedMeta* tile_scheduler_metadata_ptr;
    int64_t q_batch_stride, q_row_stride, q_head_stride;
    int64_t k_batch_stride, k_row_stride, k_head_stride;
    int64_t o_batch_stride, o_row_stride, o_head_stride;
    int64_t block_table_batch_stride;
    int b, s_q, q_seq_per_hk, q_head_per_hk, h_q, h_k, d, d_v;
    int num_blocks, page_block_size, num_sm_parts, total_num_splits;
    float scale_softmax, scale_softmax_log2;
    bool is_causal;
};

struct CombineParams {
    cudaStream_t stream;
    void* out;
    float *lse, *lse_accum, *o_accum, *attn_sink;
    int* num_splits_ptr;
    DecodingSchedMeta* tile_scheduler_metadata_ptr;
    int b, s_q, h_q, d_v, num_sm_parts;
    int stride_lse_b, stride_lse_s_q, stride_lse_accum_split, stride_lse_accum_s_q;
    int stride_o_b, stride_o_s_q, stride_o_h_q;
    int stride_o_accum_split, stride_o_accum_s_q, stride_o_accum_h_q;
};

struct GetDecodeSchedMetaParams {
    cudaStream_t stream;
    int *seqlens_k_ptr, *num_splits_ptr, *topk_length, *extra_topk_length;
    DecodingSchedMeta* tile_scheduler_metadata_ptr;
    int b, s_q, block_size_n, fixed_overhead_num_blocks, topk, extra_topk, num_sm_parts;
};
