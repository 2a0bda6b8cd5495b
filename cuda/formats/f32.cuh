// Rows of L + R values of f32.
#pragma once

#include "plain.cuh"

namespace mla {

template <>
struct Row<MLA_CACHE_F32> : PlainRow<float> {};

}  // namespace mla
