// Hands the work items of this CTA group to the other warps.
#pragma once

#include "context.cuh"

namespace mla::sm90::decode {

// Warp 2.
template <class C>
struct WorkScheduler {
    const Context<C>& c;
    ItemQueue queue = {};

    // Puts an item into the queue; one whose request is negative says that there are no more.
    __device__ void publish(const WorkItem& item) {
        c.s.item_empty[queue.slot()].wait(queue.phase() ^ 1);
        __syncwarp();
        if ((threadIdx.x & 31) == 0) {
            c.s.items[queue.slot()] = item;
            c.s.item_full[queue.slot()].arrive();
        }
        ++queue.items;
    }
};

}  // namespace mla::sm90::decode
