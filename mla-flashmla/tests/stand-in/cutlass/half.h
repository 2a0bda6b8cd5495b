#pragma once

namespace cutlass {
struct half_t;
}
