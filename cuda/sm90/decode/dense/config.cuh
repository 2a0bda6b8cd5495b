// The compile-time description of a kernel. The cache format decides the layout of shared memory,
// the roles of the warps, and the form of the accumulators. kernel.cuh runs any of these configs.
#pragma once

#include "accumulators.cuh"
#include "fp8/cache_producer.cuh"
#include "fp8/layout.cuh"
#include "fp8/output.cuh"
#include "fp8/query_producer.cuh"
#include "fp8/scores.cuh"
#include "plain/cache_producer.cuh"
#include "plain/layout.cuh"
#include "plain/output.cuh"
#include "plain/query_producer.cuh"
#include "plain/scores.cuh"

namespace mla::sm90::decode {

// Registers per thread if a CTA's threads share the 65 536 registers of an SM evenly; registers are
// allotted in eights.
constexpr int even_registers(int threads) { return 65536 / threads / 8 * 8; }

// The config for a cache of the queries' type. A CTA has N query rows. If a query tile has more
// than 64 rows, several CTAs do different rows of it: two, or any number (kAnyGroup).
template <typename Element, class Row, int rows, int group_ctas,
          bool by_rows = (group_ctas != 1 && Row::kLatent == 512)>
struct PlainConfig {
    using T = Element;
    using Dims = Row;
    static constexpr int N = rows, kGroupCtas = group_ctas;
    // True if the output is by rows and some query panels are held in registers. This is so with
    // more than 64 rows and latents of 512, if requests may be long.
    static constexpr bool kByRows = by_rows;
    using L = PlainLayout<N, kByRows, Dims>;
    using Control = typename L::Control;
    using LatentState = PipelineState<L::kLatentStages>;
    using RopeState = PipelineState<L::kRopeStages>;
    using Sums = std::conditional_t<kByRows, RowSums<T>, TransposedSums<T, N, Dims::kLatent>>;
    using Fragments = std::conditional_t<kByRows, RowFragments, TransposedFragments<Dims::kLatent>>;

    using CacheProducer = PlainCacheProducer<PlainConfig>;
    using QueryProducer = PlainQueryProducer<PlainConfig>;
    using Scores = PlainScores<PlainConfig>;
    using Output = PlainOutput<PlainConfig>;

    static constexpr int kThreads = 512, kScoreGroups = 1;
    // Registers per thread of the warpgroups. 0 if the even share, which all begin with, is enough.
    static constexpr int kLoadRegisters = kByRows   ? 48
                                          : N >= 32 ? 56
                                                    : 0,
                         kScoreRegisters = kByRows ? 144 : 88;
    static constexpr int kOutputRegisters = kByRows ? 160 : 184;
    static_assert(kLoadRegisters + kScoreRegisters + 2 * kOutputRegisters <=
                  4 * even_registers(kThreads));

    // Number of stages of the latent ring that a KV tile takes, and number that a step of its
    // output takes.
    static constexpr int kKvTileStages = Dims::kLatentPanels / L::kStagePanels,
                         kStepStages = kKvTileStages / Sums::kSteps;
    // Number of query panels that the scores warpgroup holds. The last of them is the rope panel,
    // if there is one. The other held panels take kHeldStages stages in the latent ring.
    static constexpr int kHeldPanels = Dims::kPanels - L::kQueryPanels,
                         kHeldRopePanels = kHeldPanels > 0 ? Dims::kRopePanels : 0,
                         kHeldStages = (kHeldPanels - kHeldRopePanels) / L::kStagePanels;
    // The output waits for a use of scores_issued before it frees stages of the same KV tile. The
    // scores of the tile that uses the barrier next need one of these, even if they wait for no
    // rope panel.
    static_assert(!kByRows || L::kLatentStages < kKvTileStages * L::kRopeStages,
                  "the output could miss a phase");
};

// The config for a cache of e4m3, whatever the queries' type. `Self` is the config itself.
template <class Self, typename Element, int rows, int group_ctas, class Scales>
struct QuantisedConfig {
    using T = Element;
    using Dims = R1Row;
    static constexpr int N = rows, kGroupCtas = group_ctas;
    using L = Fp8Layout<N, Scales>;
    using Control = typename L::Control;
    using LatentState = PipelineState<L::kLatentStages>;
    using Fragments = Fp8Fragments;

    using CacheProducer = Fp8CacheProducer<Self>;
    using QueryProducer = Fp8QueryProducer<Self>;
    using Scores = Fp8Scores<Self>;
    using Output = Fp8Output<Self>;

    static constexpr int kScoreGroups = L::kScoreGroups, kScoreThreads = 128 * kScoreGroups;
    static constexpr int kThreads = 384 + kScoreThreads;
    static constexpr int kLoadRegisters = kScoreGroups == 2 ? 48 : 40,
                         kScoreRegisters = kScoreGroups == 2 ? 88 : 120;
    static constexpr int kOutputRegisters = kScoreGroups == 2 ? 128 : 176;
    static_assert(kLoadRegisters + kScoreGroups * kScoreRegisters + 2 * kOutputRegisters <=
                  (3 + kScoreGroups) * even_registers(kThreads));
};

// With one scale for the whole cache.
template <typename Element, int rows, int group_ctas>
struct Fp8Config : QuantisedConfig<Fp8Config<Element, rows, group_ctas>, Element, rows, group_ctas,
                                   TensorScale> {};

// With a scale for each token, and rotary keys of bf16.
template <typename Element, int rows, int group_ctas>
struct TokenScalesConfig : QuantisedConfig<TokenScalesConfig<Element, rows, group_ctas>, Element,
                                           rows, group_ctas, TokenScales> {};

}  // namespace mla::sm90::decode
