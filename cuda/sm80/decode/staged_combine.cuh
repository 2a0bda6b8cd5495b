// Combines the slice of a CTA that has nothing else to do. The stages of its KV tiles take other
// splits' partial results: copies of all of them are in flight at once, while the rows' statistics
// are combined.
//
// If splits are few, a slice is some fragments of every warp, which each warp adds for itself;
// those of the CTA's own split stay in shared memory if there is room. If splits are many, a slice
// is some units, of which each warp adds a range of the splits.
#pragma once

#include "config.cuh"
#include "ptx/sm80.cuh"
#include "sm80/split_combine.cuh"
#include "thread_position.cuh"

namespace mla::sm80::decode {

// This warp's share of the KV tiles' place.
template <class C>
struct Staging {
    // Fragments of a warp, in all and of the same 16 rows.
    static constexpr int kFragments = C::kFragments;
    static constexpr int kTileFragments = C::kColumns / 8;

    // This lane's first quadruple; the next ones follow 32 quadruples on. `room` is their number.
    float4* position;
    int room;

    __device__ static int room_of(const KernelParams& p) {
        return ThreadPosition::hide(p.stages) * (C::kTokens * C::pitch(0)) / (C::kWarps * 512);
    }
    __device__ Staging(const KernelParams& p, char* shared, int thread) : room(room_of(p)) {
        position = reinterpret_cast<float4*>(shared + C::kStagesOffset) + thread / 32 * room * 32 +
                   (thread & 31);
    }
    __device__ float4& operator[](int i) const { return position[i * 32]; }

    // Maximum number of splits for which each warp adds its fragments for itself: two of them or
    // more.
    __device__ static int few(const KernelParams& p) { return min(kFragments / 2, room_of(p) - 1); }
    // First fragment of combiner `i` of `combiners` if splits are few.
    __device__ static int begin(int i, int combiners) { return i * kFragments / combiners; }
    // True if this number of the CTA's own fragments stays here: there is room for others' then.
    __device__ static bool keeps(const KernelParams& p, int fragments, int splits) {
        const int room = room_of(p);
        return splits <= few(p) && fragments <= room / 2 && fragments + splits - 1 <= room;
    }
};

template <class C, class Layout, class PartialOf, class RowsOf, class Write, class WriteFour>
class StagedCombine {
    using State = SoftmaxState<Base2>;
    using Stage = Staging<C>;
    static constexpr int kRowsAt = kPartialRowsAt<Layout>;
    static constexpr int kStateBytes = C::kThreads * int(sizeof(State));
    static constexpr int kUnits = Layout::kRows / 16 * Layout::kRowsUnits;
    static constexpr int kUnitBytes = C::kThreads * int(sizeof(float4));

  public:
    __device__ StagedCombine(const Split& split, SplitShared<C::kRows>& rows, char* exchanged,
                             const Stage& stage, bool keeps, const PartialOf& partial_of,
                             const RowsOf& rows_of, const Write& write, const WriteFour& write_four,
                             int thread)
        : split_(split),
          thread_(thread),
          rows_(rows),
          exchanged_(exchanged),
          stage_(stage),
          keeps_(keeps),
          partial_of_(partial_of),
          rows_of_(rows_of),
          write_(write),
          write_four_(write_four) {}

    // True if there is room for the weights of this number of splits and a unit's sums.
    __device__ static bool fits(int splits) {
        return kStateBytes + splits * (C::kRows * 4) + kUnitBytes <= C::kSliceBytes;
    }

    __device__ void few() const {
        const int begin = Stage::begin(split_.index, split_.combiners),
                  end = Stage::begin(split_.index + 1, split_.combiners);
        const int own = keeps_ ? end - begin : 0, others = split_.splits - keeps_;
        int at_once = (stage_.room - own) / others;
        if (at_once >= 4) at_once &= ~3;
        int from = begin;
        copy_few(from, min(at_once, end - from), own, at_once);
        combine_statistics();
#pragma unroll 1
        for (int unit = begin; unit < end;) {
            if (unit >= from + at_once) {
                from = unit;
                copy_few(from, min(at_once, end - from), own, at_once);
            }
            ptx::cp_async_wait_all();
            // Fragments of the same rows.
            const int tile = unit / Stage::kTileFragments;
            const int count =
                min(min(min(from + at_once, end), (tile + 1) * Stage::kTileFragments) - unit, 4);
            const float* weights = this->weights() + tile * 16 + row_of_lane();
            const float4* other = &stage_[own + unit - from];
            const float4* kept = &stage_[unit - begin];
            float4 sums[4] = {};
#pragma unroll 1
            for (int split = 0; split < split_.splits; ++split, weights += C::kRows) {
                const bool stays = keeps_ && split == split_.index;
                const float4* at = stays ? kept : other;
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    add(sums[i], at[min(i, count - 1) * 32], weights[0], weights[8]);
                if (!stays) other += at_once * 32;
            }
            const auto rows = rows_of_(unit_of(unit));
            if (count == 4)
                write_four_(rows, unit % Stage::kTileFragments, sums);
            else
#pragma unroll
                for (int i = 0; i < 3; ++i)
                    if (i < count) write_(rows, unit_of(unit + i), sums[i]);
            unit += count;
        }
    }

    __device__ void many() const {
        const int warp = thread_ / 32, splits = split_.splits;
        const int first = warp * splits / C::kWarps, last = (warp + 1) * splits / C::kWarps;
        const int max_of_warp = (splits + C::kWarps - 1) / C::kWarps;
        float4* sums =
            reinterpret_cast<float4*>(exchanged_ + kStateBytes + splits * (C::kRows * 4));
        const int at_once =
            min(max(stage_.room / max_of_warp, 1),
                (C::kSliceBytes - kStateBytes - splits * (C::kRows * 4)) / kUnitBytes);
        const int end = (split_.index + 1) * kUnits / split_.combiners;
        int unit = split_.index * kUnits / split_.combiners;
        copy_many(unit, min(unit + at_once, end), first, last);
        combine_statistics();
        while (true) {
            const int until = min(unit + at_once, end);
            ptx::cp_async_wait_all();
            int slot = 0;
#pragma unroll 1
            for (int i = unit; i < until; ++i) {
                const float* weights = this->weights() + first * C::kRows + first_row(i);
                float4 sum = {};
#pragma unroll 4
                for (int split = first; split < last; ++split, weights += C::kRows)
                    add(sum, stage_[slot++], weights[0], weights[8]);
                sums[(i - unit) * C::kThreads + thread_] = sum;
            }
            Layout::sync();
#pragma unroll 1
            for (int i = unit + warp; i < until; i += C::kWarps) {
                const float4* from = sums + (i - unit) * C::kThreads + (thread_ & 31);
                write_(rows_of_(i), i, sum_of_warps<C::kWarps>(from));
            }
            unit = until;
            if (unit >= end) break;
            Layout::sync();
            copy_many(unit, min(unit + at_once, end), first, last);
        }
    }

  private:
    __device__ float* weights() const { return reinterpret_cast<float*>(exchanged_ + kStateBytes); }

    // First row of this lane in the warp's first fragments, counted in the CTA's tile.
    __device__ int row_of_lane() const {
        return thread_ / (32 * kColumnGroups) * C::kWarpRows + (thread_ & 31) / 4;
    }
    // The first of this lane's two rows in a unit.
    __device__ int first_row(int unit) const {
        return unit / Layout::kRowsUnits * 16 + (thread_ & 31) / 4;
    }
    // The unit that this warp's fragment is.
    __device__ int unit_of(int fragment) const {
        const int warp = thread_ / 32;
        const int rows = warp / kColumnGroups * C::kWarpTiles + fragment / Stage::kTileFragments;
        return rows * Layout::kRowsUnits + fragment % Stage::kTileFragments * kColumnGroups +
               warp % kColumnGroups;
    }

    __device__ static void add(float4& sum, const float4& x, float low, float high) {
        sum.x = fmaf(x.x, low, sum.x);
        sum.y = fmaf(x.y, low, sum.y);
        sum.z = fmaf(x.z, high, sum.z);
        sum.w = fmaf(x.w, high, sum.w);
    }

    // Copies that follow one another, whose offsets are part of the instruction: it reads its
    // registers late.
    static constexpr int kCopies = 4;

    // Begins to copy `count` fragments of the warp from each split, except for those that the CTA
    // has kept. Fragments of one split go to consecutive places, those of the next split `step`
    // places further.
    __device__ void copy_few(int begin, int count, int slot, int step) const {
        uint32_t to = ptx::shared_address(&stage_[slot]);
#pragma unroll 1
        for (int split = 0; split < split_.splits; ++split) {
            if (keeps_ && split == split_.index) continue;
            const float4* from =
                reinterpret_cast<const float4*>(partial_of_(split)) + begin * C::kThreads + thread_;
#pragma unroll 1
            for (int i = 0; i < count; i += kCopies)
                copy_fragments<0>(to + i * 512, from + i * C::kThreads, count - i);
            to += step * 512;
        }
    }
    template <int i>
    __device__ static void copy_fragments(uint32_t to, const float4* from, int count) {
        if (i < count)
            ptx::cp_async_16_at<i * 512, i * C::kThreads* int(sizeof(float4))>(to, from, true);
        if constexpr (i + 1 < kCopies) copy_fragments<i + 1>(to, from, count);
    }
    __device__ void copy_many(int begin, int end, int first, int last) const {
        uint32_t to = ptx::shared_address(&stage_[0]);
#pragma unroll 1
        for (int unit = begin; unit < end; ++unit) {
            const int vector =
                Layout::vector_of(unit / Layout::kRowsUnits, unit % Layout::kRowsUnits) +
                (thread_ & 31);
#pragma unroll 1
            for (int split = first; split < last; ++split, to += 512)
                ptx::cp_async_16(to, reinterpret_cast<const float4*>(partial_of_(split)) + vector,
                                 true);
        }
    }

    // Every row's maximum, its sum under it, and what each split's values weigh.
    __device__ void combine_statistics() const {
        constexpr int kShare = C::kThreads / C::kRows;
        State* states = reinterpret_cast<State*>(exchanged_);
        const int row = thread_ % C::kRows;
        float* weights = this->weights() + row;
        State own;
#pragma unroll 4
        for (int i = thread_ / C::kRows; i < split_.splits; i += kShare) {
            const float* from = partial_of_(i) + kRowsAt + row;
            const State state = {__ldcg(from), __ldcg(from + C::kRows)};
            weights[i * C::kRows] = state.maximum;
            merge(own, state);
        }
        states[thread_] = own;
        Layout::sync();
        own = states[row];
#pragma unroll
        for (int i = 1; i < kShare; ++i) merge(own, states[i * C::kRows + row]);
#pragma unroll 4
        for (int i = thread_ / C::kRows; i < split_.splits; i += kShare)
            weights[i * C::kRows] = State{weights[i * C::kRows], 0.f}.factor(own.maximum);
        if (thread_ < C::kRows) {
            rows_.maximum[row] = own.maximum;
            rows_.sum[row] = own.sum;
        }
        Layout::sync();
    }

    const Split& split_;
    int thread_;
    SplitShared<C::kRows>& rows_;
    // In shared memory: states of all threads, weights of all splits' rows, sums of all warps.
    char* exchanged_;
    const Stage& stage_;
    // True if the CTA's own fragments of its slice lie in the first quadruples of the stage.
    bool keeps_;
    const PartialOf& partial_of_;
    const RowsOf& rows_of_;
    const Write& write_;
    const WriteFour& write_four_;
};

}  // namespace mla::sm80::decode
