// Calls the shim, and compares what FlashMLA's launchers were given. It ends with the line of the
// first difference.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "flashmla.h"
#include "params.h"

namespace {

DenseAttnDecodeParams attention;
CombineParams combination;
GetDecodeSchedMetaParams metadata;
FmSchedule bounded;
char element = 0;
int launches = 0;
bool fails = false;

template <typename Element>
constexpr char kName = std::is_same_v<Element, cutlass::bfloat16_t> ? 'b' : 'h';

// The two calls of a decode.
int32_t decode(const FmDecode& call, void* stream) {
    const int32_t status = fm_attend(&call, stream);
    return status != 0 ? status : fm_combine(&call, stream);
}

// Memory that nothing reads.
char memory[16];
template <typename T>
T* at(int place) {
    return reinterpret_cast<T*>(memory + place);
}

void require(bool holds, int line) {
    if (holds) return;
    std::printf("main.cc:%d: not as expected; %s\n", line, fm_last_error());
    std::exit(1);
}
#define REQUIRE(condition) require(condition, __LINE__)

}  // namespace

namespace sm90 {
template <typename Element>
void run_flash_splitkv_mla_kernel(DenseAttnDecodeParams& params) {
    attention = params;
    element = kName<Element>;
    ++launches;
    pending_errors = 1;
    if (fails) throw std::runtime_error("a launch that fails");
}
template void run_flash_splitkv_mla_kernel<cutlass::bfloat16_t>(DenseAttnDecodeParams&);
template void run_flash_splitkv_mla_kernel<cutlass::half_t>(DenseAttnDecodeParams&);
}  // namespace sm90

namespace smxx::decode {
template <typename Element>
void run_flash_mla_combine_kernel(CombineParams& params) {
    REQUIRE(element == kName<Element>);
    combination = params;
    ++launches;
}
template void run_flash_mla_combine_kernel<cutlass::bfloat16_t>(CombineParams&);
template void run_flash_mla_combine_kernel<cutlass::half_t>(CombineParams&);

void run_get_decoding_sched_meta_kernel(GetDecodeSchedMetaParams& params) { metadata = params; }
}  // namespace smxx::decode

extern "C" int32_t fm_bound_lens(const FmSchedule* schedule, void*) {
    bounded = *schedule;
    return fails ? 7 : 0;
}

int main() {
    const auto stream = at<CUstream_st>(15);

    FmSchedule schedule{};
    schedule.seq_lens = at<int32_t>(1);
    schedule.lens = at<int32_t>(2);
    schedule.parts = at<void>(3);
    schedule.splits = at<int32_t>(4);
    schedule.requests = 9, schedule.query_len = 2, schedule.num_parts = 66, schedule.max_len = 640;
    REQUIRE(fm_schedule(&schedule, stream) == 0);
    REQUIRE(bounded.seq_lens == at<int32_t>(1) && bounded.max_len == 640);
    // FlashMLA sees the lengths that were bounded.
    REQUIRE(metadata.seqlens_k_ptr == at<int32_t>(2) && metadata.stream == stream);
    REQUIRE(metadata.b == 9 && metadata.s_q == 2 && metadata.num_sm_parts == 66);
    REQUIRE(metadata.block_size_n == 64 && metadata.fixed_overhead_num_blocks == 5);
    REQUIRE(metadata.topk == -1 && metadata.extra_topk == -1);
    REQUIRE(metadata.topk_length == nullptr && metadata.extra_topk_length == nullptr);
    REQUIRE(metadata.tile_scheduler_metadata_ptr == at<DecodingSchedMeta>(3));
    REQUIRE(metadata.num_splits_ptr == at<int32_t>(4));

    FmDecode call{};
    call.query = at<void>(5), call.cache = at<void>(6), call.block_table = at<int32_t>(7);
    call.lens = at<int32_t>(2), call.parts = at<void>(3), call.splits = at<int32_t>(4);
    call.out = at<void>(8), call.lse = at<float>(9);
    call.out_parts = at<float>(10), call.lse_parts = at<float>(11);
    call.query_request_stride = 9600, call.query_row_stride = 600;
    call.page_stride = 40000, call.row_stride = 592;
    call.requests = 9, call.query_len = 2, call.heads = 16, call.pages = 70, call.max_pages = 10;
    call.num_parts = 66, call.is_bf16 = 1, call.softmax_scale = 0.5f;
    REQUIRE(decode(call, stream) == 0);
    REQUIRE(launches == 2 && element == 'b');

    const auto& p = attention;
    REQUIRE(p.q_ptr == at<void>(5) && p.k_ptr == at<void>(6) && p.block_table == at<int>(7));
    REQUIRE(p.seqlens_k_ptr == at<int>(2) && p.num_splits_ptr == at<int>(4));
    REQUIRE(p.tile_scheduler_metadata_ptr == at<DecodingSchedMeta>(3));
    REQUIRE(p.o_ptr == at<void>(8) && p.softmax_lse_ptr == at<float>(9));
    REQUIRE(p.oaccum_ptr == at<float>(10) && p.softmax_lseaccum_ptr == at<float>(11));
    REQUIRE(p.stream == stream);
    REQUIRE(p.q_batch_stride == 9600 && p.q_row_stride == 600);
    REQUIRE(p.k_batch_stride == 40000 && p.k_row_stride == 592);
    REQUIRE(p.o_batch_stride == 2 * 16 * 512 && p.o_row_stride == 512);
    // TMA takes the distance of a single head, too, in whole 16 bytes.
    REQUIRE(p.q_head_stride % 8 == 0 && p.k_head_stride % 8 == 0 && p.o_head_stride % 8 == 0);
    REQUIRE(p.b == 9 && p.s_q == 2 && p.h_q == 16 && p.h_k == 1);
    REQUIRE(p.q_seq_per_hk == 32 && p.q_head_per_hk == 16 && p.d == 576 && p.d_v == 512);
    REQUIRE(p.num_blocks == 70 && p.page_block_size == 64 && p.block_table_batch_stride == 10);
    REQUIRE(p.num_sm_parts == 66 && p.total_num_splits == 75);
    REQUIRE(p.is_causal && p.scale_softmax == 0.5f);
    REQUIRE(p.scale_softmax_log2 > 0.7213f && p.scale_softmax_log2 < 0.7214f);

    const auto& c = combination;
    REQUIRE(c.out == at<void>(8) && c.lse == at<float>(9) && c.attn_sink == nullptr);
    REQUIRE(c.o_accum == at<float>(10) && c.lse_accum == at<float>(11) && c.stream == stream);
    REQUIRE(c.num_splits_ptr == at<int>(4) && c.num_sm_parts == 66);
    REQUIRE(c.tile_scheduler_metadata_ptr == at<DecodingSchedMeta>(3));
    REQUIRE(c.b == 9 && c.s_q == 2 && c.h_q == 16 && c.d_v == 512);
    REQUIRE(c.stride_lse_b == 32 && c.stride_lse_s_q == 16);
    REQUIRE(c.stride_lse_accum_split == 32 && c.stride_lse_accum_s_q == 16);
    REQUIRE(c.stride_o_b == 16384 && c.stride_o_s_q == 8192 && c.stride_o_h_q == 512);
    REQUIRE(c.stride_o_accum_split == 16384 && c.stride_o_accum_s_q == 8192);
    REQUIRE(c.stride_o_accum_h_q == 512);

    // One query token sees all keys, and the other dtype has its own kernel.
    call.query_len = 1, call.is_bf16 = 0;
    REQUIRE(decode(call, stream) == 0);
    REQUIRE(element == 'h' && !attention.is_causal);

    // What a launcher throws is a status and a text; nothing else is launched, and no error is left
    // for the next call to find.
    fails = true, launches = 0;
    REQUIRE(decode(call, stream) == -1 && launches == 1 && pending_errors == 0);
    REQUIRE(std::strcmp(fm_last_error(), "a launch that fails") == 0);
    REQUIRE(fm_schedule(&schedule, stream) == 7);

    std::puts("as expected");
}
