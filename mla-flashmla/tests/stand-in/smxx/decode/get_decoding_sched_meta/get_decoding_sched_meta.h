#pragma once

#include "params.h"

namespace smxx::decode {
void run_get_decoding_sched_meta_kernel(GetDecodeSchedMetaParams& params);
}
