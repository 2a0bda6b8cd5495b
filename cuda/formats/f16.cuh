// Rows of L + R values of f16.
#pragma once

#include "plain.cuh"

namespace mla {

template <>
struct Row<MLA_CACHE_F16> : PlainRow<__half> {};

}  // namespace mla
