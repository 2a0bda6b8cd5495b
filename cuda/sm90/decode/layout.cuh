// The shared memory of one thread block.
//
// Query tiles come first (nine of N rows by 64 values, or those four that the scores warpgroup does
// not hold), then two rings of slots for 8 KiB tiles, 64 tokens by 64 values of the cache: the
// latent ring (eight tiles per block, two or four in a slot) and the rope ring (one). A rope tile
// is dead once the scores are computed; the probabilities of its block are written over it.
//
// The latent tiles of a block lie in the ring in the order of their values, which the output
// warpgroups have in turns: so both finish a pair of tiles at the same time, its slot is refilled
// as early as possible, and what a copy reads of a token lies together.
#pragma once

#include "../../common/pipeline.cuh"
#include "params.cuh"
#include "schedule.cuh"

namespace mla::sm90::decode {

constexpr int kTileBytes = kBlock * 64 * 2;
// What a thread block may have on sm_90: 227 KiB.
constexpr int kSharedLimit = 232448;

// What a block has to merge when it has no other piece, besides its share of the last piece's tile.
struct Owed {
    // It has to merge all of the last piece's tile, or of the first one's, since all sharers gave
    // up.
    bool last, first;
    Piece first_piece;
};

// Length of the queue of pieces.
constexpr int kPieces = 4;

// How many tiles further the next one of the same output warpgroup lies.
constexpr int kSameOutput = 2;

// What the warp that loads the cache knows of its piece.
struct Loading {
    int request, block_begin, block_end, kv_len;
};

// How the work gets to the warps of a block, with any cache: the lengths, the queue of pieces, and
// what the one that loads knows.
struct Distribution {
    int lens[kMaxRequests];
    // That of each request of an imaginary batch.
    int imaginary_length;
    Piece pieces[kPieces];
    Loading loading;
    // Whether copies of the cache spare L2.
    bool sparing;
    uint64_t piece_full[kPieces], piece_empty[kPieces];
};

template <int N, bool by_rows = false>
struct Layout {
    static constexpr int kBlockBytes = kBlock * (kLatent + kRope) * 2;
    static constexpr int kQueryTileBytes = N * 128;
    // The form for more than 64 rows (kernel.cuh).
    static constexpr bool kByRows = by_rows;
    // Query tiles in shared memory: of the latent values, and of the rope values. By rows, every
    // other one of the latent tiles, so that reads of shared memory are spread evenly over a block;
    // the first one and every other from there, and the rope tile, are held in registers.
    static constexpr int kQueryTiles = by_rows ? 4 : 9;
    static constexpr int kFirstQueryValue = by_rows ? 64 : 0,
                         kQueryValues = by_rows ? 128 : 64;  // of the first tile; from tile to tile
    static constexpr int kQueryBytes = kQueryTiles * kQueryTileBytes;
    // Tiles of a slot, which are copied and waited for together.
    static constexpr int kSlotTiles = by_rows ? 4 : 2;
    static constexpr int kLatentSlotBytes = kSlotTiles * kTileBytes;
    // As many as there is room for.
    static constexpr int kLatentSlots = by_rows ? 20 / kSlotTiles : N == 64 ? 8 : N == 32 ? 9 : 11;
    static constexpr int kRopeSlots = N == 64 && !by_rows ? 2 : 3;
    // Slots that copies may be under way to at the same time: 64 KiB. More of them make memory
    // slower, above all while it has to write lines back.
    static constexpr int kSlotsUnderWay = by_rows ? kLatentSlots : 4;
    static constexpr int kRingBytes = kLatentSlots * kLatentSlotBytes + kRopeSlots * kTileBytes;

    struct Small : Distribution {
        uint64_t latent_full[kLatentSlots], rope_full[kRopeSlots];
        uint64_t latent_empty[kLatentSlots], rope_empty[kRopeSlots];
        uint64_t lens_full, table_full;
        uint64_t query_full, query_empty;
        // There are places for the queries that are held; they are there; they have been taken.
        uint64_t held_query_empty, held_query_full, held_query_taken;
        // What lies behind the last token of a piece has been cleared, where it ends within a
        // block.
        uint64_t tail_cleared;
        // Of a block: the probabilities are there; all products of its scores have been issued (by
        // rows only).
        uint64_t scores_full[kRopeSlots], scores_issued[kRopeSlots];
        uint64_t stats_full, stats_empty;
        // What goes from the scores to the output warpgroups with the probabilities, which lie in
        // the block's rope slot: what the accumulators are multiplied by before a block is added,
        // and whether any of it is not 1, per warp.
        alignas(16) int4 any_factor[kRopeSlots];
        float factor[kRopeSlots][N < 16 ? 16 : N];
        // Row maximum (in units of log2) and sum of a finished piece, and what its output is
        // multiplied by.
        float maximum[N < 16 ? 16 : N], sum[N < 16 ? 16 : N], inverse[N < 16 ? 16 : N];
        // The largest magnitude that each output warp has of a part.
        alignas(16) float part_top[8];
        MergeRole merge_role;
        Owed owed;
    };

    static constexpr int kRingOffset = kQueryBytes;
    static constexpr int kSmallOffset = kRingOffset + kRingBytes;
    static constexpr int kBytes = kSmallOffset + int(sizeof(Small));
    // 1024 bytes at most are lost to alignment; the runtime places dynamic shared memory on 1024
    // when nothing static stands before it.
    static_assert(kBytes <= kSharedLimit, "the block does not fit an SM");
};

// The same for an e4m3 cache, which is converted after it has been read from here. A slot holds a
// block: four groups of 128 latent values of 64 tokens, then the rope values. The probabilities
// have slots of their own.
template <int N>
struct QuantisedLayout {
    static constexpr int kBlockBytes = kBlock * (kLatent + kRope);
    static constexpr bool kByRows = false;
    static constexpr int kQueryTiles = 9;
    static constexpr int kQueryTileBytes = N * 128;
    static constexpr int kQueryBytes = kQueryTiles * kQueryTileBytes;
    static constexpr int kGroupBytes = kBlock * 128, kLatentBytes = kBlock * kLatent;
    static constexpr int kLatentSlotBytes = kBlockBytes;
    static constexpr int kLatentSlots = N == 64 ? 3 : N == 32 ? 4 : 5;
    // As above; with 32 rows the products are what takes time, and tokens had better be there
    // early.
    static constexpr int kSlotsUnderWay = N == 32 ? kLatentSlots : 2;
    // Warpgroups that take turns with the scores; with 64 rows there are no registers for a second
    // one.
    static constexpr int kScoreGroups = N == 64 ? 1 : 2;
    // The rope values lie with the others.
    static constexpr int kRopeSlots = 0;
    static constexpr int kProbabilitySlots = 2, kProbabilityBytes = N * kBlock * 2;
    static constexpr int kRingBytes = kLatentSlots * kLatentSlotBytes;

    struct Small : Distribution {
        uint64_t latent_full[kLatentSlots], latent_empty[kLatentSlots];
        uint64_t lens_full, table_full;
        uint64_t scores_full[kProbabilitySlots], scores_empty[kProbabilitySlots];
        // From the first group of the scores to the second: a piece's queries are there. Back: its
        // sums of the piece are.
        uint64_t queries_ready, sums_ready;
        // From the group of a block to the other: what the block raises has been decided.
        uint64_t decided[2];
        // Of a block whose tokens end before it does: what lies behind them has been cleared.
        uint64_t tail_cleared[kProbabilitySlots];
        uint64_t stats_full, stats_empty;
        // What goes from the scores to the output warpgroups with the probabilities.
        int any_factor[kProbabilitySlots];
        alignas(16) float factor[kProbabilitySlots][N];
        // Row maximum (in units of log2) and sum of a finished piece, and what its output is
        // multiplied by.
        alignas(16) float maximum[N], sum[N], inverse[N];
        // What each warp of the scores has to say: the maxima of a block, and the sums of a piece.
        // Each has its place, since one warp may have its sums while another still compares the
        // maxima of the last block.
        alignas(16) float top_of_warp[4][N], sum_of_warp[4 * kScoreGroups][N];
        // The reference maximum of each row, and what its last rise multiplies older sums by.
        float reference[N], raised_by[N];
        // The largest magnitude among the queries that each warp fetched, as bits of bf16.
        uint32_t query_top[4];
        // The largest magnitude that each output warp has of a part.
        alignas(16) float part_top[8];
        MergeRole merge_role;
        Owed owed;
    };

    static constexpr int kProbabilityOffset = kQueryBytes;
    static constexpr int kRingOffset = kProbabilityOffset + kProbabilitySlots * kProbabilityBytes;
    static constexpr int kSmallOffset = kRingOffset + kRingBytes;
    static constexpr int kBytes = kSmallOffset + int(sizeof(Small));
    static_assert(kRingOffset % 1024 == 0 && kLatentSlotBytes % 1024 == 0,
                  "a swizzled tile starts on 1024 bytes");
    static_assert(kBytes <= kSharedLimit, "the block does not fit an SM");
};

}  // namespace mla::sm90::decode
