// Host code that runs before a ragged prefill.
#include <algorithm>
#include <flashinfer/attention/scheduler.cuh>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "ragged.cuh"

namespace {

// Maximum number of bytes in the gaps between lists and behind the last.
constexpr int64_t kGaps = 10 * 16;

// fa2 has query tiles of 16 at least. It divides keys while there are fewer tiles than two for each
// SM.
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

// CUTLASS's plan has query tiles of 256, three numbers for each tile and head, and the start of
// each SM's tiles. In front of the kernel's output there are rows to spare, as many as the longest
// request has.
FiRaggedSizes cutlass_sizes(int64_t requests, int64_t tokens, int64_t heads, int64_t sms) {
    const int64_t works = (tokens / FI_CUTLASS_QUERY_TILE + requests) * heads + sms;
    return {(3 * works + sms + 1) * 4, 2 * std::max(tokens, int64_t{1}) * heads * fi::kValue * 2};
}

void check_fa(int32_t fa) {
    if (fa != 2 && fa != 3 && fa != FI_CUTLASS)
        throw std::invalid_argument("fa: accepted 2, 3 and 10");
}

// A query tile of one head.
struct Work {
    int32_t tile, head, request;
};

// Gives each tile to the SM with the least work so far, the costliest tile of a request first.
// Tiles that see no key are left out: they are filled afterwards.
std::vector<std::vector<Work>> divide(const FiRaggedPlan& plan, int32_t sms) {
    using Load = std::pair<int64_t, int32_t>;
    std::priority_queue<Load, std::vector<Load>, std::greater<Load>> idlest;
    for (int32_t sm = 0; sm < sms; ++sm) idlest.push({0, sm});
    std::vector<std::vector<Work>> works(sms);
    for (int32_t head = 0; head < plan.heads; ++head) {
        for (int32_t request = 0; request < plan.requests; ++request) {
            const int32_t queries = plan.query_starts[request + 1] - plan.query_starts[request];
            const int32_t tiles = (queries + FI_CUTLASS_QUERY_TILE - 1) / FI_CUTLASS_QUERY_TILE;
            for (int32_t tile = tiles - 1; tile >= 0; --tile) {
                const int32_t last = std::min(queries, (tile + 1) * FI_CUTLASS_QUERY_TILE);
                const int32_t keys =
                    plan.key_lens[request] - (plan.causal != 0 ? queries - last : 0);
                if (keys <= 0) continue;
                const auto [load, sm] = idlest.top();
                idlest.pop();
                works[sm].push_back({tile, head, request});
                idlest.push({load + keys, sm});
            }
        }
    }
    // An SM without work would take the first tile of the first request, which may see no key. So
    // it repeats another SM's tile and writes the same values.
    const auto busy =
        std::find_if(works.begin(), works.end(), [](const auto& of_sm) { return !of_sm.empty(); });
    if (busy == works.end()) return {};
    const Work again = busy->front();
    for (auto& of_sm : works) {
        if (of_sm.empty()) of_sm.push_back(again);
    }
    return works;
}

cudaError_t plan_cutlass(FiRaggedPlan* plan, cudaStream_t stream) {
    // FlashInfer launches as many CTAs as the first GPU has SMs.
    int32_t sms = 0;
    const cudaError_t status = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    if (status != cudaSuccess) return status;
    const auto works = divide(*plan, sms);
    std::vector<int32_t> lists{0};
    for (const auto& of_sm : works)
        lists.push_back(lists.back() + static_cast<int32_t>(of_sm.size()));
    const auto append = [&](int32_t Work::* number) {
        const int64_t begin = static_cast<int64_t>(lists.size()) * 4;
        for (const auto& of_sm : works) {
            for (const Work& work : of_sm) lists.push_back(work.*number);
        }
        return begin;
    };
    fi::CutlassPlan made{};
    made.tiles = append(&Work::tile);
    made.heads = append(&Work::head);
    made.requests_of_works = append(&Work::request);
    made.requests = works.empty() ? 0 : plan->requests;
    for (int32_t request = 0; request < plan->requests; ++request) {
        made.max_query_len = std::max<int64_t>(
            made.max_query_len, plan->query_starts[request + 1] - plan->query_starts[request]);
    }
    const int64_t bytes = static_cast<int64_t>(lists.size()) * 4;
    const int64_t rows = plan->query_starts[plan->requests] + made.max_query_len;
    const int64_t out_bytes = rows * plan->heads * fi::kValue * 2;
    if (bytes > plan->lists_bytes || out_bytes > plan->workspace_bytes) {
        throw std::length_error("lists and workspace: given " + std::to_string(plan->lists_bytes) +
                                " and " + std::to_string(plan->workspace_bytes) +
                                " bytes, accepted at least " + std::to_string(bytes) + " and " +
                                std::to_string(out_bytes));
    }
    std::memcpy(plan->numbers, &made, sizeof made);
    std::copy(lists.begin(), lists.end(), static_cast<int32_t*>(plan->staging));
    return cudaMemcpyAsync(plan->lists, plan->staging, bytes, cudaMemcpyHostToDevice, stream);
}

template <typename Info>
void write(const Info& info, FiRaggedPlan* plan) {
    const auto numbers = info.ToVector();
    std::copy(numbers.begin(), numbers.end(), plan->numbers);
}

}  // namespace

extern "C" int32_t fi_ragged_sizes(int32_t fa, int32_t requests, int32_t tokens, int32_t heads,
                                   int32_t sms, FiRaggedSizes* sizes) {
    return fi::guarded([&] {
        check_fa(fa);
        switch (fa) {
            case 2: *sizes = fa2_sizes(requests, tokens, sms); break;
            case 3: *sizes = fa3_sizes(requests, tokens, heads, sms); break;
            default: *sizes = cutlass_sizes(requests, tokens, heads, sms);
        }
        return cudaSuccess;
    });
}

extern "C" int32_t fi_ragged_plan(FiRaggedPlan* plan, void* stream) {
    return fi::guarded([&] {
        check_fa(plan->fa);
        const auto list = [](const int32_t* list) { return const_cast<int32_t*>(list); };
        const uint32_t rows = plan->query_starts[plan->requests];
        const auto on = static_cast<cudaStream_t>(stream);
        constexpr int kPageSize = 1, kBytesOfOutput = 2;
        if (plan->fa == FI_CUTLASS) return plan_cutlass(plan, on);
        if (plan->fa == 3) {
            flashinfer::PrefillPlanSM90Info info;
            const cudaError_t status = flashinfer::PrefillSM90Plan<int32_t>(
                nullptr, 0, plan->lists, plan->staging, plan->lists_bytes, info,
                list(plan->query_starts), list(plan->key_starts), list(plan->key_lens), rows,
                plan->requests, plan->heads, plan->heads, fi::kKey, fi::kValue, kPageSize,
                plan->causal != 0,
                /*enable_cuda_graph=*/false, kBytesOfOutput, on);
            write(info, plan);
            return status;
        }
        flashinfer::PrefillPlanInfo info;
        // Only offsets into the workspace are asked for, so any address that is a multiple of 16
        // will do.
        const cudaError_t status = flashinfer::PrefillPlan<int32_t>(
            plan->staging, plan->workspace_bytes, plan->lists, plan->staging, plan->lists_bytes,
            info, list(plan->query_starts), list(plan->key_starts), rows, plan->requests,
            plan->heads, plan->heads, fi::kKey, fi::kValue, kPageSize, /*enable_cuda_graph=*/false,
            kBytesOfOutput,
            /*window_left=*/-1, /*fixed_split_size=*/-1, /*disable_split_kv=*/false,
            /*num_colocated_ctas=*/0, /*uniform_q_len=*/0, on);
        write(info, plan);
        return status;
    });
}
