#include "launch.cuh"
#include "sm90/mla_sm90.h"

namespace mla::sm90::topk {
namespace {

MlaStatus check(const MlaTopkParams& p) {
    Check check;
    check.that(p.requests >= 1, "requests", p.requests, "at least 1")
        .that(p.first_token >= 0, "first_token", p.first_token, "0 and up")
        .that(p.columns >= 1 && p.columns <= kMaxColumns, "columns", p.columns, "1..=786432")
        .that(p.topk >= 1 && p.topk <= 1 << 20, "topk", p.topk, "1..=1048576")
        .that(p.max_pages >= 1, "max_pages", p.max_pages, "at least 1")
        .that(p.page_size >= 1, "page_size", p.page_size, "at least 1")
        .that(p.pages >= 1 && p.pages <= INT32_MAX, "pages", p.pages, "1..=2147483647")
        .pointer(p.logits, 4, "logits")
        .pointer(p.query_starts, 4, "query_starts")
        .pointer(p.seq_lens, 4, "seq_lens")
        .pointer(p.block_table, 4, "block_table")
        .pointer(p.lists, 4, "lists");
    if (p.rows > 1)
        check.stride(p.logits_stride, "logits_stride", p.columns)
            .stride(p.list_stride, "list_stride", p.topk);
    if (p.requests > 1) check.stride(p.block_table_stride, "block_table_stride", p.max_pages);
    return check.status();
}

KernelParams kernel_params(const MlaTopkParams& p) {
    KernelParams k = {};
    k.rows.query_starts = p.query_starts;
    k.rows.seq_lens = p.seq_lens;
    k.rows.block_table = p.block_table;
    k.rows.block_table_stride = p.block_table_stride;
    k.rows.requests = p.requests;
    k.rows.first_token = p.first_token;
    k.rows.columns = p.columns;
    k.rows.max_pages = p.max_pages;
    k.rows.page_size = p.page_size;
    k.rows.page_shift = indexer::shift_of(p.page_size);
    k.rows.slots = int(std::min(p.pages * p.page_size, int64_t(INT32_MAX)));
    k.logits = p.logits;
    k.lists = p.lists;
    k.logits_stride = p.logits_stride;
    k.list_stride = p.list_stride;
    k.topk = p.topk;
    k.rows_ahead = p.after_logits;
    k.vectors = is_aligned(p.logits, 16) && (p.rows == 1 || p.logits_stride % 4 == 0);
    return k;
}

}  // namespace
}  // namespace mla::sm90::topk

using namespace mla;
using namespace mla::sm90::topk;

extern "C" MlaStatus mla_topk_sm90(const MlaTopkParams* params, void* stream) {
    if (!params) return refuse("params", 0, "a pointer");
    const MlaTopkParams& p = *params;
    MlaStatus s =
        Check().that(p.rows >= 0 && p.rows < 1 << 24, "rows", p.rows, "less than 2^24").status();
    if (s.code != MLA_OK) return s;
    DeviceFacts facts;
    s = remembered_sm90_facts(facts);
    if (s.code != MLA_OK) return s;
    if (p.rows == 0) return ok();
    s = check(p);
    if (s.code != MLA_OK) return s;
    ClusterLimits clusters;
    s = cuda_status("cudaFuncSetAttribute", ready(facts.device, clusters));
    if (s.code != MLA_OK) return s;
    const auto queue = static_cast<cudaStream_t>(stream);
    const int register_ctas = choose_register_resident(p.rows, p.columns, p.topk, clusters);
    if (register_ctas > 0)
        return cuda_status("cudaLaunchKernelEx", launch_register_resident(kernel_params(p), p.rows,
                                                                          register_ctas, queue));
    const int ctas = choose_ctas(p.rows, p.columns, facts.multiprocessors, clusters.max_ctas);
    const cudaError_t launched =
        ctas > 1 ? launch_clusters(kernel_params(p), p.rows, ctas, queue)
                 : launch_rows(kernel_params(p), p.rows, facts.multiprocessors, queue);
    return cuda_status("cudaLaunchKernelEx", launched);
}
