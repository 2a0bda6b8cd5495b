// Launches one instantiation.
#pragma once

#include <algorithm>

#include "kernel.cuh"
#include "sm80/limits.cuh"

namespace mla::sm80::prefill {

// Bounds of a batch, from which the host derives the maximum number of tiles. The lengths of
// requests are on the device.
struct Shape {
    int query_tokens, key_tokens, requests, heads, max_query_len, max_key_len;
};

constexpr int kMaxCounters = MLA_PREFILL_COUNTER_BYTES / sizeof(SplitCounters);
constexpr int kMaxSplits = 128;
// Factor by which the end has to be earlier if CTAs do not all run at the same time. Some of them
// then run beside fewer others, and are faster than predicted.
constexpr float kWorthWaves = 0.75f;

// Number of CTAs that an SM runs at the same time; 0 if it cannot run any.
template <class C>
int ctas_of_sm(const Limits& l) {
    if (C::kSharedBytes > l.shared_of_cta) return 0;
    return std::min(l.shared_of_sm / (C::kSharedBytes + kReserved), C::kCtasPerSm);
}

// Number of CTAs that the device runs at the same time, at least one for each SM.
template <class C>
int slots_of(const Limits& l) {
    return l.multiprocessors * std::max(ctas_of_sm<C>(l), 1);
}

// Number of partial results that the workspace has room for. Each CTA that runs at the same time
// has two of them, one after another, or three if it is small.
template <class C>
int64_t room_of(const Limits& l) {
    return int64_t(slots_of<C>(l)) * C::kCtasPerSm;
}

// The workspace: counters first, then partial results.
template <class C>
size_t workspace_bytes(const Limits& l) {
    return MLA_PREFILL_COUNTER_BYTES +
           sizeof(float) * kPartialFloats<SplitLayout<C>> * room_of<C>(l);
}

// Predicted end of the last CTA if `splits` CTAs divide the keys of every query tile. The
// prediction takes all requests to have the maximum lengths. Its unit is the time that a CTA takes
// for a KV tile while others share its SM.
template <class C>
float predicted_end(const Limits& l, const Shape& s, int64_t tiles, int64_t splits) {
    const int64_t kv_tiles = (s.max_key_len + int64_t(C::kKeys) - 1) / C::kKeys;
    const int64_t ctas = tiles * splits, slots = slots_of<C>(l);
    const float of_tile = ctas > l.multiprocessors ? 1.f : 0.8f;
    const float of_cta = float((kv_tiles + splits - 1) / splits) * of_tile + 0.5f;
    const float end = float((ctas + slots - 1) / slots) * of_cta;
    if (splits == 1) return end;
    const float rows = float(std::min(s.max_query_len, C::kRows)) / C::kRows;
    // Only rows that exist are combined.
    const float of_split = s.max_query_len <= 64 ? 0.f : 0.06f;
    return end + 2.f + 3.f * rows * float(ctas) / float(slots) + of_split * float(splits);
}

// Number of CTAs that divide the keys of every query tile. If query tiles are few, it is the number
// with the earliest predicted end.
template <class C>
int splits_of(const Limits& l, const Shape& s, int64_t tiles) {
    if (tiles == 0 || tiles > kMaxCounters) return 1;
    // Tiles of few rows are bound by memory: more CTAs than run at the same time gain nothing.
    const bool full = 2 * int64_t(s.max_query_len) > C::kRows;
    const int64_t room = full ? room_of<C>(l) : slots_of<C>(l);
    const int64_t min_tiles = s.max_query_len <= 64 ? 1 : kMinKvTiles;
    const int64_t max_splits =
        std::min<int64_t>({room / tiles, s.max_key_len / (min_tiles * C::kKeys), kMaxSplits});
    int best = 1;
    float end = predicted_end<C>(l, s, tiles, 1);
    for (int splits = 2; splits <= max_splits; ++splits) {
        const float other = predicted_end<C>(l, s, tiles, splits);
        const bool waves = tiles * splits > slots_of<C>(l);
        if (other < (waves ? kWorthWaves * end : end)) best = splits, end = other;
    }
    return best;
}

// True if tiles are few, and requests differ so much in their number of keys that the CTAs of the
// longest one would end long after the others. Every CTA then reads the lengths of all requests on
// the device to find its tile. This has to take little time compared with the longest request.
template <class C>
bool is_uneven(const Limits& l, const Shape& s, int64_t tiles) {
    const int64_t every = int64_t(s.requests) * s.max_key_len;
    const int64_t slots = slots_of<C>(l), kv_tiles = s.max_key_len / C::kKeys;
    return 10 * int64_t(s.key_tokens) < 9 * every && tiles * s.key_tokens < 2 * every * slots &&
           tiles * s.requests < 20 * kv_tiles * slots;
}

// Number of heads whose tiles are done side by side. CTAs that run at the same time should read the
// same keys: L2 then holds these keys, which saves bandwidth and power. Heads are therefore done in
// groups. But the longest tiles come first in each group, and the last group has to have enough
// shorter ones for CTAs to end at about the same time. It needs more of them if causal tiles differ
// more. Only tiles of one request and head share keys. A group therefore has few pairs of request
// and head, so that four tiles of each pair run at the same time. If requests differ in length, all
// heads are one group.
template <class C>
int head_group_of(const Limits& l, const Shape& s, bool causal, int64_t tiles_of_head) {
    if (10 * int64_t(s.query_tokens) < 9 * int64_t(s.requests) * s.max_query_len) return s.heads;
    const float differ =
        causal ? std::min(float(s.max_query_len) / float(s.max_key_len), 1.f) : 0.f;
    const float tiles = float(slots_of<C>(l)) * (1.f + 3.f * differ);
    const int groups = std::max(int(float(tiles_of_head) * float(s.heads) / tiles), 1);
    const int heads = (s.heads + groups - 1) / groups;
    if (tiles_of_head <= s.requests) return heads;
    return std::max(std::min(heads, slots_of<C>(l) / (4 * s.requests)), 1);
}

// Loads a kernel into the current context and allows it its shared memory.
template <class C>
MlaStatus load(const Limits& l) {
    if (C::kSharedBytes > l.shared_of_cta)
        return unsupported("shared memory per block", l.shared_of_cta,
                           "as much as a tile of queries and two of keys take: 99 KB");
    return cuda_status("cudaFuncSetAttribute",
                       allow_shared<&prefill_kernel<C>>(l.device, C::kSharedBytes));
}

template <class C>
MlaStatus launch(const Limits& l, const Shape& s, KernelParams& p, cudaStream_t stream) {
    const MlaStatus loaded = load<C>(l);
    if (loaded.code != MLA_OK) return loaded;
    p.max_request_tiles = (s.max_query_len + C::kRows - 1) / C::kRows;
    const int64_t packed = (s.query_tokens + int64_t(s.requests) * (C::kRows - 1)) / C::kRows;
    const int64_t tiles = std::min(packed, int64_t(s.requests) * p.max_request_tiles);
    if (tiles * s.heads > INT32_MAX - 2 * kMaxCounters)
        return refuse("query_tokens", s.query_tokens, "less than 2^31 tiles of 64 rows and a head");
    p.tiles = int(tiles);
    p.slots = slots_of<C>(l);
    int64_t ctas;
    if (p.counters && is_uneven<C>(l, s, tiles * s.heads)) {
        p.splits = 0;
        p.head_group = s.heads;
        p.max_split_ctas = int(std::min<int64_t>(room_of<C>(l), 2 * kMaxCounters));
        ctas = tiles * s.heads + p.max_split_ctas;
    } else {
        p.splits = p.counters ? splits_of<C>(l, s, tiles * s.heads) : 1;
        p.head_group = p.splits == 1 ? head_group_of<C>(l, s, p.causal, tiles) : s.heads;
        ctas = tiles * s.heads * p.splits;
        // No CTA waits for one that is not running yet: the last one combines everything.
        if (ctas > p.slots)
            p.patience = 0;
        else
            p.patience += s.max_key_len / (int64_t(C::kKeys) * p.splits) * kCyclesOfKvTile;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = {unsigned(ctas), 1, 1};
    config.blockDim = {unsigned(C::kThreads), 1, 1};
    config.dynamicSmemBytes = C::kSharedBytes;
    config.stream = stream;
    return cuda_status("cudaLaunchKernelEx", cudaLaunchKernelEx(&config, &prefill_kernel<C>, p));
}

// The instantiations for one type and one number of columns of queries and of values.
template <typename T, int kQkDim, int kVDim>
struct Tiles {
    // With 32 rows, a warp uses each operand from shared memory in two MMAs. With 256 columns of
    // output, there are registers for 16 rows only; with 256 columns of queries, 128 rows of a CTA
    // would not fit the shared memory of every GPU.
    static constexpr int kWarpTiles = kQkDim == 256 ? 1 : 2;
    using Usual = Config<T, kQkDim, kVDim, kWarpTiles, 4, 64>;
    // The config for batches whose requests all have few rows.
    using Short = Config<T, kQkDim, kVDim, 1, 4, 64>;

    static MlaStatus load(const Limits& l) {
        MlaStatus status = prefill::load<Usual>(l);
        if (status.code == MLA_OK) status = prefill::load<Short>(l);
        return status;
    }
    static size_t workspace_bytes(const Limits& l) {
        return std::max(prefill::workspace_bytes<Usual>(l), prefill::workspace_bytes<Short>(l));
    }
    static MlaStatus launch(const Limits& l, const Shape& s, KernelParams& p, cudaStream_t stream) {
        if (s.max_query_len <= Short::kRows) return prefill::launch<Short>(l, s, p, stream);
        return prefill::launch<Usual>(l, s, p, stream);
    }
};

// The functions of an instantiation as pointers, whose types do not depend on the instantiation.
struct Variant {
    MlaStatus (*load)(const Limits&);
    size_t (*workspace_bytes)(const Limits&);
    MlaStatus (*launch)(const Limits&, const Shape&, KernelParams&, cudaStream_t);
};

template <typename T, int kQkDim, int kVDim>
Variant variant_of() {
    using T_ = Tiles<T, kQkDim, kVDim>;
    return {&T_::load, &T_::workspace_bytes, &T_::launch};
}

extern template Variant variant_of<__nv_bfloat16, 192, 128>();
extern template Variant variant_of<__nv_bfloat16, 256, 256>();
extern template Variant variant_of<__nv_bfloat16, 256, 128>();
extern template Variant variant_of<__nv_bfloat16, 128, 128>();
extern template Variant variant_of<__nv_bfloat16, 96, 64>();
extern template Variant variant_of<__half, 192, 128>();
extern template Variant variant_of<__half, 256, 256>();
extern template Variant variant_of<__half, 256, 128>();
extern template Variant variant_of<__half, 128, 128>();
extern template Variant variant_of<__half, 96, 64>();

}  // namespace mla::sm80::prefill
