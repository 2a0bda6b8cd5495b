// Marks the chosen positions, a bit for each.
#pragma once

#include "bitmap.cuh"
#include "candidates.cuh"

namespace mla::sm90::topk {

// Marks the `topk` largest of `count` candidates. `count` is at least `topk`. The row sees `seen`
// positions.
template <typename S>
__device__ __forceinline__ void choose_candidates(S& s, const Buffers& buffers,
                                                  const SampleEstimate& estimate, uint32_t count,
                                                  int seen, uint32_t topk) {
    constexpr int kMax = S::kMaxPairs / 4;
    // Several of a thread's loads from shared memory are in flight together.
    const auto each_candidate = [&](const auto& visit) {
        constexpr int kBatch = 4;
#pragma unroll 1
        for (uint32_t base = threadIdx.x; base < count; base += kBatch * S::kThreads) {
            Candidate c[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
                if (base + i * S::kThreads < count)
                    c[i] = buffers.candidates[base + i * S::kThreads];
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
                if (base + i * S::kThreads < count) visit(c[i]);
        }
    };
    const auto each = [&](const auto& visit) {
        each_candidate([&](const Candidate& c) { visit(key_of(__uint_as_float(c.x))); });
    };
    Threshold t = {estimate.key(), ~0u - estimate.key(), topk, count};
    uint32_t within = estimate.range;
    if (within == 0) {
        Range range;
        each([&](uint32_t key) { range.add(key); });
        range = range_of_cta(s, range);
        within = range.largest - range.lowest;
        t = {range.lowest, within, topk, count};
    }
    narrow(s, t, within, kMax, each);
    // Among many equal logits, the positions are narrowed in the same way: lower positions rank
    // higher.
    Threshold positions = {~uint32_t(seen - 1), uint32_t(seen - 1), t.wanted, t.inside};
    if (t.inside > kMax)
        narrow(s, positions, positions.width, kMax, [&](const auto& visit) {
            each_candidate([&](const Candidate& c) {
                if (key_of(__uint_as_float(c.x)) == t.lowest) visit(~c.y);
            });
        });
    const bool whole = positions.inside == positions.wanted;

    // Key and position in one number; larger numbers are chosen earlier.
    uint64_t* pairs = reinterpret_cast<uint64_t*>(s.bins);
    // Logits are compared instead of keys. This is correct because no candidate is NaN, and no
    // logit is above +inf.
    const float low = logit_of(t.lowest), high = logit_of(t.lowest + t.width);
    each_candidate([&](const Candidate& c) {
        const float x = __uint_as_float(c.x);
        const uint32_t position = ~c.y;
        const bool above = x > high, inside = x >= low && !above;
        if (above ||
            (inside && (positions.is_above(position) || (whole && positions.is_inside(position)))))
            mark(buffers.chosen, c.y);
        else if (inside && positions.is_inside(position))
            pairs[atomicAdd(&s.pairs, 1u)] = uint64_t(key_of(x)) << 32 | position;
    });
    __syncthreads();
    if (whole) return;
    for (uint32_t i = threadIdx.x; i < positions.inside; i += S::kThreads) {
        const uint64_t own = pairs[i];
        uint32_t rank = 0;
        for (uint32_t j = 0; j < positions.inside; ++j) rank += pairs[j] > own;
        if (rank < positions.wanted) mark(buffers.chosen, ~uint32_t(own));
    }
    __syncthreads();
}

// Marks the `topk` largest logits of a whole row, which is read again for each histogram. Rows need
// this if their sample was misleading, or if they have very many equal logits.
template <typename S>
__device__ __forceinline__ void choose_row(S& s, const Buffers& buffers, const float* logits,
                                           int count, uint32_t topk) {
    constexpr int kThreads = S::kThreads;
    const auto each = [&](const auto& visit) {
        constexpr int kBatch = 4096 / kThreads;
        for (int base = threadIdx.x; base < count; base += kBatch * kThreads) {
            float x[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
                if (base + i * kThreads < count) x[i] = logits[base + i * kThreads];
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
                if (base + i * kThreads < count) visit(key_of(x[i]));
        }
    };
    Range range;
    each([&](uint32_t key) { range.add(key); });
    range = range_of_cta(s, range);
    Threshold t = {range.lowest, range.largest - range.lowest, topk, uint32_t(count)};
    narrow(s, t, t.width, 0, each);
    const bool whole = t.inside == t.wanted;
    uint32_t* equal = buffers.equal();
    const int lane = threadIdx.x % 32, words = (count + 31) / 32;
    for (int word = threadIdx.x / 32; word < words; word += S::kWarps) {
        const int at = word * 32 + lane;
        const uint32_t key = at < count ? key_of(logits[at]) : 0;
        const bool inside = at < count && t.is_inside(key);
        const uint32_t above = __ballot_sync(~0u, at < count && t.is_above(key));
        const uint32_t tied = __ballot_sync(~0u, inside);
        if (lane) continue;
        buffers.chosen[word] = whole ? above | tied : above;
        equal[word] = tied;
    }
    __syncthreads();
    if (whole) return;
    // Among equal logits, those of the lowest positions are chosen.
    for_each_word(s, equal, words, [&](int word, uint32_t bits, uint32_t before) {
        buffers.chosen[word] |= first_bits(bits, before < t.wanted ? t.wanted - before : 0);
    });
}

}  // namespace mla::sm90::topk
