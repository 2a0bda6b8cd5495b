// Launches one instantiation.
#pragma once

#include <algorithm>

#include "kernel.cuh"
#include "sm80/limits.cuh"

namespace mla::sm80::prefill {

// Requests' lengths are on the device: what the host knows is how many tiles there are at most.
struct Shape {
    int query_tokens, requests, heads, max_query_len, max_key_len;
};

constexpr int kMostCounters = MLA_PREFILL_COUNTER_BYTES / sizeof(SplitCounters);
// The fewest keys that are worth a CTA.
constexpr int kLeastKeys = 256;

// CTAs that an SM runs at the same time; 0 if it cannot run any.
template <class C>
int ctas_of_sm(const Limits& l) {
    if (C::kSharedBytes > l.shared_of_cta) return 0;
    return std::min(l.shared_of_sm / (C::kSharedBytes + kReserved), C::kResident);
}

// The same of the device.
template <class C>
int slots_of(const Limits& l) {
    return l.multiprocessors * std::max(ctas_of_sm<C>(l), 1);
}

// Counters first, then partial results.
template <class C>
size_t workspace_bytes(const Limits& l) {
    return MLA_PREFILL_COUNTER_BYTES +
           sizeof(float) * kPartialFloats<SplitLayout<C>> * slots_of<C>(l);
}

// CTAs that divide the keys of every tile: where tiles are few, as many as run at the same time.
template <class C>
int splits_of(const Limits& l, const Shape& s, int64_t tiles) {
    if (tiles > kMostCounters) return 1;
    const int64_t most = std::min<int64_t>(slots_of<C>(l) / tiles, s.max_key_len / kLeastKeys);
    return int(std::max<int64_t>(most, 1));
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
    const int64_t tiles = (s.query_tokens + int64_t(s.requests) * (C::kRows - 1)) / C::kRows;
    if (tiles * s.heads > INT32_MAX)
        return refuse("query_tokens", s.query_tokens, "less than 2^31 tiles of 64 rows and a head");
    p.tiles = int(tiles);
    p.splits = p.counters ? splits_of<C>(l, s, tiles * s.heads) : 1;
    // All heads' tiles of the same number side by side: shared out evenly, they matter more than
    // what the L2 cache might hold of fewer heads.
    p.head_group = s.heads;
    cudaLaunchConfig_t config = {};
    config.gridDim = {unsigned(tiles * s.heads * p.splits), 1, 1};
    config.blockDim = {unsigned(C::kThreads), 1, 1};
    config.dynamicSmemBytes = C::kSharedBytes;
    config.stream = stream;
    return cuda_status("cudaLaunchKernelEx", cudaLaunchKernelEx(&config, &prefill_kernel<C>, p));
}

// The instantiations for a type and the columns of queries and of values.
template <typename T, int kQkDim, int kVDim>
struct Tiles {
    // 32 rows per warp feed two products with each operand from shared memory; with 256 columns of
    // output there are registers for 16.
    static constexpr int kWarpTiles = kVDim == 256 ? 1 : 2;
    using Usual = Config<T, kQkDim, kVDim, kWarpTiles, 4, 64>;
    // For requests of few rows.
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

// The same as functions that do not depend on them.
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

#define MLA_PREFILL_DIMS(prefix, T)                    \
    prefix template Variant variant_of<T, 192, 128>(); \
    prefix template Variant variant_of<T, 256, 256>(); \
    prefix template Variant variant_of<T, 128, 128>(); \
    prefix template Variant variant_of<T, 96, 64>();

MLA_PREFILL_DIMS(extern, __nv_bfloat16)
MLA_PREFILL_DIMS(extern, __half)

}  // namespace mla::sm80::prefill
