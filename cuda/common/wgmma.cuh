// The names that cuda/sm90/prefill still uses for the instructions of cuda/ptx; nothing else does.
#pragma once

#include "../ptx/wgmma.cuh"

namespace mla {

using ptx::wgmma_descriptor;

}  // namespace mla
