// What is done on the host before a ragged prefill.
#include <algorithm>
#include <flashinfer/attention/scheduler.cuh>

#include "ragged.cuh"

namespace {

// What lies between two lists at most, and behind the last.
constexpr int64_t kGaps = 10 * 16;

// fa2 has query tiles of 16 at least. It divides keys while there are fewer tiles than two for each SM.
FiRaggedSizes fa2_sizes(int64_t requests, int64_t tokens, int64_t sms) {
    const int64_t tiles = std::max(tokens / 16 + requests, 2 * sms);
    const int64_t lists = 3 * tiles + (requests + 1) + 1 + (tokens + 1);
    const int64_t partial = 2 * sms * 128 * (fi::kValue + 1) * static_cast<int64_t>(sizeof(float));
    return {lists * 4 + kGaps, partial + kGaps};
}

// fa3 has query tiles of 128, seven numbers for each of them and each head, and divides no keys.
FiRaggedSizes fa3_sizes(int64_t requests, int64_t tokens, int64_t heads, int64_t sms) {
    const int64_t works = (tokens / 128 + requests) * heads;
    return {(7 * works + sms + 1) * 4 + kGaps, 0};
}

void check_fa(int32_t fa) {
    if (fa != 2 && fa != 3) throw std::invalid_argument("fa: accepted 2 and 3");
}

template <typename Info>
void write(const Info &info, FiRaggedPlan *plan) {
    const auto numbers = info.ToVector();
    std::copy(numbers.begin(), numbers.end(), plan->numbers);
}

}  // namespace

extern "C" int32_t fi_ragged_sizes(int32_t fa, int32_t requests, int32_t tokens, int32_t heads, int32_t sms,
                                   FiRaggedSizes *sizes) {
    return fi::guarded([&] {
        check_fa(fa);
        *sizes = fa == 2 ? fa2_sizes(requests, tokens, sms) : fa3_sizes(requests, tokens, heads, sms);
        return cudaSuccess;
    });
}

extern "C" int32_t fi_ragged_plan(FiRaggedPlan *plan, void *stream) {
    return fi::guarded([&] {
        check_fa(plan->fa);
        const auto list = [](const int32_t *list) { return const_cast<int32_t *>(list); };
        const uint32_t rows = plan->query_starts[plan->requests];
        const auto on = static_cast<cudaStream_t>(stream);
        constexpr int kPageSize = 1, kBytesOfOutput = 2;
        if (plan->fa == 3) {
            flashinfer::PrefillPlanSM90Info info;
            const cudaError_t status = flashinfer::PrefillSM90Plan<int32_t>(
                nullptr, 0, plan->lists, plan->staging, plan->lists_bytes, info, list(plan->query_starts),
                list(plan->key_starts), list(plan->key_lens), rows, plan->requests, plan->heads,
                plan->heads, fi::kKey, fi::kValue, kPageSize, plan->causal != 0,
                /*enable_cuda_graph=*/false, kBytesOfOutput, on);
            write(info, plan);
            return status;
        }
        flashinfer::PrefillPlanInfo info;
        // Only offsets into the workspace are asked for, so any address that is a multiple of 16 will do.
        const cudaError_t status = flashinfer::PrefillPlan<int32_t>(
            plan->staging, plan->workspace_bytes, plan->lists, plan->staging, plan->lists_bytes, info,
            list(plan->query_starts), list(plan->key_starts), rows, plan->requests, plan->heads,
            plan->heads, fi::kKey, fi::kValue, kPageSize, /*enable_cuda_graph=*/false, kBytesOfOutput,
            /*window_left=*/-1, /*fixed_split_size=*/-1, /*disable_split_kv=*/false,
            /*num_colocated_ctas=*/0, /*uniform_q_len=*/0, on);
        write(info, plan);
        return status;
    });
}
