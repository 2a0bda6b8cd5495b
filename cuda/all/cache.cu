// The C interface of cache writes and gathers. It checks every argument, and launches the right
// kernel.

#include <algorithm>
#include <cmath>

#include "../common/one_row.cuh"
#include "cache_gather.cuh"
#include "cache_write.cuh"
#include "helpers.cuh"

namespace mla {
namespace {

constexpr const char* kDtypes = "MLA_DTYPE_BF16 (0), MLA_DTYPE_F16 (1) or MLA_DTYPE_F32 (3)";

bool is_dtype(int dtype) {
    return dtype == MLA_DTYPE_BF16 || dtype == MLA_DTYPE_F16 || dtype == MLA_DTYPE_F32;
}

int64_t dtype_bytes(int dtype) { return dtype == MLA_DTYPE_F32 ? 4 : 2; }

// The latent's width must be a multiple of the first number. The second function returns true if
// the whole cache has one scale.
int64_t latent_multiple(int format) {
    return with_format(format, int64_t(1), [](auto f) { return Row<f.value>::kLatentMultiple; });
}
bool has_tensor_scale(int format) {
    return with_format(format, false, [](auto f) { return Row<f.value>::kTensorScale; });
}

bool splits(int format) {
    return with_format(format, true, [](auto f) { return Row<f.value>::kSplits; });
}

template <typename Params>
RowShape row_shape(const Params& p) {
    return mla::row_shape(p.cache_format, p.latent_dim, p.rope_dim);
}

// True if rotary keys lie elsewhere than behind their latents.
template <typename Params>
bool is_split(const Params& p) {
    return p.rope_dim > 0 && !is_one_row(p, row_shape(p).rope_offset);
}

// A tensor of rows of `bytes` bytes each: latents, rotary keys, or both.
struct CacheTensor {
    const void* pointer;
    int64_t page_stride, slot_stride, bytes;
    const char *name, *page_name, *slot_name;
};

void check_tensor(Check& check, const CacheTensor& t, int64_t alignment, int64_t pages,
                  int64_t page_size) {
    const char* accepted =
        alignment == 16 ? "a multiple of 16 bytes" : "a multiple of the widest element of a row";
    check.pointer(t.pointer, alignment, t.name)
        .stride(t.slot_stride, t.slot_name, t.bytes)
        .that(t.slot_stride % alignment == 0, t.slot_name, t.slot_stride, accepted)
        .that(t.page_stride % alignment == 0, t.page_name, t.page_stride, accepted);
    if (pages > 1)
        check.stride(t.page_stride, t.page_name, (page_size - 1) * t.slot_stride + t.bytes);
}

// Makes the checks that writes to a cache and gathers from it have in common.
template <typename Params>
void check_cache(Check& check, const Params& p) {
    const int format = p.cache_format;
    const float scale = p.cache_scale;
    check.that(is_cache_format(format), "cache_format", format, kCacheFormats)
        .that(p.latent_dim >= 1 && p.latent_dim <= 65536, "latent_dim", p.latent_dim, "1..=65536")
        .that(p.rope_dim >= 0 && p.rope_dim <= 65536, "rope_dim", p.rope_dim, "0..=65536")
        .that(p.latent_dim % latent_multiple(format) == 0, "latent_dim", p.latent_dim,
              "a multiple of 128 for MLA_CACHE_FP8_DS_MLA, and of 4 for MLA_CACHE_FP8_PER_TOKEN")
        .that(p.page_size >= 1, "page_size", p.page_size, "1 and up")
        .that(p.pages >= 0 && p.pages <= INT32_MAX / p.page_size, "pages", p.pages,
              "at most 2147483647 slots")
        .that(!has_tensor_scale(format) || (scale >= 0x1p-60f && scale <= 0x1p60f), "cache_scale",
              truncated(scale), "2^-60 to 2^60");
    if (check.failed() || p.pages == 0) return;
    const RowShape row = row_shape(p);
    const bool split = is_split(p);
    check.that(!split || splits(format), "cache_rope", address(p.cache_rope),
               "behind the latent and its scales, at the strides of the rows");
    check_tensor(
        check,
        {p.cache, p.cache_page_stride, p.cache_slot_stride, split ? row.rope_offset : row.bytes,
         "cache", "cache_page_stride", "cache_slot_stride"},
        row.element_alignment, p.pages, p.page_size);
    if (split)
        check_tensor(check,
                     {p.cache_rope, p.cache_rope_page_stride, p.cache_rope_slot_stride,
                      row.bytes - row.rope_offset, "cache_rope", "cache_rope_page_stride",
                      "cache_rope_slot_stride"},
                     row.element_alignment, p.pages, p.page_size);
}

template <typename Params>
bool is_wide_cache(const Params& p) {
    const RowShape row = row_shape(p);
    const int64_t a = row.octet_alignment;
    const bool rope = is_split(p)
                          ? is_aligned(p.cache_rope, a) && p.cache_rope_page_stride % a == 0 &&
                                p.cache_rope_slot_stride % a == 0
                          : row.rope_offset % a == 0;
    return p.latent_dim % kOctet == 0 && p.rope_dim % kOctet == 0 && is_aligned(p.cache, a) &&
           p.cache_page_stride % a == 0 && p.cache_slot_stride % a == 0 && rope;
}

bool is_wide(const void* pointer, int64_t bytes, std::initializer_list<int64_t> strides) {
    if (!is_aligned(pointer, 16)) return false;
    for (const int64_t stride : strides)
        if (stride * bytes % 16) return false;
    return true;
}

CacheWriteKernel write_kernel(int format, int dtype, bool wide, bool rotated, bool r1) {
    return with_format(format, CacheWriteKernel(nullptr), [&](auto f) {
        return CacheWrite<f.value>::kernel(dtype, wide, rotated, r1);
    });
}

CacheGatherKernel gather_kernel(int format, int dtype, bool wide, bool r1) {
    return with_format(format, CacheGatherKernel(nullptr),
                       [&](auto f) { return CacheGather<f.value>::kernel(dtype, wide, r1); });
}

bool is_r1(int64_t latent_dim, int64_t rope_dim) {
    return latent_dim == kR1Latent && rope_dim == kR1Rope;
}

// Bytes of the shared memory of a gather's CTA. Every kernel may have this amount without an
// attribute; the kernel's own variables are subtracted.
constexpr int64_t kStagedBytes = 47 * 1024;

// In double precision the remainder is exact to 2^-29 of its last place in f32.
Inverse inverse_of(float scale) {
    const double inverse = 1.0 / double(scale);
    float high = float(inverse);
    if (double(high) > inverse) high = std::nextafter(high, 0.f);
    float low = float(inverse - double(high));
    if (double(low) < inverse - double(high)) low = std::nextafter(low, 1.f);
    return {high, std::max(low, high * 0x1p-60f)};
}

// Strides of an axis of one element are never used.
int64_t used(int64_t stride, int64_t extent) { return extent > 1 ? stride : 0; }

}  // namespace

MlaStatus load_cache_kernels() {
    for (int format = 0; is_cache_format(format); ++format)
        for (const int dtype : {MLA_DTYPE_BF16, MLA_DTYPE_F16, MLA_DTYPE_F32})
            for (const bool wide : {false, true})
                for (const bool r1 : {false, true}) {
                    MlaStatus status =
                        load("cache write", write_kernel(format, dtype, wide, false, r1));
                    if (status.code == MLA_OK)
                        status = load("cache write", write_kernel(format, dtype, wide, true, r1));
                    if (status.code == MLA_OK)
                        status = load("cache gather", gather_kernel(format, dtype, wide, r1));
                    if (status.code != MLA_OK) return status;
                }
    return ok();
}

namespace {

// Checks the rotation of the rows. Returns true if each thread may read octets.
bool check_rotation(Check& check, const MlaCacheWriteParams& p) {
    check.pointer(p.positions, 8, "positions")
        .pointer(p.cos, 4, "cos")
        .pointer(p.sin, 4, "sin")
        .stride(p.table_stride, "table_stride")
        .that(p.positions_len >= 0, "positions_len", p.positions_len, "0 and up")
        .that(p.rope_dim % 2 == 0, "rope_dim", p.rope_dim,
              "an even number, where something is rotated")
        .that(p.rotary_style == MLA_ROTARY_INTERLEAVED || p.rotary_style == MLA_ROTARY_HALVES,
              "rotary_style", p.rotary_style,
              "MLA_ROTARY_INTERLEAVED (0) or MLA_ROTARY_HALVES (1)");
    return p.rope_dim % (2 * kOctet) == 0 && is_wide(p.cos, 4, {p.table_stride}) &&
           is_wide(p.sin, 4, {p.table_stride});
}

// Checks the queries to rotate. Returns true if each thread may access octets of them.
bool check_queries(Check& check, const MlaCacheWriteParams& p) {
    const int64_t bytes = dtype_bytes(p.dtype), token = used(p.query_token_stride, p.tokens),
                  head = used(p.query_head_stride, p.heads),
                  out_token = used(p.query_out_token_stride, p.tokens),
                  out_head = used(p.query_out_head_stride, p.heads);
    check
        .that(p.positions != nullptr, "positions", 0,
              "positions, since there are queries to rotate")
        .pointer(p.query_rope, bytes, "query_rope")
        .pointer(p.query_rope_out, bytes, "query_rope_out")
        .stride(p.query_token_stride, "query_token_stride")
        .stride(p.query_head_stride, "query_head_stride")
        .stride(p.query_out_token_stride, "query_out_token_stride")
        .stride(p.query_out_head_stride, "query_out_head_stride")
        .that(p.heads <= 65536, "heads", p.heads, "at most 65536")
        .that(p.query_rope != p.query_rope_out || (token == out_token && head == out_head),
              "query_rope_out", address(p.query_rope_out),
              "another tensor, or query_rope with the same strides");
    return is_wide(p.query_rope, bytes, {token, head}) &&
           is_wide(p.query_rope_out, bytes, {out_token, out_head});
}

}  // namespace

MlaStatus plan_write(const MlaCacheWriteParams& p, int threads, WriteLaunch& launch) {
    Check check;
    check.that(is_dtype(p.dtype), "dtype", p.dtype, kDtypes)
        .that(p.tokens >= 0, "tokens", p.tokens, "0 and up");
    check_cache(check, p);
    launch.blocks = 0;
    if (check.failed() || p.tokens == 0) return check.status();

    const int64_t bytes = dtype_bytes(p.dtype);
    check.pointer(p.latent, bytes, "latent")
        .pointer(p.slots, 8, "slots")
        .stride(p.latent_token_stride, "latent_token_stride");
    if (p.rope_dim)
        check.pointer(p.rope, bytes, "rope").stride(p.rope_token_stride, "rope_token_stride");
    bool wide = is_wide_cache(p) &&
                is_wide(p.latent, bytes, {used(p.latent_token_stride, p.tokens)}) &&
                (!p.rope_dim || is_wide(p.rope, bytes, {used(p.rope_token_stride, p.tokens)}));
    if (p.positions) wide = check_rotation(check, p) && wide;
    const bool queries = p.query_rope && p.heads > 0 && p.rope_dim > 0;
    if (queries) wide = check_queries(check, p) && wide;

    const int64_t row_blocks = ceil_div(p.tokens, threads / 32);
    const int64_t query_threads =
        queries ? int64_t(p.heads) * (p.rope_dim / 2 / (wide ? kOctet : 1)) : 1;
    check.that(!queries || p.tokens * query_threads <= UINT32_MAX - threads, "tokens", p.tokens,
               "fewer tokens times heads");
    if (check.failed()) return check.status();
    const Inverse inverse =
        has_tensor_scale(p.cache_format) ? inverse_of(p.cache_scale) : Inverse{};
    launch = {{uint32_t(row_blocks), uint32_t(query_threads), inverse},
              row_blocks + (queries ? ceil_div(p.tokens * query_threads, threads) : 0),
              wide,
              p.positions != nullptr,
              is_r1(p.latent_dim, p.rope_dim)};
    return ok();
}

}  // namespace mla

using namespace mla;

extern "C" MlaStatus mla_cache_write(const MlaCacheWriteParams* params, void* stream) {
    if (!params) return refuse("params", 0, "a pointer");
    const MlaCacheWriteParams p = with_rope(*params);
    WriteLaunch write;
    const MlaStatus status = plan_write(p, kWriteThreads, write);
    if (status.code != MLA_OK || write.blocks == 0) return status;
    const auto kernel = write_kernel(p.cache_format, p.dtype, write.wide, write.rotated, write.r1);
    return launch("cache write", kernel, dim3(uint32_t(write.blocks)), dim3(kWriteThreads), stream,
                  p, write.plan);
}

extern "C" MlaStatus mla_cache_gather(const MlaCacheGatherParams* params, void* stream) {
    if (!params) return refuse("params", 0, "a pointer");
    const MlaCacheGatherParams p = with_rope(*params);
    Check check;
    check.that(is_dtype(p.dtype), "dtype", p.dtype, kDtypes)
        .that(p.rows >= 0, "rows", p.rows, "0 and up");
    check_cache(check, p);
    if (check.failed() || p.rows == 0) return check.status();

    const int64_t bytes = dtype_bytes(p.dtype);
    check.that(p.segments >= 1, "segments", p.segments, "1 and up, since there are rows")
        .that(p.max_pages >= 0, "max_pages", p.max_pages, "0 and up")
        .pointer(p.token_starts, 4, "token_starts")
        .pointer(p.row_starts, 4, "row_starts")
        .stride(p.block_table_stride, "block_table_stride", p.segments > 1 ? p.max_pages : 0)
        .pointer(p.latent, bytes, "latent")
        .stride(p.latent_row_stride, "latent_row_stride", p.rows > 1 ? p.latent_dim : 0);
    if (p.max_pages) check.pointer(p.block_table, 4, "block_table");
    if (p.rope_dim)
        check.pointer(p.rope, bytes, "rope")
            .stride(p.rope_row_stride, "rope_row_stride", p.rows > 1 ? p.rope_dim : 0);
    if (check.failed()) return check.status();
    const RowShape row = row_shape(p);
    const int64_t row_bytes = row.bytes, latent_bytes = row.rope_offset;
    const bool split = is_split(p);
    // Bulk copies need rows of whole units of 16 bytes. If a row has two parts, each part has to be
    // whole.
    const bool wide =
        is_wide_cache(p) &&
        is_wide(p.cache, 1, {row_bytes, p.cache_page_stride, p.cache_slot_stride}) &&
        (!split || is_wide(p.cache_rope, 1,
                           {latent_bytes, p.cache_rope_page_stride, p.cache_rope_slot_stride})) &&
        row_bytes <= kStagedBytes &&
        is_wide(p.latent, bytes, {used(p.latent_row_stride, p.rows)}) &&
        (!p.rope_dim || is_wide(p.rope, bytes, {used(p.rope_row_stride, p.rows)}));
    const int rows = wide ? gather_rows(row_bytes) : kGatherRows;
    const GatherPlan plan = {rows, int(row_bytes), int(latent_bytes), split};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(uint32_t(ceil_div(p.rows, rows)));
    config.blockDim = dim3(kGatherThreads);
    config.dynamicSmemBytes = wide ? size_t(rows * row_bytes) : 0;
    config.stream = static_cast<cudaStream_t>(stream);
    const auto kernel =
        gather_kernel(p.cache_format, p.dtype, wide, is_r1(p.latent_dim, p.rope_dim));
    return cuda_status("cache gather", cudaLaunchKernelEx(&config, kernel, p, plan));
}
