#include "launch.cuh"
#include "sm90/mla_sm90.h"

namespace mla::sm90::logits {
namespace {

MlaStatus check(const MlaIndexLogitsParams& p) {
    Check check;
    check.that(p.heads == 32 || p.heads == 64, "heads", p.heads, "32 or 64")
        .that(p.width == kWidth, "width", p.width, "128")
        .that(p.requests >= 1, "requests", p.requests, "at least 1")
        .that(p.first_token >= 0, "first_token", p.first_token, "0 and up")
        .that(p.columns >= 1, "columns", p.columns, "at least 1")
        .that(p.max_pages >= 1, "max_pages", p.max_pages, "at least 1")
        .that(p.page_size >= 1 && p.page_size <= 1 << 20, "page_size", p.page_size, "1..=1048576")
        .that(p.pages >= 1 && p.pages <= INT32_MAX, "pages", p.pages, "1..=2147483647")
        .pointer(p.queries, 16, "queries")
        .pointer(p.weights, 4, "weights")
        .pointer(p.cache, 16, "cache")
        .pointer(p.query_starts, 4, "query_starts")
        .pointer(p.seq_lens, 4, "seq_lens")
        .pointer(p.block_table, 4, "block_table")
        .pointer(p.logits, 4, "logits");
    if (p.rows > 1) check.stride(p.logits_stride, "logits_stride", p.columns);
    if (p.requests > 1) check.stride(p.block_table_stride, "block_table_stride", p.max_pages);
    if (p.pages > 1)
        check.that(p.page_stride % 16 == 0, "page_stride", p.page_stride, "a multiple of 16 bytes")
            .stride(p.page_stride, "page_stride", int64_t(p.page_size) * (kWidth + 4));
    return check.status();
}

KernelParams kernel_params(const MlaIndexLogitsParams& p) {
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
    k.weights = p.weights;
    k.cache = static_cast<const uint8_t*>(p.cache);
    k.logits = p.logits;
    k.page_stride = p.page_stride;
    k.logits_stride = p.logits_stride;
    k.count = p.rows;
    k.pages = int(p.pages);
    k.facts_ahead = p.after_queries;
    // The stride of a single page is never used, but has to be a valid one.
    if (p.pages == 1) k.page_stride = ceil_div(int64_t(p.page_size) * (kWidth + 4), 16) * 16;
    return k;
}

}  // namespace
}  // namespace mla::sm90::logits

using namespace mla;
using namespace mla::sm90::logits;

extern "C" MlaStatus mla_index_logits_sm90(const MlaIndexLogitsParams* params, void* stream) {
    if (!params) return refuse("params", 0, "a pointer");
    const MlaIndexLogitsParams& p = *params;
    MlaStatus s =
        Check().that(p.rows >= 0 && p.rows < 1 << 24, "rows", p.rows, "less than 2^24").status();
    if (s.code != MLA_OK) return s;
    DeviceFacts facts;
    s = sm90_facts(facts);
    if (s.code != MLA_OK) return s;
    if (p.rows == 0) return ok();
    s = check(p);
    if (s.code != MLA_OK) return s;
    return launch(kernel_params(p), p.queries, p.heads, facts.multiprocessors, stream);
}
