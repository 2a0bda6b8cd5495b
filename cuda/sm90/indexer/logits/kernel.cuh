// Index logits of query tokens over their paged context.
//
//   logit[t, s] = scale[s] * sum over h of weight[t, h] * relu(query[t, h] . key[s])
//
// The A operand of an MMA is 64 keys. The B operand is the heads of one or more tokens of a
// request. One warp loads; the consumer warpgroups multiply, and sum over heads. CTAs are
// persistent. If blocks of tokens are few, each CTA has an equal range of all KV tiles
// (scheduler.cuh). Otherwise it takes one work item after another. A work item is a block of tokens
// and a range of columns.
#pragma once

#include "../../../ptx/sm90.cuh"
#include "consumer.cuh"
#include "producer.cuh"

namespace mla::sm90::logits {

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    logits_kernel(const __grid_constant__ KernelParams p) {
    const uint32_t start = ptx::shared_address(ptx::dynamic_shared());
    Shared<C>& s =
        *reinterpret_cast<Shared<C>*>(ptx::dynamic_shared() + (1024 - start % 1024) % 1024);
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::kStages; ++i) {
            s.keys_full[i].init();
            s.keys_empty[i].init();
        }
        for (int i = 0; i < 2; ++i) {
            s.queries_full[i].init();
            s.queries_empty[i].init();
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x >= C::kConsumers * 128) {
        if constexpr (C::kGivesRegisters) ptx::setmaxnreg_dec<56>();
        if (threadIdx.x < C::kConsumers * 128 + 32) Producer<C>(p, s).run();
    } else {
        if constexpr (C::kGivesRegisters) ptx::setmaxnreg_inc<224>();
        Consumer<C>(p, s).run();
    }
}

}  // namespace mla::sm90::logits
