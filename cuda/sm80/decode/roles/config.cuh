// One instantiation of the kernel whose warps have roles, and the layout of its shared memory.
#pragma once

#include "../config.cuh"
#include "ptx/sm80.cuh"

namespace mla::sm80::decode {

// A score warp holds `HeldSteps` of the queries' steps of 16 columns in registers, and reads the
// others from shared memory.
template <typename Element, int Latent, int Tokens, int HeldSteps>
struct RoleConfig : Config<Element, Latent, CacheFormat::plain, 2, 2, Tokens> {
    using Base = Config<Element, Latent, CacheFormat::plain, 2, 2, Tokens>;
    static constexpr bool kRoles = true;

    // The output warps are those of Base, and come first: kThreads is the number of their threads.
    static constexpr int kScoreWarps = Base::kRows / 16;
    static constexpr int kCtaThreads = Base::kThreads + 32 * kScoreWarps;

    // Minimum and maximum number of stages. One is for the tile that output warps read, one for the
    // tile that scores are made of, and the others are for tiles in flight.
    static constexpr int kMinCtaStages = 3;
    static constexpr int kMaxCtaStages = 4;

    // Number of steps of 16 columns of the queries. The rotary ones are last.
    static constexpr int kRopeSteps = 4;
    static constexpr int kLatentSteps = Latent / 16;
    static constexpr int kQuerySteps = kLatentSteps + kRopeSteps;
    static constexpr int kHeldSteps = HeldSteps;
    static_assert(kHeldSteps <= kLatentSteps);
    // Number of steps whose keys are on their way while another step is multiplied.
    static constexpr int kAhead = 2;

    struct WarpShared : Base::WarpShared {
        // Number of the item's last tiles in which some row does not see some token. Used by output
        // warps.
        int cleared;
    };
    // P and the values derived from it are double-buffered.
    struct alignas(16) Statistics {
        // Factors by which the rows' output has to be multiplied. `any_rescale` is not 0 if one of
        // a warp's 16 rows has a factor other than 1.
        float rescale[2][Base::kRows];
        int any_rescale[2][kScoreWarps];
        // Zeros, which stand for the keys of columns that cached rows do not have.
        uint32_t zeros[4];
        SplitShared<Base::kRows> rows;
        // Parameters for the function that copies queries. They are in shared memory, because this
        // function is not inlined. If it read them through a pointer to constant memory, the reads
        // would miss every cache.
        KernelParams params;
    };

    static constexpr int kProbabilityOffset = 0;
    static constexpr int kProbabilityBytes = Base::kRows * Base::kProbabilityPitch;
    // The combine exchanges sums in P's place, and score warps wait until it is done.
    static constexpr int kScoreOffset = kProbabilityOffset;
    static constexpr int kScoreBytes = 2 * kProbabilityBytes;
    static constexpr int kQueryOffset = kProbabilityOffset + 2 * kProbabilityBytes;
    static constexpr int kQueryBytes = kScoreWarps * (kQuerySteps - kHeldSteps) * 32 * 16;
    // The combine keeps a slice in the place of the queries, too.
    static constexpr int kSliceBytes = kScoreBytes + kQueryBytes;
    static_assert(kQueryOffset == kScoreOffset + kScoreBytes);
    static constexpr int kStatisticsOffset = kQueryOffset + kQueryBytes;
    static constexpr int kWarpOffset = kStatisticsOffset + int(sizeof(Statistics));
    static constexpr int kStagesOffset =
        (kWarpOffset + int(sizeof(WarpShared)) * (kCtaThreads / 32) + 63) & ~63;
    static_assert(kStatisticsOffset % 16 == 0 && kWarpOffset % 16 == 0);

    // The pitch is the same for all rotary dimensions, because queries that registers hold arrive
    // in a stage.
    static constexpr int pitch(int) { return Base::pitch(16 * kRopeSteps); }
    static constexpr size_t shared_bytes(int rope_dim, int stages) {
        return kStagesOffset + size_t(stages) * Tokens * pitch(rope_dim);
    }
    // Queries arrive at multiples of 64 bytes. Two bits of an address therefore tell four chunks of
    // a row apart.
    static_assert(kQueryOffset % 64 == 0 && kStagesOffset % 64 == 0);
    static_assert(Tokens * Base::pitch(16 * kRopeSteps) % 64 == 0);

    static constexpr int kOutputBarrier = 1;
    __device__ static void sync_output() { ptx::bar_sync(kOutputBarrier, Base::kThreads); }
};

}  // namespace mla::sm80::decode
