// What both versions of FlashInfer's ragged prefill share: the widths, the mask and the dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <flashinfer/allocator.h>
#include <flashinfer/attention/mask.cuh>
#include <stdexcept>

#include "guard.h"
#include "ragged.h"

namespace fi {

constexpr uint32_t kKey = 192, kValue = 128;

template <bool kCausal>
struct Mask {
    static constexpr auto kMode =
        kCausal ? flashinfer::MaskMode::kCausal : flashinfer::MaskMode::kNone;
};

// Calls `launch` with a value of the run's dtype and its mask.
template <typename Launch>
cudaError_t of_kind(const FiRaggedRun &run, Launch &&launch) {
    const auto of_mask = [&](auto zero) {
        return run.causal ? launch(zero, Mask<true>{}) : launch(zero, Mask<false>{});
    };
    switch (run.dtype) {
        case 0: return of_mask(__half{});
        case 1: return of_mask(__nv_bfloat16{});
        default: throw std::invalid_argument("dtype: accepted 0 (f16) and 1 (bf16)");
    }
}

// A list of a plan.
inline int32_t *list_at(const FiRaggedRun &run, int64_t offset) {
    return flashinfer::GetPtrFromBaseOffset<int32_t>(const_cast<void *>(run.lists), offset);
}

}  // namespace fi
