#pragma once

#include "params.h"

namespace smxx::decode {
template <typename Element>
void run_flash_mla_combine_kernel(CombineParams& params);
}
