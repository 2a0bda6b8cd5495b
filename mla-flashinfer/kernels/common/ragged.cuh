// Definitions that both versions of FlashInfer's ragged prefill share: the widths, the mask and the
// dtype.
#pragma once

#include <flashinfer/allocator.h>
#include <flashinfer/attention/mask.cuh>

#include <cstring>

#include "dtype.cuh"
#include "flashinfer.h"

namespace fi {

constexpr uint32_t kKey = 192, kValue = 128;

template <bool kCausal>
struct Mask {
    static constexpr bool kIsCausal = kCausal;
    static constexpr auto kMode =
        kCausal ? flashinfer::MaskMode::kCausal : flashinfer::MaskMode::kNone;
};

// Calls `launch` with a value of the run's dtype and its mask.
template <typename Launch>
cudaError_t of_kind(const FiRaggedRun& run, Launch&& launch) {
    return of_dtype(run.dtype, [&](auto zero) {
        return run.causal ? launch(zero, Mask<true>{}) : launch(zero, Mask<false>{});
    });
}

// A plan for CUTLASS's kernel: offsets of its lists in bytes, and what else the launch needs.
struct CutlassPlan {
    int64_t work_starts, tiles, heads, requests_of_works;
    int64_t max_query_len, requests;
};

// A list of a plan.
inline int32_t* list_at(const FiRaggedRun& run, int64_t offset) {
    return flashinfer::GetPtrFromBaseOffset<int32_t>(const_cast<void*>(run.lists), offset);
}

}  // namespace fi
