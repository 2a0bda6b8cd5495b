// The scheduler warp.
#pragma once

#include "../../common/pipeline.cuh"
#include "../../ptx/sm90.cuh"
#include "config.cuh"
#include "params.cuh"
#include "scheduler.cuh"
#include "split_plan.cuh"

namespace mla::sm90::prefill {

// Prefetches the lengths from request `from` on, which are usually in device memory. One lane
// prefetches 128 bytes.
__device__ __forceinline__ void prefetch_lengths(const KernelParams& p, int from) {
#pragma unroll 1
    for (int at = from + threadIdx.x % 32 * 32; at <= p.requests; at += 32 * 32) {
        ptx::prefetch_global_l2(p.cu_q + at);
        ptx::prefetch_global_l2(p.cu_k + at);
    }
}

// Publishes the work of the other warps. First come the items that this CTA claims. If query tiles
// have splits, the CTA's shares of combining them follow. All items are claimed by CTAs that run. A
// warp that waits for the splits of a query tile therefore waits for CTAs that make progress.
template <typename Config>
struct SchedulerWarp {
    const KernelParams& p;
    Shared<Config>& shared;
    int lane;
    int published = 0;

    // Begins while another warp initialises the mbarriers, but publishes nothing before that is
    // done.
    __device__ void run() {
        if constexpr (Config::kSplitsKeys)
            run_split();
        else
            run_unsplit();
    }

  private:
    __device__ void run_split() {
        // This claim is in flight together with the loads of the lengths.
        const int claimed = claim();
        const Lengths lengths(p);
        SplitPlan<Config::kKeys> plan(lengths, gridDim.x, p.slots);
        plan.load_lengths();
        prefetch_lengths(p, 32);
        int first = 0;
        if (p.uniform) {
            plan.use_uniform(p.uniform_items);
            first = __shfl_sync(~0u, claimed, 0);
            expect(plan.find_uniform(first, p.uniform_items));
        }
        join();
        if (!(p.uniform && confirmed(plan.starts()))) {
            plan.use_lengths();
            const bool splits_keys = p.alone ? plan.divide_alone(p.alone) : plan.plan_splits();
            first = __shfl_sync(~0u, claimed, 0);
            if (!splits_keys) return run_by_lengths(first, 0);
        }
        plan.rewind();
        for (int index = first;; index = __shfl_sync(~0u, claim(), 0)) {
            const WorkItem item = plan.find(index, p.uniform_items);
            if (!item.is_valid()) break;
            publish_item(item);
        }
        // This CTA stores its own splits before it waits for those of others.
        publish(WorkTile::mark(false));
        plan.rewind();
        publish_combines(plan);
        publish(WorkTile::mark(true));
        // Waits until this CTA's consumers have waited for the last time.
        const PipelineState<kWorkStages> last(published - 2);
        ptx::mbarrier_wait(ptx::shared_address(&shared.work_empty[last.stage]), last.phase);
        leave([&] { return plan.slots(); });
    }

    __device__ void run_unsplit() {
        // No CTA waits for another here, so each has its first tile without a claim.
        const int own = blockIdx.x, others = gridDim.x;
        if (p.uniform) {
            const int2 starts = starts_of_lane();
            prefetch_lengths(p, 32);
            // One loop finds all tiles. The search for the second tile therefore runs instructions
            // that have already been fetched.
            bool begun = false;
            for (int claimed = own;; claimed = others + __shfl_sync(~0u, claim(), 0)) {
                const WorkItem item = find_uniform<Config::kKeys>(p, claimed);
                if (!begun) {
                    begun = true;
                    expect(item);
                    join();
                    if (!confirmed(starts)) break;
                }
                if (!item.is_valid()) return end_unsplit();
                publish_item(item);
                // This tile is the CTA's only one.
                if (p.single_wave) return end_unsplit();
            }
        } else {
            prefetch_lengths(p, 0);
            join();
        }
        run_by_lengths(own, others);
    }

    __device__ void end_unsplit() {
        publish(WorkTile::mark(true));
        leave([] { return 0; });
    }

    // Publishes tiles in the order of scheduler.cuh. Tile `first` comes first. The numbers of
    // claimed tiles, which follow, begin at `others`.
    __device__ void run_by_lengths(int first, int others) {
        TileScheduler<Config::kKeys> scheduler(p);
        for (int claimed = first;; claimed = others + __shfl_sync(~0u, claim(), 0)) {
            const WorkItem item = scheduler.find(claimed);
            if (!item.is_valid()) return end_unsplit();
            publish_item(item);
        }
    }

    // Waits until the mbarriers are initialised, and lets the producers load the expected tile.
    __device__ void join() const {
        __syncwarp();
        SetupBarrier::sync();
        if (p.uniform && lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.expected));
    }

    // Numbers of query and key rows before the lane's request, among the first 32 requests. The
    // loads stay in flight until the numbers are compared.
    __device__ int2 starts_of_lane() const {
        const int at = min(lane, p.requests);
        return {p.cu_q[at], p.cu_k[at]};
    }

    // Describes the first item for the producers, on the assumption that the host's numbers are
    // right.
    __device__ void expect(const WorkItem& item) {
        const WorkTile expected = work_of(item);
        if (lane == 0) shared.first = expected;
    }

    // True if the host's numbers are right. If not, the tile that is being loaded is computed, but
    // not stored.
    __device__ bool confirmed(int2 starts) {
        const Lengths lengths(p);
        // Keeps the compiler from comparing earlier, which would wait for the loads.
        asm volatile("" : "+r"(starts.x), "+r"(starts.y));
        bool as_expected = lengths.as_expected(min(lane, p.requests), starts.x, starts.y);
#pragma unroll 1
        for (int at = lane + 32; at <= p.requests; at += 32)
            as_expected &= lengths.as_expected(at, p.cu_q[at], p.cu_k[at]);
        const bool right = __all_sync(~0u, as_expected);
        if (right) return true;
        const WorkTile expected = shared.first;
        if (expected.computes()) {
            publish(expected.without_rows());
            ptx::mbarrier_wait(ptx::shared_address(&shared.work_wanted), 0);
        }
        return false;
    }

    // Lane 0 claims. The asm hides from the compiler that the address is the same in all lanes. For
    // such an address, the compiler adds up the lanes' values first, and then waits for the answer
    // to distribute it.
    __device__ int claim() const {
        int before = 0, own = lane;
        asm volatile("" : "+r"(own));
        if (lane == 0) before = ptx::atom_inc_relaxed(p.claimed + own);
        return before;
    }

    __device__ void publish_item(const WorkItem& item) {
        if (item.begin < item.end) {
            publish(work_of(item));
            ptx::mbarrier_wait(ptx::shared_address(&shared.work_wanted), (published - 1) & 1);
        } else if (item.split == 0) {
            store_nothing(item);
        }
    }

    // A query tile that has n splits has n shares of its combine.
    __device__ void publish_combines(SplitPlan<Config::kKeys>& plan) {
        for (int index = blockIdx.x;; index += gridDim.x) {
            const WorkItem item = plan.find(index, p.uniform_items);
            if (!item.is_valid()) return;
            if (item.splits == 1 || item.begin == item.end) continue;
            WorkTile work = work_of(item);
            work.kv_tiles = 0;
            work.key_len = item.splits;
            publish(work);
        }
    }

    __device__ static WorkTile work_of(const WorkItem& item) {
        WorkTile work = WorkTile::mark(true);
        if (item.splits > 1) {
            work.slots = WorkTile::pack(item.first_slot, item.first_slot + item.split);
        }
        work.head = item.head;
        work.query = item.query;
        work.query_start = item.query_start;
        work.query_len = item.query_len;
        work.key_len = item.key_len - item.begin * Config::kKeys;
        work.key_end = item.key_start + item.key_len;
        work.kv_tiles = item.end - item.begin;
        return work;
    }

    __device__ void publish(const WorkTile& work) {
        const PipelineState<kWorkStages> next(published);
        ptx::mbarrier_wait(ptx::shared_address(&shared.work_empty[next.stage]), next.phase ^ 1);
        if (lane == 0) {
            shared.work[next.stage] = work;
            ptx::mbarrier_arrive(ptx::shared_address(&shared.work_full[next.stage]));
        }
        published++;
    }

    // The last CTA resets the counters. At that time no CTA claims or waits any more, and every
    // arrival that was waited for has come.
    template <typename Slots>
    __device__ void leave(Slots slots) const {
        int is_last;
        if (lane == 0) {
            is_last = Departures<DeviceMemory>{p.left}.leave() == int(gridDim.x);
            if (is_last) *p.claimed = *p.left = 0;
        }
        if (!__shfl_sync(~0u, is_last, 0)) return;
        const int count = slots();
        for (int slot = lane; slot < count; slot += 32) p.arrived[slot] = 0;
    }

    // Stores the results of rows that see nothing: output 0, log-sum-exp minus infinity.
    __device__ void store_nothing(const WorkItem& item) const {
        const int rows = min(kQueries, item.query_len - item.query);
        const int64_t token = int64_t(item.query_start) + item.query;
#pragma unroll 1
        for (int row = 0; row < rows; row++) {
            auto* out = static_cast<typename Config::Element*>(p.out) +
                        (token + row) * p.out_token_stride + item.head * p.out_head_stride;
#pragma unroll 1
            for (int column = lane * 8; column < Config::kValue; column += 32 * 8) {
                *reinterpret_cast<uint4*>(out + column) = make_uint4(0, 0, 0, 0);
            }
            if (lane == 0 && p.lse) p.lse[item.head * p.lse_head_stride + token + row] = -INFINITY;
        }
    }
};

}  // namespace mla::sm90::prefill
