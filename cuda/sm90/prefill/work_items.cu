// The order in which query tiles and their splits are handed out, computed on the host by the
// kernel's own code.

#include <cuda_fp16.h>

#include "../../common/status.cuh"
#include "launch.cuh"
#include "scheduler.cuh"
#include "sm90/mla_sm90_division.h"
#include "split_plan.cuh"

namespace mla::sm90::prefill {
namespace {

// Writes the items that `find` returns for 0, 1, ..., of requests from `first` on, behind the first
// `count` items; adds their number.
template <typename Find>
void write(MlaPrefillWorkItem* items, int room, int first, int& count, const Find& find) {
    WorkItem i;
    for (int at = 0; (i = find(at)).is_valid(); at++, count++) {
        if (count >= room) continue;
        items[count] = {first + i.request, i.head,  i.query,  i.begin,
                        i.end,             i.split, i.splits, i.first_slot + i.split};
    }
}

// Writes the items of query tiles with splits. `keys` is the number of keys of a KV tile.
template <int keys>
int write_split(const MlaPrefillParams& p, KernelParams& k, int ctas, MlaPrefillWorkItem* items,
                int room) {
    if (!may_split<keys>(p, k, ctas)) return 0;
    int count = 0;
    for_each_launch<keys>(k, [&](const KernelParams& own, int first) {
        const Lengths lengths(own);
        SplitPlan<keys> plan(lengths, ctas, own.slots);
        plan.load_lengths();
        // From here on, the host does the same as the device.
        if (own.uniform && lengths.are_uniform()) {
            plan.use_uniform(own.uniform_items);
        } else if (!(own.alone ? plan.divide_alone(own.alone) : plan.plan_splits())) {
            return;
        }
        plan.rewind();
        write(items, room, first, count,
              [&](int at) { return plan.find(at, own.uniform_items); });
    });
    return count;
}

template <int keys>
int write_unsplit(const KernelParams& k, MlaPrefillWorkItem* items, int room) {
    TileScheduler<keys> scheduler(k);
    int count = 0;
    write(items, room, 0, count, [&](int at) { return scheduler.find(at); });
    return count;
}

// Checks the arguments that both functions have in common, and fills `k` if nothing is wrong.
MlaStatus read(const MlaPrefillParams* params, int32_t ctas, MlaPrefillWorkItem* items,
               int32_t room, int32_t* count, KernelParams& k) {
    if (!params) return refuse("params", 0, "a pointer");
    const MlaPrefillParams& p = *params;
    if (ctas < 1 || ctas > 256) return refuse("ctas", ctas, "1..=256");
    if (p.heads < 1 || p.heads > 65535) return refuse("heads", p.heads, "1..=65535");
    if (p.requests < 1) return refuse("requests", p.requests, "at least 1");
    if (p.max_query_len < 0 || p.max_query_len > INT32_MAX - kQueries)
        return refuse("max_query_len", p.max_query_len, "0..=2147483519");
    if (!p.cu_query_lens) return refuse("cu_query_lens", 0, "a host pointer");
    if (!p.cu_key_lens) return refuse("cu_key_lens", 0, "a host pointer");
    if (room < 0) return refuse("room", room, "at least 0");
    if (!items && room > 0) return refuse("items", 0, "a host pointer");
    if (!count) return refuse("count", 0, "a host pointer");
    k.cu_q = p.cu_query_lens;
    k.cu_k = p.cu_key_lens;
    k.requests = p.requests;
    k.heads = p.heads;
    k.max_request_tiles = ceil_of(p.max_query_len, kQueries);
    k.max_query_len = p.max_query_len;
    k.max_key_len = p.max_key_len;
    k.uniform = host_says_uniform(p);
    k.causal = p.causal;
    k.ctas = ctas;
    return ok();
}

// Calls `write` with the configuration for the call's dims; it returns the number of items.
template <typename Write>
MlaStatus count_items(const MlaPrefillParams& p, int32_t* count, const Write& write) {
    return with_config<__half>(with_rope(p), [&](auto config) {
        *count = write(config);
        return ok();
    });
}

}  // namespace
}  // namespace mla::sm90::prefill

using namespace mla;
using namespace mla::sm90::prefill;

extern "C" MlaStatus mla_prefill_sm90_work_items(const MlaPrefillParams* params, int32_t ctas,
                                                 MlaPrefillWorkItem* items, int32_t room,
                                                 int32_t* count) {
    KernelParams k = {};
    const MlaStatus status = read(params, ctas, items, room, count, k);
    if (status.code != MLA_OK) return status;
    k.slots = kSlotsPerSm * ctas;
    return count_items(*params, count, [&](auto config) {
        return write_split<config.kKeys>(*params, k, ctas, items, room);
    });
}

extern "C" MlaStatus mla_prefill_sm90_unsplit_work_items(const MlaPrefillParams* params,
                                                         int32_t ctas, int32_t swizzle_requests,
                                                         int32_t swizzle_heads,
                                                         MlaPrefillWorkItem* items, int32_t room,
                                                         int32_t* count) {
    KernelParams k = {};
    const MlaStatus status = read(params, ctas, items, room, count, k);
    if (status.code != MLA_OK) return status;
    if (swizzle_requests < 1) return refuse("swizzle_requests", swizzle_requests, "at least 1");
    if (swizzle_heads < 1) return refuse("swizzle_heads", swizzle_heads, "at least 1");
    k.swizzle_requests = std::min(swizzle_requests, k.requests);
    k.swizzle_heads = std::min(swizzle_heads, k.heads);
    return count_items(*params, count,
                       [&](auto config) { return write_unsplit<config.kKeys>(k, items, room); });
}
