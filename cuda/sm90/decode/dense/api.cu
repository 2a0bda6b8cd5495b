// The C interface of this kernel. It checks every argument, describes the cache to TMA, and
// launches the kernel.

#include "../../../common/device.cuh"
#include "../../../common/one_row.cuh"
#include "launch.cuh"
#include "sm90/mla_sm90.h"
#include "sm90/mla_sm90_division.h"

namespace mla::sm90::decode {
namespace {

// Ways in which this kernel reads a cache of a format: not at all, as values of the queries' type,
// as e4m3 with one scale, or as e4m3 with a scale for each token.
enum class Cache { refused, values, e4m3, token_scales };

Cache cache_of(const MlaDecodeParams& p) {
    // The switch has no default, so a new format is an error of the compiler here, too.
    switch (static_cast<MlaCacheFormat>(p.cache_format)) {
        case MLA_CACHE_BF16: return p.q_dtype == MLA_DTYPE_BF16 ? Cache::values : Cache::refused;
        case MLA_CACHE_F16: return p.q_dtype == MLA_DTYPE_F16 ? Cache::values : Cache::refused;
        case MLA_CACHE_FP8: return Cache::e4m3;
        case MLA_CACHE_FP8_PER_TOKEN: return Cache::token_scales;
        case MLA_CACHE_F32:
        case MLA_CACHE_FP8_DS_MLA: break;
    }
    return Cache::refused;
}

// True if the cache's latents are of e4m3. Its strides are then in bytes.
bool is_e4m3(const MlaDecodeParams& p) {
    return cache_of(p) == Cache::e4m3 || cache_of(p) == Cache::token_scales;
}

// Requests with room for at most this number of tokens are short. With more than 64 rows, holding
// queries in registers takes longer at the start of an item, but saves time in each of its KV
// tiles.
constexpr int64_t kShortTokens = 512;

// PlainConfig::kByRows
constexpr bool is_by_rows(int latent_dim, int group_ctas, int64_t max_tokens) {
    return latent_dim == 512 && (group_ctas > 2 || (group_ctas == 2 && max_tokens > kShortTokens));
}
static_assert(is_by_rows(512, 2, 513) && !is_by_rows(512, 2, 512) && !is_by_rows(256, 2, 513));
static_assert(is_by_rows(512, 3, 64) && !is_by_rows(512, 1, 8192));

// If requests have room for at most this number of tokens, a query tile takes most of its time
// outside its KV tiles. Groups of five and more CTAs then lose more than they save.
constexpr int64_t kVeryShortTokens = 256;

// Number of CTAs, of 64 rows each, that do a query tile of a request with more than 64 rows. The
// number is chosen that leaves the fewest CTAs of the request's last query tile without rows. The
// candidates are primes, since a multiple of a candidate leaves no fewer.
constexpr int group_ctas_of(int row_tiles, int64_t max_tokens) {
    int best = 2, fewest = row_tiles % 2;
    for (const int ctas : {3, 5, 7, 11, 13}) {
        if (ctas > 3 && max_tokens <= kVeryShortTokens) break;
        const int idle = (row_tiles + ctas - 1) / ctas * ctas - row_tiles;
        if (idle < fewest) {
            best = ctas;
            fewest = idle;
        }
    }
    return best;
}
// 128, 192, 256, 320, 448, 640 and 704 rows.
static_assert(group_ctas_of(2, 8192) == 2 && group_ctas_of(3, 64) == 3);
static_assert(group_ctas_of(4, 8192) == 2 && group_ctas_of(5, 8192) == 5);
static_assert(group_ctas_of(5, 256) == 2 && group_ctas_of(7, 257) == 7);
static_assert(group_ctas_of(10, 8192) == 2 && group_ctas_of(11, 8192) == 11);

// Chooses the rows per CTA, and the number of CTAs that do different rows of the same query tile.
Shape shape_of(const MlaDecodeParams& p) {
    const int rows = p.query_len * p.heads;
    Shape shape;
    shape.fp8 = is_e4m3(p);
    shape.by_token = cache_of(p) == Cache::token_scales;
    shape.rows = rows <= 8 && !shape.fp8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
    const int64_t max_tokens = int64_t(p.max_pages) * p.page_size;
    const int row_tiles = (rows + 63) / 64;
    shape.group_ctas = row_tiles == 1 ? 1 : group_ctas_of(row_tiles, max_tokens);
    shape.by_rows = is_by_rows(p.latent_dim, shape.group_ctas, max_tokens);
    return shape;
}

// Number of query tiles of a request that has the maximum number of query tokens.
int tiles_of_request(const MlaDecodeParams& p, const Shape& shape) {
    const int tile_rows = shape.rows * shape.group_ctas;
    return (p.query_len * p.heads + tile_rows - 1) / tile_rows;
}

// Number of cycles that a CTA waits for the other splits of its query tile. On a healthy GPU, no
// wait takes nearly that long.
constexpr int64_t kDefaultPatience = 100000;

// Cost of a query tile in addition to its KV tiles, as a number of KV tiles.
constexpr int kTileCost = 1;

Estimate estimate_of(const MlaDecodeParams& p, const Shape& shape, int groups) {
    Estimate g = {};
    g.tiles_of_request = tiles_of_request(p, shape);
    g.tiles = p.requests * g.tiles_of_request;
    g.groups_of_tile = groups / g.tiles;
    g.tiles_of_group = (g.tiles + groups - 1) / groups;
    g.inverse_tiles_of_request = 1.f / g.tiles_of_request;
    g.inverse_groups_of_tile = g.groups_of_tile > 0 ? 1.f / g.groups_of_tile : 0.f;
    g.inverse_groups = 1.f / groups;
    return g;
}

// An element as TMA sees it.
struct Element {
    CUtensorMapDataType type;
    cuuint64_t bytes;
};

Element query_element(const MlaDecodeParams& p) {
    return {p.q_dtype == MLA_DTYPE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                        : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            2};
}

Element cache_element(const MlaDecodeParams& p) {
    return is_e4m3(p) ? Element{CU_TENSOR_MAP_DATA_TYPE_UINT8, 1} : query_element(p);
}

// Bytes of a row of the cache.
int64_t row_bytes(const MlaDecodeParams& p) {
    return row_shape(p.cache_format, p.latent_dim, p.rope_dim).bytes;
}

// True if a group does several query tiles of a request, one after the other, and therefore reads
// the same KV tiles again. This is so if there are more query tiles than groups, and requests have
// several query tiles.
constexpr bool reads_again(int tiles_of_request, int groups_of_tile) {
    return tiles_of_request > 1 && groups_of_tile == 0;
}
static_assert(reads_again(2, 66 / 128) && !reads_again(2, 66 / 48) && !reads_again(1, 66 / 128));

// Maximum number of KV tiles of a batch whose cache is read as evict-first. It is 9/2 of L2: 270
// MiB on an H200 and 225 MiB on an H100. On both, a batch of 216 MiB gains and one of 288 MiB
// loses. It is 0 if KV tiles are read again, since evict-first lines are gone by then. It is also 0
// if queries and output take more bytes than the KV cache, since they push out the lines of L2
// anyway.
int evict_first_kv_tiles(const MlaDecodeParams& p, const Estimate& estimate,
                         const DeviceFacts& facts) {
    if (reads_again(estimate.tiles_of_request, estimate.groups_of_tile)) return 0;
    const int64_t token_bytes = row_bytes(p), query_bytes = (p.latent_dim + p.rope_dim) * 2,
                  out_bytes = p.latent_dim * 2;
    if (p.tokens * p.heads * (query_bytes + out_bytes) >
        p.requests * int64_t(p.max_pages) * p.page_size * token_bytes)
        return 0;
    return int(facts.l2_bytes / 2 * 9 / (kTileTokens * token_bytes));
}

template <int latent>
size_t partial_bytes(int rows) {
    switch (rows) {
        case 8: return PartialResult<8, latent>::kBytes;
        case 16: return PartialResult<16, latent>::kBytes;
        case 32: return PartialResult<32, latent>::kBytes;
        default: return PartialResult<64, latent>::kBytes;
    }
}

static_assert(kCounters * sizeof(SplitCounters) <= MLA_DECODE_COUNTER_BYTES,
              "mla_sm90.h states the length of the counters");

// Each CTA group has at most two unfinished query tiles.
size_t workspace_bytes(int latent_dim, int rows, int multiprocessors) {
    const size_t partial = latent_dim == 512 ? partial_bytes<512>(rows) : partial_bytes<256>(rows);
    return MLA_DECODE_COUNTER_BYTES + size_t(2) * multiprocessors * partial;
}

MlaStatus check_shape(const MlaDecodeParams& p) {
    if (p.heads < 1 || p.heads > 128) return refuse("heads", p.heads, "1..=128");
    if (p.query_len < 1 || p.query_len > 16) return refuse("query_len", p.query_len, "1..=16");
    if (p.requests < 1 || p.requests > kMaxRequests)
        return refuse("requests", p.requests, "1..=1024");
    if (p.latent_dim != 512 && p.latent_dim != 256)
        return refuse("latent_dim", p.latent_dim, "512 or 256");
    if (p.rope_dim != 64 && p.rope_dim != (p.latent_dim == 512 ? 0 : 32))
        return refuse("rope_dim", p.rope_dim, p.latent_dim == 512 ? "64 or 0" : "64 or 32");
    if (p.q_dtype != MLA_DTYPE_BF16 && p.q_dtype != MLA_DTYPE_F16)
        return refuse("q_dtype", p.q_dtype, "MLA_DTYPE_BF16 (0) or MLA_DTYPE_F16 (1)");
    if (cache_of(p) == Cache::refused)
        return refuse("cache_format", p.cache_format,
                      "MLA_CACHE_BF16 (2) or MLA_CACHE_F16 (1) as q_dtype is, MLA_CACHE_FP8 (3) or "
                      "MLA_CACHE_FP8_PER_TOKEN (5)");
    if (is_e4m3(p) && (p.latent_dim != 512 || p.rope_dim != 64))
        return refuse("cache_format", p.cache_format,
                      "the format of q_dtype, since rows are not of 512 and 64 values");
    if (p.batch_invariant) return refuse("batch_invariant", p.batch_invariant, "0");
    return ok();
}

// The scheduler counts the KV tiles of all query tiles, and multiplies those of a request by the
// number of CTA groups. Both results have to fit 31 bits, whatever the lengths on the device are.
MlaStatus check_capacity(const MlaDecodeParams& p, const Shape& shape) {
    constexpr int64_t max_tokens = int64_t(1) << 29;
    static_assert(max_tokens / kTileTokens * kCounters <= INT32_MAX);
    const int64_t tokens = int64_t(p.max_pages) * p.page_size,
                  kv_tiles = (tokens + kTileTokens - 1) / kTileTokens;
    if (tokens > max_tokens)
        return refuse("max_pages", p.max_pages,
                      "at most 2^29 tokens per request (max_pages * page_size)");
    if (int64_t(p.requests) * tiles_of_request(p, shape) * (kv_tiles + kTileCost) > INT32_MAX)
        return refuse(
            "max_pages", p.max_pages,
            "less than 2^31 KV tiles of 64 tokens over all requests and tiles of their query rows");
    return ok();
}

MlaStatus check_pages(const MlaDecodeParams& p) {
    if (p.tokens < 0 || p.tokens > int64_t(p.requests) * p.query_len)
        return refuse("tokens", p.tokens, "at most requests * query_len");
    if (!p.cu_q_lens && p.tokens != p.requests * p.query_len)
        return refuse("tokens", p.tokens, "requests * query_len, since cu_q_lens is null");
    if (p.page_size < 16 || p.page_size % 16)
        return refuse("page_size", p.page_size, "a positive multiple of 16");
    if (p.pages < 1 || p.pages > INT32_MAX) return refuse("pages", p.pages, "1..=2147483647");
    if (p.max_pages < 1) return refuse("max_pages", p.max_pages, "at least 1");
    const MlaStatus capacity = check_capacity(p, shape_of(p));
    if (capacity.code != MLA_OK) return capacity;
    if (p.block_table_stride < p.max_pages && p.requests > 1)
        return refuse("block_table_stride", p.block_table_stride, "at least max_pages");
    return ok();
}

// TMA's strides have 40 bits, and products with the other strides have to fit 64 bits.
constexpr int64_t kStrideLimit = int64_t(1) << 39;
constexpr const char* kBelowLimit = "less than 2^39";

MlaStatus check_tensors(const MlaDecodeParams& p) {
    const int64_t element = cache_element(p).bytes, cache_quantum = 16 / element;
    const bool one_row = is_one_row(p, p.latent_dim * element);
    const int64_t row = one_row ? row_bytes(p) / element : p.latent_dim;
    const struct {
        const void* pointer;
        const char* name;
        bool used = true;
    } rows[] = {{p.q_latent, "q_latent"},
                {p.q_rope, "q_rope", p.rope_dim > 0},
                {p.cache, "cache"},
                {p.cache_rope, "cache_rope"},
                {p.out, "out"}};
    for (const auto& r : rows) {
        if (!r.used) continue;
        if (!r.pointer) return refuse(r.name, 0, "a device pointer");
        if (!is_aligned(r.pointer, 16))
            return refuse(r.name, address(r.pointer), "a pointer aligned to 16 bytes");
    }
    const struct {
        int64_t stride;
        const char* name;
        int64_t min, quantum = 8;
    } strides[] = {{p.q_latent_token_stride, "q_latent_token_stride", 0},
                   {p.q_latent_head_stride, "q_latent_head_stride", 0},
                   {p.q_rope_token_stride, "q_rope_token_stride", 0},
                   {p.q_rope_head_stride, "q_rope_head_stride", 0},
                   {p.out_token_stride, "out_token_stride", 0},
                   {p.out_head_stride, "out_head_stride", 0},
                   {p.cache_slot_stride, "cache_slot_stride", row, cache_quantum},
                   {p.cache_page_stride, "cache_page_stride", row, cache_quantum},
                   {p.cache_rope_slot_stride, "cache_rope_slot_stride", p.rope_dim, cache_quantum},
                   {p.cache_rope_page_stride, "cache_rope_page_stride", p.rope_dim, cache_quantum}};
    for (const auto& s : strides) {
        if (s.stride % s.quantum)
            return refuse(s.name, s.stride, "a multiple of 16 bytes, in elements");
        if (s.stride < s.min)
            return refuse(s.name, s.stride, s.min == 0 ? "0 or more" : "at least the row's values");
        if (s.stride >= kStrideLimit) return refuse(s.name, s.stride, kBelowLimit);
    }
    if (cache_of(p) == Cache::token_scales && !one_row)
        return refuse("cache_rope", address(p.cache_rope),
                      "behind the latent, at the strides of the rows");
    return ok();
}

MlaStatus check_lists(const MlaDecodeParams& p) {
    if (p.block_table_stride >= kStrideLimit)
        return refuse("block_table_stride", p.block_table_stride, kBelowLimit);
    if (p.lse && p.lse_head_stride >= kStrideLimit)
        return refuse("lse_head_stride", p.lse_head_stride, kBelowLimit);
    if (!p.block_table || !is_aligned(p.block_table, 4))
        return refuse("block_table", address(p.block_table), "a device pointer aligned to 4 bytes");
    if (!p.kv_lens || !is_aligned(p.kv_lens, 4))
        return refuse("kv_lens", address(p.kv_lens), "a device pointer aligned to 4 bytes");
    if (!is_aligned(p.cu_q_lens, 4))
        return refuse("cu_q_lens", address(p.cu_q_lens),
                      "null, or a device pointer aligned to 4 bytes");
    if (!is_aligned(p.lse, 4))
        return refuse("lse", address(p.lse), "null, or a device pointer aligned to 4 bytes");
    if (p.lse && p.lse_head_stride < p.tokens && p.heads > 1)
        return refuse("lse_head_stride", p.lse_head_stride, "at least tokens");
    return ok();
}

// Makes all checks that need no knowledge of the device.
MlaStatus check(const MlaDecodeParams& p) {
    for (const auto part : {check_shape, check_pages, check_tensors, check_lists}) {
        const MlaStatus s = part(p);
        if (s.code != MLA_OK) return s;
    }
    if (cache_of(p) == Cache::e4m3 && !(p.cache_scale >= 0x1p-60f && p.cache_scale <= 0x1p60f))
        return refuse("cache_scale", truncated(p.cache_scale), "2^-60 to 2^60");
    // Also refuses NaN.
    if (!(p.softmax_scale > 0.f && p.softmax_scale < INFINITY))
        return refuse("softmax_scale", truncated(p.softmax_scale), "a finite number above 0");
    if (!p.workspace || !is_aligned(p.workspace, 256))
        return refuse("workspace", address(p.workspace), "a device pointer aligned to 256 bytes");
    return ok();
}

MlaStatus describe(CUtensorMap& map, Element element, int rank, const void* base,
                   const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box) {
    EncodeTiled encode;
    const MlaStatus s = encode_tiled(encode);
    if (s.code != MLA_OK) return s;
    // Rows of a tile have 128 bytes, or 64, or the 16 that hold a scale.
    const cuuint64_t bytes = box[0] * element.bytes;
    const CUtensorMapSwizzle swizzle = bytes == 16   ? CU_TENSOR_MAP_SWIZZLE_NONE
                                       : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                     : CU_TENSOR_MAP_SWIZZLE_128B;
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    const CUresult r =
        encode(&map, element.type, rank, const_cast<void*>(base), sizes, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS)
        return {MLA_CUDA_ERROR, int32_t(r), "cuTensorMapEncodeTiled", int64_t(r), "success"};
    return ok();
}

// Rows of `width` values of a cache, of which up to `box_width` are copied together. Strides are in
// bytes.
struct CacheRows {
    Element element;
    const void* base;
    int width, box_width;
    int64_t slot_stride, page_stride;
};

MlaStatus describe_cache(const MlaDecodeParams& p, const CacheRows& rows, int box_tokens,
                         CUtensorMap& map) {
    const cuuint64_t sizes[3] = {cuuint64_t(rows.width), cuuint64_t(p.page_size),
                                 cuuint64_t(p.pages)};
    const cuuint64_t strides[2] = {cuuint64_t(rows.slot_stride), cuuint64_t(rows.page_stride)};
    const cuuint32_t box[3] = {cuuint32_t(rows.box_width), cuuint32_t(box_tokens), 1};
    return describe(map, rows.element, 3, rows.base, sizes, strides, box);
}

// Describes the latent values alone, as pairs of 64 values. `pairs` pairs are copied together.
MlaStatus describe_cache_pairs(const MlaDecodeParams& p, int box_tokens, int pairs,
                               CUtensorMap& map) {
    const cuuint64_t sizes[5] = {64, cuuint64_t(p.page_size), 2, cuuint64_t(p.latent_dim) / 128,
                                 cuuint64_t(p.pages)};
    const cuuint64_t strides[4] = {cuuint64_t(p.cache_slot_stride) * 2, 128, 256,
                                   cuuint64_t(p.cache_page_stride) * 2};
    const cuuint32_t box[5] = {64, cuuint32_t(box_tokens), 2, cuuint32_t(pairs), 1};
    return describe(map, cache_element(p), 5, p.cache, sizes, strides, box);
}

// Describes the latent values of an e4m3 cache, as groups of 128.
MlaStatus describe_cache_groups(const MlaDecodeParams& p, int box_tokens, CUtensorMap& map) {
    const cuuint64_t sizes[4] = {128, cuuint64_t(p.page_size), 4, cuuint64_t(p.pages)};
    const cuuint64_t strides[3] = {cuuint64_t(p.cache_slot_stride), 128,
                                   cuuint64_t(p.cache_page_stride)};
    const cuuint32_t box[4] = {128, cuuint32_t(box_tokens), box_tokens == kTileTokens ? 4u : 1u, 1};
    return describe(map, cache_element(p), 4, p.cache, sizes, strides, box);
}

// Describes queries as tiles of 64 values, in `pairs` pairs of `of_pair` tiles. `copied` tiles of
// each pair are copied together. A tile may have only `width` values.
MlaStatus describe_query(const MlaDecodeParams& p, int rows, const void* base, int width,
                         int64_t row_stride, int pairs, int of_pair, int copied, CUtensorMap& map) {
    const cuuint64_t sizes[4] = {cuuint64_t(width), cuuint64_t(p.tokens) * p.heads,
                                 cuuint64_t(of_pair), cuuint64_t(pairs)};
    const cuuint64_t strides[3] = {cuuint64_t(row_stride) * 2, 128, 256};
    const cuuint32_t box[4] = {64, cuuint32_t(rows), cuuint32_t(copied), cuuint32_t(pairs)};
    return describe(map, query_element(p), 4, base, sizes, strides, box);
}

// True if query rows are evenly spaced: row token * heads + head lies at this multiple of
// head_stride.
bool even_rows(const MlaDecodeParams& p, int64_t token_stride, int64_t head_stride, int width) {
    return head_stride >= width && head_stride < int64_t(1) << 39 &&
           (p.tokens == 1 || token_stride == p.heads * head_stride);
}

// The kernel's parameters.
KernelParams kernel_params(const MlaDecodeParams& p, const Shape& shape, const DeviceFacts& facts) {
    KernelParams k = {};
    k.q_latent = p.q_latent;
    k.q_rope = p.q_rope;
    k.out = p.out;
    k.lse = p.lse;
    k.block_table = p.block_table;
    k.kv_lens = p.kv_lens;
    k.cu_q_lens = p.cu_q_lens;
    k.counters = static_cast<SplitCounters*>(p.workspace);
    k.partials = static_cast<char*>(p.workspace) + MLA_DECODE_COUNTER_BYTES;
    k.q_latent_token_stride = p.q_latent_token_stride;
    k.q_latent_head_stride = p.q_latent_head_stride;
    k.q_rope_token_stride = p.q_rope_token_stride;
    k.q_rope_head_stride = p.q_rope_head_stride;
    k.out_token_stride = p.out_token_stride;
    k.out_head_stride = p.out_head_stride;
    k.lse_head_stride = p.lse_head_stride;
    k.block_table_stride = p.block_table_stride;
    k.block_table_entries = (p.requests - 1) * p.block_table_stride + p.max_pages;
    k.requests = p.requests;
    k.heads = p.heads;
    k.inverse_heads = 1.f / p.heads;
    k.query_len = p.query_len;
    k.page_size = p.page_size;
    k.page_shift = -1;
    for (int shift = 4; shift < 31; ++shift)
        if (p.page_size == 1 << shift) k.page_shift = shift;
    k.run = p.page_size % kTileTokens == 0 ? kTileTokens : 16;
    k.causal = p.causal;
    k.tile_cost = kTileCost;
    k.patience = p.split_patience == 0 ? kDefaultPatience : p.split_patience;
    k.estimate = estimate_of(p, shape, groups_of(facts.multiprocessors, shape.group_ctas));
    const float cache_scale = cache_of(p) == Cache::e4m3 ? p.cache_scale : 1.f;
    k.scale_log2 = p.softmax_scale * cache_scale * 1.44269504088896340736f;
    k.out_scale = cache_scale;
    k.evict_first_kv_tiles = evict_first_kv_tiles(p, k.estimate, facts);

    k.even_query =
        even_rows(p, p.q_latent_token_stride, p.q_latent_head_stride, p.latent_dim) &&
        (p.rope_dim == 0 || even_rows(p, p.q_rope_token_stride, p.q_rope_head_stride, p.rope_dim));
    return k;
}

// Describes the cache to TMA, and also the queries if their rows are evenly spaced. If the cache is
// e4m3, queries are always copied row by row.
MlaStatus describe_tensors(const MlaDecodeParams& p, const Shape& shape, const KernelParams& k,
                           TensorMaps& maps) {
    const Element element = cache_element(p);
    const int64_t bytes = element.bytes, slot = p.cache_slot_stride * bytes,
                  page = p.cache_page_stride * bytes;
    CacheRows rope = {element,
                      p.cache_rope,
                      p.rope_dim,
                      64,
                      p.cache_rope_slot_stride * bytes,
                      p.cache_rope_page_stride * bytes};
    CacheRows first = {element, p.cache, p.latent_dim, 64, slot, page};
    if (shape.by_token) {
        using Row = Row<MLA_CACHE_FP8_PER_TOKEN>;
        rope.element = {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2};
        const char* scales =
            static_cast<const char*>(p.cache) + Row::scale_offset(p.latent_dim, p.rope_dim);
        first = {{CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4}, scales, 4, 4, slot, page};
    }
    MlaStatus s = p.rope_dim > 0 ? describe_cache(p, rope, k.run, maps.cache_rope) : ok();
    if (s.code == MLA_OK && (!shape.fp8 || shape.by_token))
        s = describe_cache(p, first, k.run, maps.cache);
    if (s.code != MLA_OK) return s;
    s = shape.fp8 ? describe_cache_groups(p, k.run, maps.cache_pairs)
                  : describe_cache_pairs(p, k.run, shape.by_rows ? 2 : 1, maps.cache_pairs);
    if (s.code != MLA_OK || !k.even_query || shape.fp8) return s;
    s = describe_query(p, shape.rows, p.q_latent, 64, p.q_latent_head_stride, p.latent_dim / 128, 2,
                       shape.by_rows ? 1 : 2, maps.q_latent);
    if (s.code != MLA_OK || p.rope_dim == 0) return s;
    return describe_query(p, shape.rows, p.q_rope, p.rope_dim, p.q_rope_head_stride, 1, 1, 1,
                          maps.q_rope);
}

template <typename T>
cudaError_t launch_dtype(const MlaDecodeParams& p, const Launch& l, const KernelParams& k,
                         const TensorMaps& maps) {
    if (l.shape.by_token) return launch_token_scales<T>(l, k, maps);
    if (p.latent_dim == 512)
        return p.rope_dim > 0 ? launch_rows<T, RowDims<512, 64>>(l, k, maps)
                              : launch_rows<T, RowDims<512, 0>>(l, k, maps);
    return p.rope_dim == 64 ? launch_rows<T, RowDims<256, 64>>(l, k, maps)
                            : launch_rows<T, RowDims<256, 32>>(l, k, maps);
}

}  // namespace
}  // namespace mla::sm90::decode

using namespace mla;
using namespace mla::sm90::decode;

extern "C" MlaStatus mla_decode_sm90_workspace(const MlaDecodeParams* params, size_t* bytes) {
    if (!params) return refuse("params", 0, "a pointer");
    if (!bytes) return refuse("bytes", 0, "a pointer");
    MlaStatus s = check_shape(*params);
    if (s.code != MLA_OK) return s;
    const Shape shape = shape_of(*params);
    if (params->max_pages > 0) s = check_capacity(*params, shape);
    if (s.code != MLA_OK) return s;
    DeviceFacts facts;
    s = remembered_sm90_facts(facts);
    if (s.code != MLA_OK) return s;
    *bytes = workspace_bytes(params->latent_dim, shape.rows, facts.multiprocessors);
    return ok();
}

extern "C" MlaStatus mla_decode_sm90(const MlaDecodeParams* params, void* stream) {
    if (!params) return refuse("params", 0, "a pointer");
    MlaDecodeParams p = *params;
    if (p.rope_dim == 0) p.cache_rope = nullptr;
    p = with_rope(p);
    MlaStatus s = check(p);
    if (s.code != MLA_OK) return s;
    DeviceFacts facts;
    s = remembered_sm90_facts(facts);
    if (s.code != MLA_OK) return s;
    const Shape shape = shape_of(p);
    if (p.workspace_bytes < workspace_bytes(p.latent_dim, shape.rows, facts.multiprocessors))
        return refuse("workspace_bytes", int64_t(p.workspace_bytes),
                      "at least what mla_decode_sm90_workspace says");
    if (p.tokens == 0) return ok();

    const KernelParams k = kernel_params(p, shape, facts);
    TensorMaps maps = {};
    s = describe_tensors(p, shape, k, maps);
    if (s.code != MLA_OK) return s;
    const Launch l{shape, facts.multiprocessors, facts.device, static_cast<cudaStream_t>(stream)};
    const cudaError_t e = p.q_dtype == MLA_DTYPE_BF16 ? launch_dtype<__nv_bfloat16>(p, l, k, maps)
                                                      : launch_dtype<__half>(p, l, k, maps);
    if (e != cudaSuccess) return cuda_status("cudaLaunchKernelEx", e);
    return ok();
}

extern "C" MlaStatus mla_decode_sm90_work_items(const MlaDecodeParams* params, int32_t groups,
                                                int32_t group, MlaDecodeWorkItem* items,
                                                int32_t room, int32_t* count) {
    if (!params) return refuse("params", 0, "a pointer");
    const MlaDecodeParams& p = *params;
    const MlaStatus s = check_shape(p);
    if (s.code != MLA_OK) return s;
    if (!p.kv_lens) return refuse("kv_lens", 0, "a pointer");
    if (groups < 1 || groups > kCounters) return refuse("groups", groups, "1..=160");
    if (group < 0 || group >= groups) return refuse("group", group, "less than groups");
    if (room < 0) return refuse("room", room, "0 or more");
    if (!items && room > 0) return refuse("items", 0, "a pointer");
    if (!count) return refuse("count", 0, "a pointer");

    const Shape shape = shape_of(p);
    KernelParams k = {};
    k.cu_q_lens = p.cu_q_lens;
    k.requests = p.requests;
    k.heads = p.heads;
    k.query_len = p.query_len;
    k.tile_cost = kTileCost;
    int lens[kMaxRequests];
    for (int i = 0; i < p.requests; ++i) {
        if (p.kv_lens[i] < 0) return refuse("kv_lens", p.kv_lens[i], "0 or more");
        lens[i] = p.kv_lens[i];
    }
    k.estimate = estimate_of(p, shape, groups);
    const int rows = shape.rows * shape.group_ctas;
    TileScheduler scheduler(k, lens, 1, rows, group, groups);
    scheduler.plan();
    *count = 0;
    for (WorkItem item; (item = scheduler.next()).is_valid(); ++*count)
        if (*count < room)
            items[*count] = {item.request,     item.first_row, rows,        item.kv_tile_begin,
                             item.kv_tile_end, item.split,     item.splits, item.first_group,
                             item.combiners,   item.last};
    return ok();
}
