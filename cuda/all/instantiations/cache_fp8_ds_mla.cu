#include "../cache_gather.cuh"
#include "../cache_write.cuh"

namespace mla {
template struct CacheWrite<MLA_CACHE_FP8_DS_MLA>;
template struct CacheGather<MLA_CACHE_FP8_DS_MLA>;
}  // namespace mla
