#include "sm80/prefill/launch.cuh"

template mla::sm80::prefill::Variant mla::sm80::prefill::variant_of<__nv_bfloat16, 256, 128>();
