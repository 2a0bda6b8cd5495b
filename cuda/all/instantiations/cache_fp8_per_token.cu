#include "../cache_gather.cuh"
#include "../cache_write.cuh"

namespace mla {
template struct CacheWrite<MLA_CACHE_FP8_PER_TOKEN>;
template struct CacheGather<MLA_CACHE_FP8_PER_TOKEN>;
}  // namespace mla
