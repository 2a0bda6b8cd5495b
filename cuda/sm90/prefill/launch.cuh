// Launches one tile shape and dtype.
#pragma once

#include <cuda_runtime.h>

#include <tuple>

#include "../../common/status.cuh"
#include "../../include/mla.h"
#include "config.cuh"
#include "params.cuh"

namespace mla::sm90::prefill {

struct Launch {
    int ctas;
    cudaStream_t stream;
};

// Defined in launch_kernel.cuh, and instantiated once per tile shape and dtype in instantiations/.
template <typename Config>
cudaError_t launch(const Launch& l, const KernelParams& p, const Maps& maps);

// Loads the kernel without launching it.
template <typename Config>
cudaError_t load();

// Maximum shared memory of a CTA on sm_90.
constexpr int kMaxSharedBytes = 232448;

// Dynamic shared memory may begin anywhere, but panels begin at multiples of 1024 bytes.
template <typename Config>
constexpr int kSharedBytes = sizeof(Shared<Config>) + 1024;

// Names give the widths of keys without rotary embedding, of the rotary part, and of values. The more
// keys a KV tile has, the less often MMAs read the query rows from shared memory: 128 keys, if they
// fit. With 192 + 64 columns 96 keys do; MMAs and copies then take 124 of 128 bytes per cycle, and
// would take 139 with 64 keys. 256 columns of output leave registers for the scores of 64 keys.
template <typename T>
using Config_128_64_128 = Config<T, 128, 64, 128, 128>;
template <typename T>
using Config_192_64_256 = Config<T, 192, 64, 256, 64>;
template <typename T>
using Config_192_64_128 = Config<T, 192, 64, 128, 96>;
template <typename T>
using Config_64_64_128 = Config<T, 64, 64, 128, 128>;
template <typename T>
using Config_64_32_64 = Config<T, 64, 32, 64, 128>;

template <typename T>
using Configs = std::tuple<Config_128_64_128<T>, Config_192_64_256<T>, Config_192_64_128<T>,
                           Config_64_64_128<T>, Config_64_32_64<T>>;

// A call of dims (256, 0, 256) as one of (192, 64, 256), whose panels are the same: the last 64
// columns of a query or key stand for its rotary part. Other calls are returned as they are.
inline MlaPrefillParams with_rope(MlaPrefillParams p) {
    if (p.nope_dim != 256 || p.rope_dim != 0 || p.value_dim != 256) return p;
    p.nope_dim -= kPanel;
    p.rope_dim = kPanel;
    // Only an address: the pointer has not been checked yet.
    p.key_rope = reinterpret_cast<const void*>(address(p.key_nope) + 2 * p.nope_dim);
    p.key_rope_token_stride = p.key_nope_token_stride;
    p.key_rope_head_stride = p.key_nope_head_stride;
    return p;
}

// Calls `run` with the configuration for the dims of `p`, after with_rope(), and returns its status.
template <typename T, typename Run>
MlaStatus with_config(const MlaPrefillParams& p, const Run& run) {
    MlaStatus status = refuse("nope_dim", p.nope_dim,
                              "(nope_dim, rope_dim, value_dim) of (128,64,128), (192,64,256), "
                              "(192,64,128), (64,64,128), (256,0,256) or (64,32,64)");
    const auto consider = [&](auto config) {
        using C = decltype(config);
        if (p.nope_dim == C::kNope && p.rope_dim == C::kRope && p.value_dim == C::kValue)
            status = run(config);
    };
    std::apply([&](auto... configs) { (consider(configs), ...); }, Configs<T>{});
    return status;
}

}  // namespace mla::sm90::prefill
