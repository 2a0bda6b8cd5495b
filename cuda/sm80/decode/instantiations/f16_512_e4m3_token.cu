#include "sm80/decode/launch.cuh"

template mla::sm80::decode::Variant
mla::sm80::decode::variant_of<__half, 512, mla::sm80::decode::CacheFormat::e4m3_token>(
    const mla::sm80::Limits&, const mla::sm80::decode::Shape&);
