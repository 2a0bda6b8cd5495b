#include "sm80/prefill/launch.cuh"

namespace mla::sm80::prefill {

MLA_PREFILL_DIMS(, __half)

}  // namespace mla::sm80::prefill
