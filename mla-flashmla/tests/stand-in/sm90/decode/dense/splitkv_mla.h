#pragma once

#include "params.h"

namespace sm90 {
template <typename Element>
void run_flash_splitkv_mla_kernel(DenseAttnDecodeParams& params);
}
