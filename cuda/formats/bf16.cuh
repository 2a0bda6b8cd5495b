// Rows of L + R values of bf16.
#pragma once

#include "plain.cuh"

namespace mla {

template <>
struct Row<MLA_CACHE_BF16> : PlainRow<__nv_bfloat16> {};

}  // namespace mla
