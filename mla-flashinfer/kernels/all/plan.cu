// Host code that runs before a launch.
#include <algorithm>
#include <flashinfer/attention/scheduler.cuh>
#include <stdexcept>

#include "mla.cuh"

std::string& fi::last_error() {
    thread_local std::string text;
    return text;
}

extern "C" const char* fi_last_error(void) { return fi::last_error().c_str(); }

namespace {

// FlashInfer's plan has room for this number of works in each list, and does not check that it is
// enough.
constexpr int64_t kMaxWorks = 16384;

// Upper bound of a plan's work items: one for each query tile of a cluster of one CTA or of two,
// and one more for each cluster, since a split begins where a cluster's share of all keys is full.
int64_t most_works(const FiMlaPlan& plan) {
    const int64_t rows = static_cast<int64_t>(plan.query_starts[plan.requests]) * plan.heads;
    return std::max<int64_t>(2 * plan.requests, rows / 128 + plan.requests) + plan.sms;
}

// Nine lists of works and five of SMs, each begun at a multiple of 16 bytes.
int64_t staging_bytes(int64_t sms) {
    return 9 * kMaxWorks * sizeof(int32_t) + 5 * (sms * sizeof(int32_t) + 16);
}

// Copies what the plan uses of each list, in the order of fi::mla_params, short ones at the same
// places as long ones: a graph that was captured with the lists' addresses finds the next step's
// lists there.
void copy_lists(const flashinfer::MLAPlanInfo& info, FiMlaPlan* plan) {
    const auto at = [plan](int64_t offset) {
        return reinterpret_cast<const int32_t*>(static_cast<const char*>(plan->staging) + offset);
    };
    const int32_t clusters = plan->grid_y, sms = plan->grid_x * clusters;
    const int32_t works = at(info.work_indptr_offset)[clusters];
    const int32_t longest = std::max({works, sms, clusters + 1});
    if (longest > plan->capacity) {
        throw std::length_error("query tiles and splits: given " + std::to_string(longest) +
                                ", accepted at most " + std::to_string(plan->capacity) +
                                ", for which there is room");
    }
    const struct {
        int64_t offset;
        int32_t used;
    } sources[FI_MLA_LISTS] = {
        {info.q_indptr_offset, works},
        {info.kv_indptr_offset, works},
        {info.partial_indptr_offset, works},
        {info.merge_packed_offset_start_offset, sms},
        {info.merge_packed_offset_end_offset, sms},
        {info.merge_partial_packed_offset_start_offset, sms},
        {info.merge_partial_packed_offset_end_offset, sms},
        {info.merge_partial_stride_offset, sms},
        {info.q_len_offset, works},
        {info.kv_len_offset, works},
        {info.q_start_offset, works},
        {info.kv_start_offset, works},
        {info.kv_end_offset, works},
        {info.work_indptr_offset, clusters + 1},
    };
    int32_t* to = plan->lists;
    for (const auto& source : sources) {
        std::copy_n(at(source.offset), source.used, to);
        to += plan->capacity;
    }
}

}  // namespace

extern "C" int64_t fi_mla_staging_bytes(int32_t sms) { return staging_bytes(sms); }

extern "C" int64_t fi_mla_workspace_bytes(int32_t sms) {
    return fi::partial_rows(sms) * (fi::kLatent * 2 + static_cast<int64_t>(sizeof(float)));
}

extern "C" int32_t fi_mla_plan(FiMlaPlan* plan) {
    return fi::guarded([&] {
        const int64_t bound = most_works(*plan);
        if (bound > kMaxWorks) {
            throw std::length_error("batch: given " + std::to_string(bound) +
                                    " query tiles and splits, accepted at most 16384");
        }
        const auto lists = [](const int32_t* list) { return const_cast<int32_t*>(list); };
        flashinfer::MLAPlanInfo info;
        size_t staged = 0;
        // The planner is asked for offsets into the workspace alone, so any address serves as the
        // workspace's; fi_mla_params lays out the partial results.
        const cudaError_t status = flashinfer::MLAPlan<int32_t>(
            plan->staging, static_cast<size_t>(1) << 40, plan->staging, plan->staging,
            plan->staging_bytes, info, staged, lists(plan->query_starts), lists(plan->table_starts),
            lists(plan->seq_lens), plan->requests, plan->heads, fi::kLatent, /*causal=*/true,
            /*stream=*/nullptr);
        if (status != cudaSuccess) return status;
        plan->grid_x = static_cast<int32_t>(info.num_blks_x);
        plan->grid_y = static_cast<int32_t>(info.num_blks_y);
        copy_lists(info, plan);
        return cudaSuccess;
    });
}
