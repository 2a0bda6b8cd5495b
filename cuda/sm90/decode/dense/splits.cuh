// The output warps' work on a query tile that is divided among CTAs: store, await, combine. The
// split protocol (common/split_protocol.cuh) decides which CTA does what, and when.
#pragma once

#include "../../../common/split_protocol.cuh"
#include "combine.cuh"
#include "context.cuh"

namespace mla::sm90::decode {

template <class C>
struct Splits {
    using L = typename C::L;
    using T = typename C::T;
    static constexpr int N = C::N;
    using Fragments = typename C::Fragments;
    using Combine = CombineLayout<N, Fragments>;
    using Partial = typename Combine::Partial;
    using Protocol = SplitProtocol<DeviceMemory>;

    const Context<C>& c;
    const KernelParams& p = c.p;
    typename C::Control& s = c.s;

    // Stores the partial result of a split in the workspace, except for the slice that this CTA
    // combines itself, which stays in shared memory. Counts the split as arrived, and notes the
    // tile if this CTA has to combine it later.
    template <typename Sums>
    __device__ void store(const WorkItem& item, Sums& sums, int thread) {
        char* mine = partial(c.group_id, item.split == 0);
        const Slice slice = kept_slice(item);
        const unsigned first = slice.begin * Combine::kUnit,
                       count = (slice.end - slice.begin) * Combine::kUnit;
        const int scale = scale_of(sums.largest(s.inverse, thread), thread);
        uint4 packed[Sums::kVectors];
        sums.pack(packed, s.inverse, power_of_two(scale), thread);
        const int own = Sums::first_vector(thread);
        uint4* to = reinterpret_cast<uint4*>(mine) + own;
        if (count == 0) {
#pragma unroll
            for (int i = 0; i < Sums::kVectors; ++i) to[Sums::vector(i)] = packed[i];
        } else {
#pragma unroll
            for (int i = 0; i < Sums::kVectors; ++i) {
                const unsigned of_slice = Sums::vector(i) + own - first;
                if (of_slice < count)
                    ptx::st_shared_v4(kept() + of_slice * 16, packed[i]);
                else
                    to[Sums::vector(i)] = packed[i];
            }
        }
        if (thread < N) {
            // Hides the thread's number from the compiler, which would compute what depends on
            // it before the first work item, and spill it.
            int of_split = thread;
            asm volatile("" : "+r"(of_split));
            const int row = Fragments::row_of_tile(of_split);
            *reinterpret_cast<float*>(mine + Partial::lse_offset(of_split)) =
                log2_sum_exp2(s.maximum[row], s.sum[row]);
            *reinterpret_cast<float*>(mine + Partial::scale_offset(of_split)) =
                power_of_two(-scale);
        }
        s.stats_empty.arrive();
        OutputBarrier::sync();
        const Protocol protocol = protocol_of(item);
        // Until this thread's writes and the others' have arrived, the others prepare to combine.
        if (item.last) {
            if (thread == 0) protocol.arrive_combiner();
            return;
        }
        if (thread == 0) {
            s.deferred.first = protocol.arrive() == SplitRole::everything;
            leave(protocol);
        }
        OutputBarrier::sync();
        // Only a CTA's first work item can be a split and have others after it.
        if (s.deferred.first) {
            if (thread == 0) s.deferred.first_item = item;
            OutputBarrier::sync();
        }
    }

    // Combines what is left to this CTA: a slice of its last tile, or whole tiles after falling
    // back.
    __device__ void combine(const PipelineCounter<kQueuedItems>& queue, int thread) {
        // The last work item is still where it was.
        const WorkItem* last = &s.items[(queue.count - 1) % kQueuedItems];
        const bool combines = queue.count > 0 && last->splits > 1 && last->last;
        // Its own slice; all of the last work item's tile; all of the first one's.
#pragma unroll 1
        for (int i = 0; i < 3; ++i) {
            const bool own = i == 0;
            if (!(own ? combines : i == 1 ? s.deferred.last : s.deferred.first)) continue;
            const WorkItem& item = i == 2 ? s.deferred.first_item : *last;
            int left = 0;
            const auto ready = [&] {
                if (!own) {
                    OutputBarrier::sync();
                    return true;
                }
                if (!await(item, thread)) return false;
                // No thread waits for this: the answer is needed when the slice is combined.
                if (thread == 0) left = protocol_of(item).leave();
                return true;
            };
            const char* partials = p.partials;
            using Source = PartialResults<Context<C>::kGroupStep * Partial::kBytes>;
            const Source source{partials, uint32_t(partial(item.first_group, true) - partials),
                                uint32_t(partial(item.first_group, false) - partials), item.splits};
#pragma unroll 1
            for (int slice = own ? item.split : 0, end = own ? slice + 1 : item.combiners;
                 slice < end; ++slice) {
                const Slice units = Slice::of(Combine::kUnits, slice, item.combiners);
                CombineFew<T, N, Fragments, Source> few(p, source, c.output_rows(item), units,
                                                        slice, c.base, L::kControlOffset, thread);
                if (!ready()) break;
                if (item.splits <= kFewSplits) {
                    few.run(own);
                } else {
                    static_assert(8 * Combine::kWorkers * Combine::kUnit * sizeof(CombineState) <=
                                      L::kControlOffset,
                                  "sums of eight units");
                    CombineState* scratch = reinterpret_cast<CombineState*>(
                        reinterpret_cast<char*>(&s) - L::kControlOffset);
                    combine_many<T, N, Fragments>(p, source, c.output_rows(item), units, scratch,
                                                  thread);
                }
            }
            if (left == item.splits) protocol_of(item).reset();
        }
    }

  private:
    // Address of a partial result in the workspace. A CTA group has at most two unfinished tiles:
    // one that begins in its range and one that began before it.
    __device__ char* partial(int of_group, bool begins) const {
        return p.partials +
               (begins * c.ctas() + of_group * Context<C>::kGroupStep + c.list_offset()) *
                   Partial::kBytes;
    }

    // Address at which a combiner keeps its own slice: queries and ring are idle when there is no
    // other work item. Before it lie the splits' weights (CombineFew).
    __device__ uint32_t kept() const { return c.base + kFewSplits * N * 4; }
    __device__ Slice kept_slice(const WorkItem& item) const {
        return item.last && item.splits <= kFewSplits
                   ? Slice::of(Combine::kUnits, item.split, item.combiners)
                   : Slice{0, 0};
    }

    // 2^x. Both it and its inverse must be floats.
    __device__ static float power_of_two(int x) { return __int_as_float((127 + x) << 23); }

    // Given this thread's largest value, returns the exponent of the power of two that brings the
    // largest finite value of a partial result to 2^14 or more, and below 2^15. If a row also has
    // values that are not finite, finite ones may become infinite. All MMAs are done when a thread
    // returns.
    __device__ int scale_of(float top, int thread) const {
        const uint32_t of_warp = __reduce_max_sync(~0u, __float_as_uint(top));
        if ((thread & 31) == 0) s.split_top[thread >> 5] = __uint_as_float(of_warp);
        OutputBarrier::sync();
        const float4 a = *reinterpret_cast<const float4*>(s.split_top),
                     b = *reinterpret_cast<const float4*>(s.split_top + 4);
        top =
            fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
        return min(127 + 14 - int(__float_as_uint(top) >> 23), 100);
    }

    __device__ Protocol protocol_of(const WorkItem& item) const {
        return {p.counters + item.first_group * Context<C>::kGroupStep + c.list_offset(),
                item.splits, item.combiners};
    }

    __device__ static void leave(const Protocol& protocol) {
        if (protocol.leave() == protocol.splits) protocol.reset();
    }

    // Waits until this CTA may combine its slice. If that takes too long, writes the slice that it
    // kept to the workspace, too, and returns false.
    __device__ bool await(const WorkItem& item, int thread) {
        // Another thread than the one that arrives, which is still busy with the arrival.
        if (thread == kOutputThreads / 2) {
            const Protocol protocol = protocol_of(item);
            const int64_t start = clock64();
            SplitRole role;
            do {
                const int seen = protocol.seen();
                role = protocol.role_of(seen);
                if (role == SplitRole::none && clock64() - start > p.patience &&
                    protocol.fall_back(seen))
                    role = SplitRole::yield;
            } while (role == SplitRole::none);
            s.split_role = role;
        }
        OutputBarrier::sync();
        if (s.split_role == SplitRole::slice) return true;
        const Slice slice = kept_slice(item);
        uint4* mine = reinterpret_cast<uint4*>(partial(c.group_id, item.split == 0));
        for (int i = slice.begin * Combine::kUnit + thread; i < slice.end * Combine::kUnit;
             i += kOutputThreads)
            mine[i] = ptx::ld_shared_v4(kept() + (i - slice.begin * Combine::kUnit) * 16);
        OutputBarrier::sync();
        if (thread == 0) {
            const Protocol protocol = protocol_of(item);
            s.deferred.last = protocol.yield() == SplitRole::everything;
            leave(protocol);
        }
        OutputBarrier::sync();
        return false;
    }
};

}  // namespace mla::sm90::decode
