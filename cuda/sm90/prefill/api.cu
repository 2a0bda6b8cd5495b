// The C interface of this kernel. It checks every argument, describes the operands to TMA, and
// launches the kernel.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../common/device.cuh"
#include "launch.cuh"
#include "sm90/mla_sm90.h"
#include "split_plan.cuh"

namespace mla::sm90::prefill {
namespace {

constexpr const char *kQueryBound = "max_query_len", *kKeyBound = "max_key_len";

// Bound on the keys of a request. It is at least 1, because no dimension of a tensor map may be
// empty.
int max_key_len(const MlaPrefillParams& p) { return p.max_key_len > 0 ? p.max_key_len : 1; }

MlaStatus check_shape(const MlaPrefillParams& p) {
    if (p.heads < 1 || p.heads > 65535) return refuse("heads", p.heads, "1..=65535");
    if (p.requests < 1) return refuse("requests", p.requests, "at least 1");
    if (p.query_tokens < 0) return refuse("query_tokens", p.query_tokens, "at least 0");
    if (p.key_tokens < 0) return refuse("key_tokens", p.key_tokens, "at least 0");
    // The length still fits an int when it is rounded up to whole query tiles.
    if (p.max_query_len < 0 || p.max_query_len > INT32_MAX - kQueries)
        return refuse("max_query_len", p.max_query_len, "0..=2147483519");
    if (p.max_key_len < 0) return refuse("max_key_len", p.max_key_len, "at least 0");
    return ok();
}

MlaStatus check_dtype(const MlaPrefillParams& p) {
    if (p.dtype != MLA_DTYPE_BF16 && p.dtype != MLA_DTYPE_F16)
        return refuse("dtype", p.dtype, "MLA_DTYPE_BF16 (0) or MLA_DTYPE_F16 (1)");
    return ok();
}

MlaStatus check_tensors(const MlaPrefillParams& p) {
    const struct {
        const void* pointer;
        const char* name;
        int64_t token_stride;
        const char* token_name;
        int64_t head_stride;
        const char* head_name;
        bool may_be_shared;
        // Bound on the rows of one request.
        int max_len;
        const char* bound;
    } tensors[] = {
        {p.query, "query", p.query_token_stride, "query_token_stride", p.query_head_stride,
         "query_head_stride", false, p.max_query_len, kQueryBound},
        {p.key_nope, "key_nope", p.key_nope_token_stride, "key_nope_token_stride",
         p.key_nope_head_stride, "key_nope_head_stride", false, max_key_len(p), kKeyBound},
        {p.key_rope, "key_rope", p.key_rope_token_stride, "key_rope_token_stride",
         p.key_rope_head_stride, "key_rope_head_stride", true, max_key_len(p), kKeyBound},
        {p.value, "value", p.value_token_stride, "value_token_stride", p.value_head_stride,
         "value_head_stride", false, max_key_len(p), kKeyBound},
        {p.out, "out", p.out_token_stride, "out_token_stride", p.out_head_stride, "out_head_stride",
         false, p.max_query_len, kQueryBound}};
    for (const auto& t : tensors) {
        if (!t.pointer) return refuse(t.name, 0, "a device pointer");
        if (!is_aligned(t.pointer, 16))
            return refuse(t.name, address(t.pointer), "a pointer aligned to 16 bytes");
        const struct {
            int64_t stride;
            const char* name;
            bool zero;
        } strides[] = {{t.token_stride, t.token_name, false},
                       {t.head_stride, t.head_name, t.may_be_shared}};
        for (const auto& s : strides) {
            // TMA's strides are multiples of 16 bytes below 2^40.
            if (s.stride % 8) return refuse(s.name, s.stride, "a multiple of 8 elements");
            if (s.stride < (s.zero ? 0 : 8) || s.stride >= int64_t(1) << 39)
                return refuse(s.name, s.stride, s.zero ? "0..=549755813887" : "8..=549755813887");
        }
        // The tensor map begins `max_len` rows before the tensor (`describe`).
        if (t.max_len > address(t.pointer) / 2 / t.token_stride)
            return refuse(t.bound, t.max_len,
                          "a bound whose rows take no more bytes than the tensor's address");
    }
    return ok();
}

MlaStatus check_lists(const MlaPrefillParams& p) {
    if (!p.cu_query_lens || !is_aligned(p.cu_query_lens, 4))
        return refuse("cu_query_lens", address(p.cu_query_lens),
                      "a device pointer aligned to 4 bytes");
    if (!p.cu_key_lens || !is_aligned(p.cu_key_lens, 4))
        return refuse("cu_key_lens", address(p.cu_key_lens), "a device pointer aligned to 4 bytes");
    if (!is_aligned(p.lse, 4))
        return refuse("lse", address(p.lse), "null, or a device pointer aligned to 4 bytes");
    if (p.lse && p.heads > 1 && p.lse_head_stride < p.query_tokens)
        return refuse("lse_head_stride", p.lse_head_stride, "at least query_tokens");
    if (p.lse && p.lse_head_stride >= int64_t(1) << 39)
        return refuse("lse_head_stride", p.lse_head_stride, "less than 2^39");
    return ok();
}

MlaStatus check(const MlaPrefillParams& p) {
    for (const auto part : {check_shape, check_dtype, check_tensors, check_lists}) {
        const MlaStatus s = part(p);
        if (s.code != MLA_OK) return s;
    }
    // Also refuses NaN.
    if (!(p.softmax_scale > 0.f && p.softmax_scale < INFINITY))
        return refuse("softmax_scale", truncated(p.softmax_scale), "a finite number above 0");
    if (!p.workspace || !is_aligned(p.workspace, 256))
        return refuse("workspace", address(p.workspace), "a device pointer aligned to 256 bytes");
    return ok();
}

// A tensor [tokens, heads, columns] for a map as in params.cuh; a box is one panel of `rows` rows.
struct Operand {
    const void* pointer;
    int64_t token_stride, head_stride;
    int columns, heads, tokens, max_len, rows;
};

MlaStatus describe(EncodeTiled encode, int dtype, const Operand& o, CUtensorMap& map) {
    const auto type = dtype == MLA_DTYPE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    // Not negative: check_tensors() refuses larger bounds.
    const int64_t base = address(o.pointer) - int64_t(o.max_len) * o.token_stride * 2;
    // If all heads share a rotary key, its stride is 0. TMA refuses this stride, even for one head.
    const cuuint64_t head_bytes = cuuint64_t(o.head_stride ? o.head_stride : 8) * 2,
                     token_bytes = cuuint64_t(o.token_stride) * 2;
    const cuuint64_t sizes[4] = {cuuint64_t(o.columns), cuuint64_t(o.heads), cuuint64_t(o.max_len),
                                 cuuint64_t(o.tokens) + 1};
    const cuuint64_t strides[3] = {head_bytes, token_bytes, token_bytes};
    const cuuint32_t box[4] = {kPanel, 1, cuuint32_t(o.rows), 1};
    const cuuint32_t steps[4] = {1, 1, 1, 1};
    const CUresult r =
        encode(&map, type, 4, reinterpret_cast<void*>(base), sizes, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    // Driver and runtime use the same codes for the errors that are possible here.
    return cuda_status("cuTensorMapEncodeTiled", cudaError_t(r));
}

const void* columns_from(const void* p, int column) {
    return static_cast<const uint16_t*>(p) + column;
}

// Numbers of requests and heads in a block. The tiles of a block follow one another
// (scheduler.cuh).
struct L2Swizzle {
    int requests, heads;
};

// A block has all requests, and a number of heads whose keys and values fill half of the L2 cache.
// Short requests and causal attention have rules of their own.
L2Swizzle l2_swizzle(const MlaPrefillParams& p, const DeviceFacts& facts) {
    const double head_bytes = 2.0 * p.key_tokens * (p.nope_dim + p.rope_dim + p.value_dim) + 1;
    // Number of query tiles of the longest request for each head, and number of requests of this
    // length that would have the batch's number of query rows.
    const double tiles = (p.max_query_len + kQueries - 1) / kQueries,
                 longest_requests = (p.query_tokens + 1.0) / p.max_query_len;
    // Bytes of the keys and values of all heads whose tiles run at the same time. Running tiles
    // that share keys together pays only if these bytes stay in the cache meanwhile.
    const double at_once = facts.multiprocessors / tiles * head_bytes / p.requests;
    const bool is_shared = tiles > 1 && !p.causal,
               is_short = tiles <= 4 && !(is_shared && at_once > 0.5 * facts.l2_bytes);
    double wanted = 0.5 * facts.l2_bytes / head_bytes;
    if (is_short) {
        // The last tile reads most of the keys from device memory, and the others find them in
        // L2. With few enough heads, all tiles run at the same time, and the load is even.
        wanted = facts.multiprocessors / tiles;
    } else if (p.causal && tiles > facts.multiprocessors / 4.0) {
        // The longest launches are limited by power, and reads of device memory draw power. A block
        // therefore has two heads, or more if all of their tiles run at the same time.
        wanted = fmax(2.0, facts.multiprocessors / tiles);
    } else if (p.causal) {
        // Number of heads with which eight tiles of one head run at the same time. Each tile begins
        // at other keys. If more tiles ran, the keys that they read would be too far apart for L2
        // to hold. A block has more than eight heads only if the keys of all of them take at most
        // 1.5 times L2.
        const double spread = facts.multiprocessors / 8.0 / longest_requests;
        wanted = fmax(wanted, fmin(spread, fmax(8.0, 1.5 * facts.l2_bytes / head_bytes)));
    }
    const int max_heads = int(fmin(fmax(wanted, 1.0), p.heads)),
              blocks = (p.heads + max_heads - 1) / max_heads;
    const int heads = (p.heads + blocks - 1) / blocks;
    if (!is_short) return {p.requests, heads};
    // Neighbouring heads lie side by side in memory, but requests lie far apart. A block therefore
    // has no more requests than keep all CTAs busy.
    const double request_tiles = tiles * longest_requests / p.requests * heads;
    return {int(fmin(fmax(round(facts.multiprocessors / request_tiles), 1.0), p.requests)), heads};
}

// The workspace of a launch: counters, then partial results, then lists of contaminated rows.
struct Workspace {
    int64_t slots, value;

    Workspace(const DeviceFacts& facts, int value_dim)
        : slots(int64_t(kSlotsPerSm) * facts.multiprocessors), value(value_dim) {}

    static constexpr int64_t kArrived = 256;
    static_assert(kArrived + 4 * kSlotsPerSm * 256 <= MLA_PREFILL_COUNTER_BYTES);
    int64_t sums() const { return slots * kQueries * 8; }
    int64_t outs() const { return slots * kQueries * value * 4; }
    int64_t contaminated() const {
        return slots / kSlotsPerSm * kConsumerWarps * kMaxContaminated * sizeof(ContaminatedRows);
    }
    int64_t bytes() const { return MLA_PREFILL_COUNTER_BYTES + sums() + outs() + contaminated(); }

    void assign(void* address, KernelParams& k) const {
        auto* bytes = static_cast<uint8_t*>(address);
        k.claimed = reinterpret_cast<int*>(bytes);
        k.left = reinterpret_cast<int*>(bytes + kArrived / 2);
        k.arrived = reinterpret_cast<int*>(bytes + kArrived);
        bytes += MLA_PREFILL_COUNTER_BYTES;
        k.partial_sum = reinterpret_cast<float4*>(bytes);
        k.partial_out = reinterpret_cast<float4*>(bytes + sums());
        k.slots = int(slots);
        k.contaminated = reinterpret_cast<ContaminatedRows*>(bytes + sums() + outs());
    }
};

// The kernel's parameters, except for the split plan and the number of CTAs.
KernelParams kernel_params(const MlaPrefillParams& p, const DeviceFacts& facts,
                           const Workspace& workspace) {
    KernelParams k = {};
    k.query = p.query;
    k.key = p.key_nope;
    k.key_rope = p.key_rope;
    k.value = p.value;
    k.query_token_stride = p.query_token_stride;
    k.query_head_stride = p.query_head_stride;
    k.key_token_stride = p.key_nope_token_stride;
    k.key_head_stride = p.key_nope_head_stride;
    k.key_rope_token_stride = p.key_rope_token_stride;
    k.key_rope_head_stride = p.key_rope_head_stride;
    k.value_token_stride = p.value_token_stride;
    k.value_head_stride = p.value_head_stride;
    k.out = p.out;
    k.lse = p.lse;
    k.cu_q = p.cu_query_lens;
    k.cu_k = p.cu_key_lens;
    workspace.assign(p.workspace, k);
    k.out_token_stride = p.out_token_stride;
    k.out_head_stride = p.out_head_stride;
    k.lse_head_stride = p.lse_head_stride;
    k.requests = p.requests;
    k.heads = p.heads;
    k.max_request_tiles = (p.max_query_len + kQueries - 1) / kQueries;
    const L2Swizzle swizzle = l2_swizzle(p, facts);
    k.swizzle_requests = swizzle.requests;
    k.swizzle_heads = swizzle.heads;
    k.max_query_len = p.max_query_len;
    k.max_key_len = max_key_len(p);
    k.causal = p.causal != 0;
    // The lanes of one warp verify this with a few loads while the first tile is loaded.
    k.uniform = host_says_uniform(p) && p.requests < 256;
    const int64_t tiles = int64_t(p.requests) * k.max_request_tiles * p.heads;
    k.single_wave = k.uniform && tiles <= facts.multiprocessors;
    // run() refuses a larger number of tiles.
    if (k.uniform && tiles <= INT32_MAX) {
        UniformTiles& by = k.uniform_tiles;
        by.count = int(tiles);
        by.request_block = {k.swizzle_requests * k.max_request_tiles * p.heads};
        const int requests[2] = {k.swizzle_requests, p.requests % k.swizzle_requests},
                  heads[2] = {k.swizzle_heads, p.heads % k.swizzle_heads};
        for (int last = 0; last < 2; last++) {
            if (requests[last] > 0) {
                by.head_block[last] = {requests[last] * k.max_request_tiles * k.swizzle_heads};
                by.requests[last] = {requests[last]};
            }
            if (heads[last] > 0) by.heads[last] = {heads[last]};
        }
    }
    k.scale_log2 = p.softmax_scale * 1.44269504088896340736f;
    return k;
}

// Makes the tensor maps of all operands.
template <typename Config>
MlaStatus describe_operands(const MlaPrefillParams& p, Maps& maps) {
    EncodeTiled encode;
    const MlaStatus found = encode_tiled(encode);
    if (found.code != MLA_OK) return found;
    const int query_len = p.max_query_len, key_len = max_key_len(p);
    const struct {
        Operand operand;
        CUtensorMap& map;
    } operands[] = {
        {{p.query, p.query_token_stride, p.query_head_stride, Config::kNope, p.heads,
          p.query_tokens, query_len, kRows},
         maps.query},
        {{columns_from(p.query, Config::kNope), p.query_token_stride, p.query_head_stride,
          Config::kRope, p.heads, p.query_tokens, query_len, kRows},
         maps.query_rope},
        {{p.key_nope, p.key_nope_token_stride, p.key_nope_head_stride, Config::kNope, p.heads,
          p.key_tokens, key_len, Config::kKeys},
         maps.key},
        {{p.key_rope, p.key_rope_token_stride, p.key_rope_head_stride, Config::kRope,
          p.key_rope_head_stride != 0 ? p.heads : 1, p.key_tokens, key_len, Config::kKeys},
         maps.key_rope},
        {{p.value, p.value_token_stride, p.value_head_stride, Config::kValue, p.heads, p.key_tokens,
          key_len, Config::kKeys},
         maps.value},
        {{p.out, p.out_token_stride, p.out_head_stride, Config::kValue, p.heads, p.query_tokens,
          query_len, kWarpRows},
         maps.out}};
    for (const auto& o : operands) {
        const MlaStatus s = describe(encode, p.dtype, o.operand, o.map);
        if (s.code != MLA_OK) return s;
    }
    return ok();
}

template <typename Config>
MlaStatus run(const MlaPrefillParams& p, const DeviceFacts& facts, cudaStream_t stream) {
    const Workspace workspace(facts, Config::kValue);
    if (p.workspace_bytes < workspace.bytes())
        return refuse("workspace_bytes", int64_t(p.workspace_bytes),
                      "at least what mla_prefill_sm90_workspace says");
    KernelParams k = kernel_params(p, facts, workspace);
    const bool splits_keys = may_split<Config::kKeys>(p, k, facts.multiprocessors);
    Maps maps;
    const MlaStatus s = describe_operands<Config>(p, maps);
    if (s.code != MLA_OK) return s;

    const int64_t tiles = (int64_t(p.query_tokens) / kQueries + p.requests) * p.heads;
    // The counter of claimed tiles rises to the number of tiles plus one for each CTA.
    if (tiles > INT32_MAX - facts.multiprocessors)
        return refuse("query_tokens", p.query_tokens,
                      "fewer than 2^31 tiles of 128 rows over all requests and heads");
    // The range of Divisor, with which the device finds the items of a request.
    if (k.alone && (int64_t(p.heads) * k.max_request_tiles > 1 << 20 ||
                    p.max_key_len > int64_t(Config::kKeys) << 20))
        return refuse("batch_invariant", p.batch_invariant,
                      "0, for requests of more than 2^20 query tiles over all heads or KV tiles");
    // Each item has at least one KV tile, so `items` is the maximum number of items. If items are
    // fewer than SMs, one CTA for each suffices.
    const int64_t items = tiles * ceil_div(k.max_key_len, Config::kKeys);
    k.ctas = int(items < facts.multiprocessors ? items : facts.multiprocessors);
    const Launch l{k.ctas, stream};
    cudaError_t e = cudaSuccess;
    for_each_launch<Config::kKeys>(k, [&](const KernelParams& own, int) {
        if (e != cudaSuccess) return;
        e = splits_keys ? launch<Config>(l, own, maps)
                        : launch<typename Config::Unsplit>(l, own, maps);
    });
    return cuda_status("launch of mla_prefill_sm90", e);
}

template <typename Config>
MlaStatus load_both() {
    const cudaError_t e = load<Config>();
    return cuda_status("load of mla_prefill_sm90",
                       e == cudaSuccess ? load<typename Config::Unsplit>() : e);
}

// Calls `run` with the configuration for the dims and the dtype of `p`.
template <typename Run>
MlaStatus with_config_of(const MlaPrefillParams& p, const Run& run) {
    return p.dtype == MLA_DTYPE_BF16 ? with_config<__nv_bfloat16>(p, run)
                                     : with_config<__half>(p, run);
}

}  // namespace
}  // namespace mla::sm90::prefill

extern "C" MlaStatus mla_prefill_sm90_workspace(const MlaPrefillParams* params, size_t* bytes) {
    using namespace mla;
    if (!params) return refuse("params", 0, "a pointer");
    if (!bytes) return refuse("bytes", 0, "a pointer");
    const int value = params->value_dim;
    if (value != 64 && value != 128 && value != 256)
        return refuse("value_dim", value, "64, 128 or 256");
    DeviceFacts facts;
    const MlaStatus s = sm90_facts(facts);
    if (s.code == MLA_OK) *bytes = size_t(sm90::prefill::Workspace(facts, value).bytes());
    return s;
}

extern "C" MlaStatus mla_prefill_sm90(const MlaPrefillParams* params, void* stream) {
    using namespace mla;
    using namespace mla::sm90::prefill;
    if (!params) return refuse("params", 0, "a pointer");
    const MlaPrefillParams p = with_rope(*params);
    MlaStatus s = check(p);
    if (s.code != MLA_OK) return s;
    DeviceFacts facts;
    s = sm90_facts(facts);
    if (s.code != MLA_OK) return s;
    if (p.query_tokens == 0 || p.max_query_len == 0) return ok();
    return with_config_of(p, [&](auto config) {
        return run<decltype(config)>(p, facts, static_cast<cudaStream_t>(stream));
    });
}

extern "C" MlaStatus mla_load_prefill_sm90(const MlaPrefillParams* params) {
    using namespace mla;
    using namespace mla::sm90::prefill;
    if (!params) return refuse("params", 0, "a pointer");
    const MlaStatus s = check_dtype(*params);
    if (s.code != MLA_OK) return s;
    return with_config_of(with_rope(*params),
                          [](auto config) { return load_both<decltype(config)>(); });
}
