// All cache formats. A new format has a file, an include and a line of MLA_CACHE_FORMATS here, and
// a name in the enum of mla.h. CONTRIBUTING.md lists the other code that has to handle the format;
// without a case for the format, that code does not compile.
#pragma once

#include <type_traits>
#include <utility>

#include "bf16.cuh"
#include "f16.cuh"
#include "f32.cuh"
#include "fp8.cuh"
#include "fp8_ds_mla.cuh"
#include "fp8_per_token.cuh"

namespace mla {

#define MLA_CACHE_FORMATS(each) \
    each(MLA_CACHE_F32)         \
    each(MLA_CACHE_F16)         \
    each(MLA_CACHE_BF16)        \
    each(MLA_CACHE_FP8)         \
    each(MLA_CACHE_FP8_DS_MLA)  \
    each(MLA_CACHE_FP8_PER_TOKEN)

// Accepted formats, for refusals.
constexpr const char* kCacheFormats = "a value of MlaCacheFormat (0..=5)";

#define MLA_ONE_MORE(Format) +1
static_assert(0 MLA_CACHE_FORMATS(MLA_ONE_MORE) == 6, "kCacheFormats says which values there are");
#undef MLA_ONE_MORE

// Calls f(std::integral_constant<MlaCacheFormat, ...>) for a format of the C interface, and returns
// its result; returns `other` if there is no such format. The switch has no default: the compiler
// reports a format that is missing here.
template <typename F, typename R>
R with_format(int32_t format, R other, F f) {
#define MLA_CALL(Format) \
    case Format: return f(std::integral_constant<MlaCacheFormat, Format>());
    switch (static_cast<MlaCacheFormat>(format)) { MLA_CACHE_FORMATS(MLA_CALL) }
#undef MLA_CALL
    return other;
}

inline bool is_cache_format(int32_t format) {
    return with_format(format, false, [](auto) { return true; });
}

// Shape of a format's rows; that of f32 if there is no such format.
inline RowShape row_shape(int32_t format, int64_t latent_dim, int64_t rope_dim) {
    return with_format(format, Row<MLA_CACHE_F32>::shape(latent_dim, rope_dim),
                       [&](auto f) { return Row<f.value>::shape(latent_dim, rope_dim); });
}

}  // namespace mla
