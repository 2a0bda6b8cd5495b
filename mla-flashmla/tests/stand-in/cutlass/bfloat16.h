#pragma once

namespace cutlass {
struct bfloat16_t;
}
