// A call in FlashMLA's own parameters. Nothing here runs on the GPU, so that a test compiles it
// beside a stand-in for FlashMLA and sees what it is given.
#include <params.h>
#include <sm90/decode/dense/splitkv_mla.h>
#include <smxx/decode/combine/combine.h>
#include <smxx/decode/get_decoding_sched_meta/get_decoding_sched_meta.h>

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include "flashmla.h"
#include "guard.h"

namespace {

// Without it a part would be given a block alone: what a request costs beside its blocks.
constexpr int kBlocksPerRequest = 5;

constexpr float kLog2E = 1.4426950408889634f;

DenseAttnDecodeParams attention(const FmDecode& call, cudaStream_t stream) {
    const int rows = call.query_len * call.heads;
    DenseAttnDecodeParams params{};
    params.b = call.requests;
    params.s_q = call.query_len;
    params.q_seq_per_hk = rows;
    params.d = FM_WIDTH;
    params.d_v = FM_LATENT;
    params.h_q = call.heads;
    params.h_k = 1;
    params.num_blocks = call.pages;
    params.q_head_per_hk = call.heads;
    params.is_causal = call.query_len > 1;
    params.scale_softmax = call.softmax_scale;
    params.scale_softmax_log2 = call.softmax_scale * kLog2E;
    params.q_ptr = const_cast<void*>(call.query);
    params.k_ptr = const_cast<void*>(call.cache);
    params.o_ptr = call.out;
    params.softmax_lse_ptr = call.lse;
    params.q_batch_stride = call.query_request_stride;
    params.q_row_stride = call.query_row_stride;
    params.q_head_stride = FM_WIDTH;
    params.k_batch_stride = call.page_stride;
    params.k_row_stride = call.row_stride;
    params.k_head_stride = FM_WIDTH;
    params.o_batch_stride = static_cast<int64_t>(rows) * FM_LATENT;
    params.o_row_stride = FM_LATENT;
    params.o_head_stride = params.o_batch_stride;
    params.block_table = const_cast<int32_t*>(call.block_table);
    params.block_table_batch_stride = call.max_pages;
    params.page_block_size = FM_PAGE;
    params.seqlens_k_ptr = const_cast<int32_t*>(call.lens);
    params.tile_scheduler_metadata_ptr =
        static_cast<DecodingSchedMeta*>(const_cast<void*>(call.parts));
    params.num_sm_parts = call.num_parts;
    params.num_splits_ptr = const_cast<int32_t*>(call.splits);
    params.total_num_splits = call.requests + call.num_parts;
    params.softmax_lseaccum_ptr = call.lse_parts;
    params.oaccum_ptr = call.out_parts;
    params.stream = stream;
    return params;
}

CombineParams combination(const FmDecode& call, cudaStream_t stream) {
    const int rows = call.query_len * call.heads;
    CombineParams params{};
    params.b = call.requests;
    params.s_q = call.query_len;
    params.h_q = call.heads;
    params.d_v = FM_LATENT;
    params.lse = call.lse;
    params.out = call.out;
    params.lse_accum = call.lse_parts;
    params.o_accum = call.out_parts;
    params.stride_lse_b = params.stride_lse_accum_split = rows;
    params.stride_lse_s_q = params.stride_lse_accum_s_q = call.heads;
    params.stride_o_b = params.stride_o_accum_split = rows * FM_LATENT;
    params.stride_o_s_q = params.stride_o_accum_s_q = call.heads * FM_LATENT;
    params.stride_o_h_q = params.stride_o_accum_h_q = FM_LATENT;
    params.tile_scheduler_metadata_ptr =
        static_cast<DecodingSchedMeta*>(const_cast<void*>(call.parts));
    params.num_splits_ptr = const_cast<int32_t*>(call.splits);
    params.num_sm_parts = call.num_parts;
    params.stream = stream;
    return params;
}

template <typename T>
struct Type {
    using Element = T;
};

// Calls `launch` with the queries' type.
template <typename Launch>
int32_t with_element(const FmDecode& call, const Launch& launch) {
    return fm::guarded([&] {
        if (call.is_bf16) {
            launch(Type<cutlass::bfloat16_t>());
        } else {
            launch(Type<cutlass::half_t>());
        }
        return cudaSuccess;
    });
}

}  // namespace

std::string& fm::last_error() {
    thread_local std::string text;
    return text;
}

extern "C" const char* fm_last_error(void) { return fm::last_error().c_str(); }

extern "C" int32_t fm_schedule(const FmSchedule* schedule, void* stream) {
    const int32_t status = fm_bound_lens(schedule, stream);
    if (status != 0) return status;
    return fm::guarded([&] {
        static_assert(sizeof(DecodingSchedMeta) == FM_PART_BYTES);
        GetDecodeSchedMetaParams params{};
        params.b = schedule->requests;
        params.s_q = schedule->query_len;
        params.block_size_n = FM_PAGE;
        params.fixed_overhead_num_blocks = kBlocksPerRequest;
        params.topk = params.extra_topk = -1;
        params.seqlens_k_ptr = schedule->lens;
        params.tile_scheduler_metadata_ptr = static_cast<DecodingSchedMeta*>(schedule->parts);
        params.num_splits_ptr = schedule->splits;
        params.num_sm_parts = schedule->num_parts;
        params.stream = static_cast<cudaStream_t>(stream);
        smxx::decode::run_get_decoding_sched_meta_kernel(params);
        return cudaSuccess;
    });
}

extern "C" int32_t fm_attend(const FmDecode* call, void* stream) {
    return with_element(*call, [&](auto type) {
        auto params = attention(*call, static_cast<cudaStream_t>(stream));
        sm90::run_flash_splitkv_mla_kernel<typename decltype(type)::Element>(params);
    });
}

extern "C" int32_t fm_combine(const FmDecode* call, void* stream) {
    return with_element(*call, [&](auto type) {
        auto params = combination(*call, static_cast<cudaStream_t>(stream));
        smxx::decode::run_flash_mla_combine_kernel<typename decltype(type)::Element>(params);
    });
}
