// All cache formats. A new one adds its file, a line here in each list, and its name to the enum of
// mla.h; what else has to handle it does not compile before it does (CONTRIBUTING.md lists it).
#pragma once

#include <type_traits>
#include <utility>

#include "bf16.cuh"
#include "f16.cuh"
#include "f32.cuh"
#include "fp8.cuh"
#include "fp8_ds_mla.cuh"

namespace mla {

// For refusals.
constexpr const char* kCacheFormats = "a value of MlaCacheFormat (0..=4)";

// Calls f(std::integral_constant<MlaCacheFormat, ...>) for a format of the C interface, and returns
// what it returns; `other` if there is no such format. The switch has no default: a format that is
// missing here is an error of the compiler.
template <typename F, typename R>
R with_format(int32_t format, R other, F f) {
    switch (static_cast<MlaCacheFormat>(format)) {
        case MLA_CACHE_F32: return f(std::integral_constant<MlaCacheFormat, MLA_CACHE_F32>());
        case MLA_CACHE_F16: return f(std::integral_constant<MlaCacheFormat, MLA_CACHE_F16>());
        case MLA_CACHE_BF16: return f(std::integral_constant<MlaCacheFormat, MLA_CACHE_BF16>());
        case MLA_CACHE_FP8: return f(std::integral_constant<MlaCacheFormat, MLA_CACHE_FP8>());
        case MLA_CACHE_FP8_DS_MLA:
            return f(std::integral_constant<MlaCacheFormat, MLA_CACHE_FP8_DS_MLA>());
    }
    return other;
}

inline bool is_cache_format(int32_t format) {
    return with_format(format, false, [](auto) { return true; });
}

// Of a format that is one; that of f32 otherwise.
inline RowShape row_shape(int32_t format, int64_t latent_dim, int64_t rope_dim) {
    return with_format(format, Row<MLA_CACHE_F32>::shape(latent_dim, rope_dim),
                       [&](auto f) { return Row<f.value>::shape(latent_dim, rope_dim); });
}

}  // namespace mla
