#include "../cache_gather.cuh"
#include "../cache_write.cuh"

namespace mla {
template struct CacheWrite<MLA_CACHE_F32>;
template struct CacheGather<MLA_CACHE_F32>;
}  // namespace mla
