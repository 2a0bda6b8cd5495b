// Dense absorbed MLA decode for Hopper.
//
// A thread block works on up to N query rows of one request; four warpgroups share the work:
//
//   load     warp 0 copies cache tiles by TMA, warp 1 the query rows, warp 2 hands out the pieces of work (schedule.cuh), warp 3 copies
//            the block table and has a first block brought into L2;
//   scores   S = Q K^T (64 x 64 per block of tokens; rows past N are ignored), softmax, P to shared memory;
//   output   two warpgroups, each 256 of the 512 latent values: O^T = O^T + V^T P^T. Cache tokens are summed over, so
//            N is as small as the number of query rows and no multiplication is spent on padding.
//
//   for each piece of this team's range (schedule.cuh):
//       load Q
//       for each block of 64 tokens:                    scores             output
//           nine tiles arrive                             S = Q K^T
//                                                         mask, maximum
//                                                         P = exp2(S - m) -> shared, factor
//                                                                            O = O * factor  (only when it is not 1)
//                                                                            O += V^T P^T
//                                                                            free the tiles
//       whole piece: O / l -> out.  Part of a tile: O / l and log-sum-exp -> workspace (merge.cuh)
//
// The running maximum follows a row's true maximum only when that has risen by more than 2^8: the
// factor is then 1 for almost every block, and the sums lose nothing, since both O and l carry the
// same scale.
//
// With more than 64 rows, two neighbouring blocks (pair = 2) do different rows of the same tiles at
// about the same time, so that the second one finds the cache rows in L2. Shared memory and the
// tensor cores bound these blocks, so that
//
//   - the scores warpgroup holds five of the nine query tiles in registers, as operands of its products: fewer bytes to read, and a
//     longer ring. These tiles come through the ring, before the first block of a piece;
//   - the output is by rows, O = O + P V (sums.cuh);
//   - half of a block's output is computed beside the next scores, and the other half waits for their last product, so that the tensor
//     cores have work during the softmax. Were all of it to wait, the tiles would be free too late.
//
// What waits for what, each barrier with one phase per use of what it guards, and who arrives:
//
//   lens_full, table_full           once: the lanes that copied them
//   piece_full[i], piece_empty[i]   a piece in the queue: lane 0 of warp 2; every thread that took it
//   latent_full[i], rope_full[i]    the copy engine. In the stead of held queries, which nobody waits for here: the lane that copies
//   latent_empty[i], rope_empty[i]  a lane of each output warp, behind its products; after held queries two lanes of each scores warp
//   query_full, query_empty         a piece's queries: the copy engine, or the lanes of warp 1; all of the scores, behind the last products
//   scores_full[i]                  a block's probabilities and factors: the lanes that write factors
//   stats_full, stats_empty         a piece's maxima and sums: the lanes that write them; all of the output
//
// and, with more than 64 rows:
//
//   held_query_empty                slots are free for them, but for the first ones, whose slots are free from the start: the lane that copies the cache
//   held_query_full                 as query_full
//   held_query_taken                all of the scores, when their reads have come back
//   tail_cleared                    all of the scores, each for the zeros that it wrote
//   scores_issued[i]                lane 0 of each scores warp, behind the last product of a block's scores
//
// A wait tells a phase from the next one, but not from the one after that. So whoever does not wait
// for every use of what a barrier guards must know by other means that the use before the one it
// waits for is over, and that the one after it cannot be. And an arrival does not wait for loads
// from shared memory that are still under way: where the copy engine writes to their place next,
// something else has to.
#pragma once

#include "../../common/swizzle.cuh"
#include "../../ptx/sm80.cuh"
#include "../../ptx/sm90.cuh"
#include "../../ptx/wgmma.cuh"
#include "layout.cuh"
#include "merge.cuh"
#include "params.cuh"
#include "schedule.cuh"
#include "sums.cuh"

namespace mla::sm90::decode {

// Named barriers beside kOutputBarrier (merge.cuh): the one behind which all warps begin but the
// one that rehearses; the scores'; and the one at which that warp learns that the others have
// begun.
constexpr int kStartBarrier = 0, kScoresBarrier = 2, kRehearsedBarrier = 4;
// The warp of the scores that brings queries into L2, while there is nothing else to do. With 16
// rows and fewer it has none itself.
constexpr int kFetchingWarp = 5;
// Copies of a batch whose cached tokens have no more bytes than this spare L2 (`cache_policy`).
constexpr int kSparingBytes = 192 << 20;
// What each thread of a block has of the 65 536 registers of a multiprocessor, which are allotted
// in eights.
constexpr int even_registers(int threads) { return 65536 / threads / 8 * 8; }

template <typename T, int N, int pair, class Places = Layout<N, pair == 2>>
struct Kernel {
    using L = Places;
    using Small = typename L::Small;
    using LatentRing = Ring<L::kLatentSlots>;
    using RopeRing = Ring<L::kRopeSlots>;

    // For more than 64 rows, see above.
    static constexpr bool kByRows = L::kByRows;
    using Sums = std::conditional_t<kByRows, RowSums<T>, TransposedSums<T, N>>;

    static constexpr int kThreads = 512, kScoreGroups = 1, kPair = pair;
    // Query rows of a tile.
    static constexpr int kTileRows = N * pair;
    // Registers per thread of the warpgroups; 0 where the even share, which all begin with, is
    // enough.
    static constexpr int kEvenRegisters = even_registers(kThreads);
    static constexpr int kLoadRegisters = kByRows   ? 48
                                          : N >= 32 ? 56
                                                    : 0,
                         kScoreRegisters = kByRows ? 144 : 88;
    static constexpr int kOutputRegisters = kByRows ? 160 : 184;
    static_assert(kLoadRegisters + kScoreRegisters + 2 * kOutputRegisters <= 4 * kEvenRegisters);
    // Slots of the latent ring that a block needs, and a step of its output.
    static constexpr int kBlockSlots = 8 / L::kSlotTiles, kStepSlots = kBlockSlots / Sums::kSteps;
    // Query tiles that the scores warpgroup holds, the last of them the rope tile, and the slots
    // that the others take in the latent ring.
    static constexpr int kHeldQueries = 9 - L::kQueryTiles,
                         kHeldQuerySlots = (kHeldQueries - 1) / L::kSlotTiles;

    const KernelParams& p;
    uint32_t base;  // shared memory
    Small& s;
    int half;  // which rows of a tile
    int team;

    __device__ uint32_t latent_slot(int slot) const {
        return base + L::kRingOffset + slot * L::kLatentSlotBytes;
    }
    __device__ uint32_t rope_slot(int slot) const {
        return latent_slot(L::kLatentSlots) + slot * kTileBytes;
    }
    __device__ static uint32_t at(const uint64_t& bar) { return ptx::shared_address(&bar); }

    // Called by one thread, before the block's first barrier. Every address is a constant: an
    // address that differs from lane to lane would be taken lane by lane.
    __device__ void initialise() const {
#pragma unroll
        for (int i = 0; i < L::kLatentSlots; ++i) {
            ptx::mbarrier_init(at(s.latent_full[i]), 1);
            ptx::mbarrier_init(at(s.latent_empty[i]), 8);
        }
#pragma unroll
        for (int i = 0; i < L::kRopeSlots; ++i) {
            ptx::mbarrier_init(at(s.rope_full[i]), 1);
            ptx::mbarrier_init(at(s.rope_empty[i]), 8);
            ptx::mbarrier_init(at(s.scores_full[i]), 32);
            if constexpr (kByRows) ptx::mbarrier_init(at(s.scores_issued[i]), 4);
            s.any_factor[i] = make_int4(0, 0, 0, 0);
        }
        initialise_queue(kPieceReaders);
        s.owed.last = s.owed.first = false;
        ptx::mbarrier_init(at(s.query_full), p.even_query ? 1 : 32);
        if constexpr (kHeldQueries > 0) {
            ptx::mbarrier_init(at(s.held_query_full), p.even_query ? 1 : 32);
            ptx::mbarrier_init(at(s.held_query_empty), 1);
            ptx::mbarrier_init(at(s.held_query_taken), 128);
            ptx::mbarrier_init(at(s.tail_cleared), 128);
        }
        ptx::mbarrier_init(at(s.query_empty), 128);
        ptx::mbarrier_init(at(s.lens_full), 32);
        ptx::mbarrier_init(at(s.table_full), 32);
        ptx::mbarrier_init(at(s.stats_full), kStatsWriters);
        ptx::mbarrier_init(at(s.stats_empty), kOutputThreads);
        ptx::fence_mbarrier_init();
    }

    __device__ void prefetch_descriptors(const TensorMaps& maps, int lane) const {
        if (lane == 0) ptx::prefetch_tensormap(&maps.cache);
        if (lane == 3) ptx::prefetch_tensormap(&maps.cache_pairs);
        if (lane == 1 && p.even_query) ptx::prefetch_tensormap(&maps.q_latent);
        if (lane == 2 && p.even_query) ptx::prefetch_tensormap(&maps.q_rope);
    }

    // Where tokens lie in the cache.
    struct Place {
        int page, token;
    };

    // Pieces come from warp 2 through a queue; a reader gives each one back when it no longer looks
    // at it. A place in it:
    struct Queue {
        // Before this one.
        uint32_t pieces = 0;

        __device__ uint32_t slot() const { return pieces % kPieces; }
        __device__ uint32_t phase() const { return pieces / kPieces & 1; }
    };
    // In the scores warpgroup, a quarter of the lanes of each warp that has rows.
    static constexpr int kStatsWriters = (N < 16 ? 16 : N) / 2;
    static constexpr int kPieceReaders = 32 * (1 + 1 + 4 + 8);  // warps 0 and 1, scores, output

    // As `initialise`; each of the readers gives back every piece.
    __device__ void initialise_queue(uint32_t readers) const {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            ptx::mbarrier_init(at(s.piece_full[i]), 1);
            ptx::mbarrier_init(at(s.piece_empty[i]), readers);
        }
    }

    __device__ const Piece* take(const Queue& q) const {
        ptx::mbarrier_wait(at(s.piece_full[q.slot()]), q.phase());
        const Piece* piece = &s.pieces[q.slot()];
        return piece->request < 0 ? nullptr : piece;
    }
    // Called by every thread that took it.
    __device__ void give_back(Queue& q) const {
        ptx::mbarrier_arrive(at(s.piece_empty[q.slot()]));
        ++q.pieces;
    }

    __device__ void hand_out(Queue& q, const Piece& piece) const {
        ptx::mbarrier_wait(at(s.piece_empty[q.slot()]), q.phase() ^ 1);
        __syncwarp();
        if ((threadIdx.x & 31) == 0) {
            s.pieces[q.slot()] = piece;
            ptx::mbarrier_arrive(at(s.piece_full[q.slot()]));
        }
        ++q.pieces;
    }

    // Asks for the lengths.
    __device__ void fetch_lengths(int lane) const {
#pragma unroll 1
        for (int i = lane; i < p.requests; i += 32)
            ptx::cp_async_4(ptx::shared_address(s.lens + i), p.kv_lens + i);
    }
    // Says that they are there.
    __device__ void finish_lengths() const {
        ptx::cp_async_wait_all();
        ptx::mbarrier_arrive(at(s.lens_full));
    }

    // A small block table is copied to shared memory while the lengths are still under way, into a
    // slot of the ring that is not in use yet; a large one is at least fetched into L2, by all
    // blocks together.
    __device__ bool table_is_small() const { return p.block_table_entries <= kTileBytes / 4; }
    __device__ uint32_t table_copy() const { return latent_slot(L::kLatentSlots - 1); }
    __device__ void fetch_table(int lane) const {
        const int64_t entries = p.block_table_entries;
        if (table_is_small()) {
            if ((reinterpret_cast<uintptr_t>(p.block_table) & 15) == 0 && (entries & 3) == 0) {
#pragma unroll 1
                for (int i = lane * 4; i < entries; i += 128)
                    ptx::cp_async_16(table_copy() + i * 4, p.block_table + i, true);
            } else {
#pragma unroll 1
                for (int i = lane; i < entries; i += 32)
                    ptx::cp_async_4(table_copy() + i * 4, p.block_table + i);
            }
        } else {
            const int64_t entry = (int64_t(blockIdx.x) * 32 + lane) * 32;
            if (entry < entries) ptx::prefetch_global_l2(p.block_table + entry);
        }
    }

    // Waits for the copy of the table. Returns where the block of tokens lies that this block
    // probably begins with; page -1 where that is not known or where its tokens do not lie
    // together.
    __device__ Place finish_table(const Schedule& schedule) const {
        ptx::cp_async_wait_all();
        __syncwarp();
        ptx::mbarrier_wait(at(s.lens_full), 0);
        const Start start = schedule.likely_start();
        Place place = {-1, 0};
        if (p.run == kBlock && start.request >= 0) {
            // Of a request without tokens the entry may be anything; what is no page of the cache
            // the copy engine leaves out.
            const int token = start.block * kBlock, page = page_of(token);
            const int64_t entry = start.request * p.block_table_stride + page;
            if (entry < p.block_table_entries)
                place = {table_is_small() ? ptx::ld_shared_s32(table_copy() + int(entry) * 4)
                                          : p.block_table[entry],
                         token - page * p.page_size};
        }
        // From then on the copy may be overwritten.
        __syncwarp();
        ptx::mbarrier_arrive(at(s.table_full));
        return place;
    }

    // Brings half of the latent tiles of a block of tokens into L2. The memory is idle until the
    // first copies, which come when the work has been divided; it is slower with all of a block at
    // once.
    __device__ void prefetch_block(const TensorMaps& maps, Place block) const {
        const ptx::CachePolicy policy = ptx::createpolicy_evict_first();
#pragma unroll 1
        for (int i = half; i < kBlockSlots / 2; i += pair)
            ptx::cp_async_bulk_prefetch_tensor(&maps.cache_pairs, policy, 0, block.token, 0,
                                               i * L::kSlotTiles / 2, block.page);
    }

    // Brings the queries of a small batch into L2, each block some of them, `most` rows at most:
    // the copy engine asks for them only when there are pieces, and in many blocks at the same
    // time.
    __device__ void prefetch_queries(int lane) const {
        constexpr int most = 32, lines = (kLatent + kRope) * 2 / 128;
        const int rows = p.requests * p.query_len * p.heads,
                  own = unsigned(rows + gridDim.x - 1) / gridDim.x;
        if (!p.even_query || p.cu_q_lens || own > most) return;
#pragma unroll 1
        for (int i = lane; i < own * lines; i += 32) {
            const int of_block = unsigned(i) / lines, line = i - of_block * lines,
                      row = blockIdx.x * own + of_block;
            const char* latent =
                static_cast<const char*>(p.q_latent) + row * p.q_latent_head_stride * 2;
            const char* rope = static_cast<const char*>(p.q_rope) + row * p.q_rope_head_stride * 2;
            if (row < rows) ptx::prefetch_global_l2(line < lines - 1 ? latent + line * 128 : rope);
        }
        __syncwarp();
    }

    __device__ int first_row(const Piece& piece) const { return piece.first_row + half * N; }
    __device__ int rows(const Piece& piece) const {
        return min(max(piece.q_len * p.heads - first_row(piece), 0), N);
    }

    // ----------------------------------------------------------------------------------------------------
    // load

    // The page of a request that holds a token.
    __device__ int page_of(int token) const {
        return p.page_shift >= 0 ? token >> p.page_shift : unsigned(token) / unsigned(p.page_size);
    }

    // Waits until few enough copies are under way for the next one, to the slot at hand.
    template <typename Slots>
    __device__ void wait_for_copies(const Slots& next) const {
        if constexpr (L::kSlotsUnderWay < L::kLatentSlots) {
            const Slots before = next.back(L::kSlotsUnderWay);
            ptx::mbarrier_wait(at(s.latent_full[before.slot]), before.phase);
        }
    }

    // Copies the nine tiles of a block as slots become free: whole, or run by run from up to four
    // pages.
    template <bool whole>
    __device__ __forceinline__ void load_block(const TensorMaps& maps, LatentRing& latent,
                                               RopeRing& rope, int tokens, const int (&page)[4],
                                               const int (&first)[4]) const {
        const ptx::CachePolicy policy = cache_policy();
        const auto load_tile = [&](uint32_t full, uint32_t slot, int x) {
            if (whole) {
                ptx::cp_async_bulk_tensor(&maps.cache, slot, full, policy, x, first[0], page[0]);
            } else {
#pragma unroll 1
                for (int i = 0; i * 16 < tokens; ++i) {
                    const int f = i == 0   ? first[0]
                                  : i == 1 ? first[1]
                                  : i == 2 ? first[2]
                                           : first[3];
                    const int z = i == 0 ? page[0] : i == 1 ? page[1] : i == 2 ? page[2] : page[3];
                    ptx::cp_async_bulk_tensor(&maps.cache, slot + i * 2048, full, policy, x, f, z);
                }
            }
        };
#pragma unroll 1
        for (int i = 0; i < 8; i += L::kSlotTiles) {
            const uint32_t full = at(s.latent_full[latent.slot]), slot = latent_slot(latent.slot);
            ptx::mbarrier_wait(at(s.latent_empty[latent.slot]), latent.phase ^ 1);
            wait_for_copies(latent);
            ptx::mbarrier_arrive_expect_tx(full, tokens * 128 * L::kSlotTiles);
            if (whole) {
                ptx::cp_async_bulk_tensor(&maps.cache_pairs, slot, full, policy, 0, first[0], 0,
                                          i / 2, page[0]);
            } else {
#pragma unroll 1
                for (int j = 0; j < L::kSlotTiles; ++j)
                    load_tile(full, slot + j * kTileBytes, (i + j) * 64);
            }
            latent.advance(1);
        }
        ptx::mbarrier_wait(at(s.rope_empty[rope.slot]), rope.phase ^ 1);
        ptx::mbarrier_arrive_expect_tx(at(s.rope_full[rope.slot]), tokens * 128);
        load_tile(at(s.rope_full[rope.slot]), rope_slot(rope.slot), kLatent);
        rope.advance(1);
    }

    // What is read once need not push out what is in L2, least of all lines that were written: that
    // costs writes beside the reads. But a long batch is read faster when it may have all of L2.
    __device__ ptx::CachePolicy cache_policy() const {
        return s.sparing ? ptx::createpolicy_evict_first() : ptx::CachePolicy{};
    }

    // Calls load(whole, begins, tokens, page, first) for each block: as one run, or as up to four
    // that lie apart; `begins` says that it is the piece's first one. One lane does. This warp
    // knows the first piece without the queue.
    template <typename Load>
    __device__ void load_blocks(const Schedule& schedule, const Piece& first_piece,
                                Load load) const {
        const int lane = threadIdx.x & 31;
        // Tokens that lie together in a page are copied together: a whole block, or 16.
        const int runs = p.run == kBlock ? 1 : 4;
        bool copied = table_is_small();
        const auto keep = [&](const Piece& piece) {
            __syncwarp();
            if (lane == 0)
                s.loading = {piece.request, piece.block_begin, piece.block_end, piece.kv_len};
            __syncwarp();
        };
        if (lane == 0) s.sparing = schedule.blocks() <= kSparingBytes / L::kBlockBytes;
        keep(first_piece);
        Queue queue;
        const Loading& piece = s.loading;
        while (piece.request >= 0) {
            const int begin = piece.block_begin, end = piece.block_end;
            // Each lane holds the place of one run: of the current 32 runs, and of the 32 after
            // them.
            const auto place_of_run = [&](int run) {
                const int token = run * p.run, page = page_of(token);
                if (token >= piece.kv_len) return Place{-1, 0};
                const int64_t entry = piece.request * p.block_table_stride + page;
                return Place{copied ? ptx::ld_shared_s32(table_copy() + int(entry) * 4)
                                    : p.block_table[entry],
                             token - page * p.page_size};
            };
            if (copied) ptx::mbarrier_wait(at(s.table_full), 0);
            Place current = place_of_run(begin * runs + lane), following = {};
            int run = 0;
#pragma unroll 1
            for (int block = begin; block < end; ++block, run += runs) {
                if (run == 32) {
                    run = 0;
                    current = following;
                }
                int page[4], first[4];
                if (runs == 1) {
                    page[0] = __shfl_sync(~0u, current.page, run);
                    first[0] = __shfl_sync(~0u, current.token, run);
                    if (lane == 0) load(std::true_type(), block == begin, kBlock, page, first);
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        page[i] = __shfl_sync(~0u, current.page, run + i);
                        first[i] = __shfl_sync(~0u, current.token, run + i);
                    }
                    const int tokens = min((piece.kv_len - block * kBlock + 15) & ~15, kBlock);
                    if (lane == 0) load(std::false_type(), block == begin, tokens, page, first);
                }
                __syncwarp();
                if (run == 0) {
                    // Not before the first copies. These go elsewhere than the copy of the table,
                    // later ones may not: by then it has been read.
                    following = place_of_run(block * runs + 32 + lane);
                    copied = false;
                    __syncwarp();
                }
            }
            give_back(queue);
            ptx::mbarrier_wait(at(s.piece_full[queue.slot()]), queue.phase());
            keep(s.pieces[queue.slot()]);
        }
    }

    __device__ void load_cache(const TensorMaps& maps, const Schedule& schedule,
                               const Piece& first_piece) const {
        LatentRing latent;
        RopeRing rope;
        uint32_t held = 0;
        load_blocks(
            schedule, first_piece,
            [&](auto whole, bool begins, int tokens, const int (&page)[4], const int (&first)[4]) {
                if (begins) make_room_for_held_queries(latent, rope, held++);
                load_block<whole.value>(maps, latent, rope, tokens, page, first);
            });
    }

    __device__ void load_queries(const TensorMaps& maps) {
        if (p.even_query)
            load_even_query(&maps.q_latent, &maps.q_rope);
        else
            load_query();
    }

    // The queries that are held go through the rings, before the first block of each piece.
    __device__ static void skip_held_queries(LatentRing& latent, RopeRing& rope) {
        if constexpr (kHeldQueries > 0) {
            latent.advance(kHeldQuerySlots);
            rope.advance(1);
        }
    }
    // Called by the thread that fills the rings, which alone waits for every use of a slot: a wait
    // tells a phase from the next one, but not from the one after that. For the same reason it
    // waits until the queries of the piece before have been taken.
    __device__ void make_room_for_held_queries(LatentRing& latent, RopeRing& rope,
                                               uint32_t held) const {
        if constexpr (kHeldQueries > 0) {
            // The slots of the first ones are free from the start, so their copy does not wait for
            // this thread: they may even have been taken by now, and this thread must not wait,
            // either.
            if (held > 0) {
                ptx::mbarrier_wait(at(s.held_query_taken), (held & 1) ^ 1);
#pragma unroll
                for (int i = 0; i < kHeldQuerySlots; ++i)
                    ptx::mbarrier_wait(at(s.latent_empty[latent.slot + i]), latent.phase ^ 1);
                ptx::mbarrier_wait(at(s.rope_empty[rope.slot]), rope.phase ^ 1);
                ptx::mbarrier_arrive(at(s.held_query_empty));
            }
            // Nobody waits for these, but they count every use of a slot.
#pragma unroll
            for (int i = 0; i < kHeldQuerySlots; ++i)
                ptx::mbarrier_arrive(at(s.latent_full[latent.slot + i]));
            ptx::mbarrier_arrive(at(s.rope_full[rope.slot]));
            skip_held_queries(latent, rope);
        }
    }
    // Where such a tile lies.
    __device__ uint32_t held_query_slot(int tile, const LatentRing& latent,
                                        const RopeRing& rope) const {
        return tile == kHeldQueries - 1 ? rope_slot(rope.slot)
                                        : latent_slot(latent.slot) + tile * kTileBytes;
    }

    // Calls load(piece, full, tiles, where) for the queries of each piece: those that are held,
    // then those that stay in shared memory. where(tile) gives the tile's place and its first
    // value.
    template <typename Load>
    __device__ void load_query_tiles(Load load) {
        uint32_t held = 0;
        LatentRing latent;
        RopeRing rope;
        Queue queue;
        for (const Piece* next; (next = take(queue)); give_back(queue)) {
            const Piece& piece = *next;
            const int blocks = piece.block_end - piece.block_begin;
            // One place for both, since code is fetched as it is run.
#pragma unroll 1
            for (int hold = kHeldQueries > 0 && blocks > 0; hold >= 0; --hold) {
                // No lane may be left behind at a wait while the one that copies goes on.
                __syncwarp();
                if (!hold)
                    ptx::mbarrier_wait(at(s.query_empty), (queue.pieces & 1) ^ 1);
                else if (held++ > 0)
                    ptx::mbarrier_wait(at(s.held_query_empty), held & 1);
                load(piece, hold ? s.held_query_full : s.query_full,
                     hold ? kHeldQueries : L::kQueryTiles, [&](int tile) {
                         if (hold)
                             return make_int2(
                                 held_query_slot(tile, latent, rope),
                                 tile == kHeldQueries - 1 ? kLatent : tile * L::kQueryValues);
                         return make_int2(base + tile * L::kQueryTileBytes,
                                          L::kFirstQueryValue + tile * L::kQueryValues);
                     });
            }
            if (blocks > 0) {
                skip_held_queries(latent, rope);
                latent.skip(blocks * kBlockSlots);
                rope.skip(blocks);
            }
        }
    }

    // The latent tiles that come together are a box of N rows, all of them or every other one.
    __device__ void load_even_query(const CUtensorMap* latent, const CUtensorMap* rope) {
        load_query_tiles([&](const Piece& piece, const uint64_t& full, int tiles, auto where) {
            if ((threadIdx.x & 31) != 0) return;
            ptx::mbarrier_arrive_expect_tx(at(full), tiles * L::kQueryTileBytes);
            const int row = piece.q_begin * p.heads + first_row(piece);
            const int2 first = where(0), last = where(tiles - 1);
            ptx::cp_async_bulk_tensor(latent, first.x, at(full), 0, row, first.y / 64, 0);
            if (last.y == kLatent) ptx::cp_async_bulk_tensor(rope, last.x, at(full), 0, row, 0, 0);
        });
    }

    // For queries that are not evenly spaced.
    __device__ void load_query() {
        const int thread = threadIdx.x & 31;
        // Tails that have been waited for, and whether the piece before this one has another.
        uint32_t tails = 0;
        bool tail = false;
        load_query_tiles([&](const Piece& piece, const uint64_t& full, int tiles, auto where) {
            const int first = first_row(piece), valid = rows(piece);
#pragma unroll 1
            for (int tile = 0; tile < tiles; ++tile) {
                const int2 to = where(tile);
                const bool latent = to.y < kLatent;
                const char* source = latent ? static_cast<const char*>(p.q_latent) + to.y * 2
                                            : static_cast<const char*>(p.q_rope);
                const int64_t token_stride =
                    latent ? p.q_latent_token_stride : p.q_rope_token_stride;
                const int64_t head_stride = latent ? p.q_latent_head_stride : p.q_rope_head_stride;
                for (int i = thread; i < N * 8; i += 32) {
                    const int r = i / 8, chunk = i & 7;
                    const int row = first + r, token = token_of(row, p.inverse_heads),
                              head = row - token * p.heads;
                    const char* own =
                        source + ((piece.q_begin + token) * token_stride + head * head_stride) * 2 +
                        chunk * 16;
                    ptx::cp_async_16(to.x + swizzled<128>(r, chunk), r < valid ? own : source,
                                     r < valid);
                }
            }
            ptx::cp_async_wait_all();
            ptx::fence_proxy_async();
            if (kHeldQueries > 0 && tiles == L::kQueryTiles) {
                // The next queries to be held may come to where the piece before this one ended:
                // these did not, the ring is too long. There is no later tail before this piece's
                // queries are there, so the wait cannot miss its phase.
                if (tail) ptx::mbarrier_wait(at(s.tail_cleared), tails++ & 1);
                tail =
                    piece.block_begin < piece.block_end && piece.block_end * kBlock > piece.kv_len;
            }
            ptx::mbarrier_arrive(at(full));
        });
    }

    // --------------------------------------------------------------------------------------------------
    // scores

    __device__ void scores() {
        const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
        const bool has_rows = warp * 16 < N;
        const int row0 = warp * 16 + (lane >> 2), row1 = row0 + 8;
        LatentRing latent;
        // `said` counts blocks alone: where what the scores say of a block lies. Held queries take
        // slots of `rope`, too.
        RopeRing rope, said;
        // Pieces whose queries have been held.
        uint32_t held = 0;
        Queue queue;
        for (const Piece* next; (next = take(queue)); give_back(queue)) {
            const Piece& piece = *next;
            const int begin = piece.block_begin, end = piece.block_end, kv_len = piece.kv_len;
            // Rows attend to the tokens before their limit.
            const int first = first_row(piece);
            int limit0 = piece.kv_len, limit1 = piece.kv_len, no_mask_before = piece.kv_len;
            if (p.causal) {
                limit0 = min(piece.kv_len, piece.kv_len - piece.q_len +
                                               token_of(first + row0, p.inverse_heads) + 1);
                limit1 = min(piece.kv_len, piece.kv_len - piece.q_len +
                                               token_of(first + row1, p.inverse_heads) + 1);
                no_mask_before = piece.kv_len - piece.q_len + 1;
            }
            float max0 = -INFINITY, max1 = -INFINITY, sum0 = 0.f, sum1 = 0.f;
            uint32_t query[kHeldQueries > 0 ? kHeldQueries : 1][16];
            if constexpr (kHeldQueries > 0) {
                if (begin < end) hold_queries(query, latent, rope, held++, warp, lane);
            }
            ptx::mbarrier_wait(at(s.query_full), queue.pieces & 1);
            for (int block = begin; block < end; ++block) {
                float d[32];
                LatentRing tile = latent.uniform();
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int part = i % L::kSlotTiles;
                    if (part == 0) ptx::mbarrier_wait(at(s.latent_full[tile.slot]), tile.phase);
                    multiply_tile(d, query, i, latent_slot(tile.slot) + part * kTileBytes, i > 0);
                    if (part == L::kSlotTiles - 1) tile.advance(1);
                }
                ptx::mbarrier_wait(at(s.rope_full[rope.slot]), rope.phase);
                multiply_tile(d, query, 8, rope_slot(rope.uniform().slot), 1);
                ptx::wgmma_commit_group();
                if (kByRows && lane == 0) ptx::mbarrier_arrive(at(s.scores_issued[said.slot]));
                ptx::wgmma_wait_group<0>();
                if (block + 1 == end) ptx::mbarrier_arrive(at(s.query_empty));

                float factor0 = 1.f, factor1 = 1.f;
                if (has_rows) {
                    if ((block + 1) * kBlock > no_mask_before) {
                        const int column = block * kBlock + 2 * (lane & 3);
#pragma unroll
                        for (int i = 0; i < 8; ++i) {
                            if (column + 8 * i >= limit0) d[4 * i] = -INFINITY;
                            if (column + 8 * i + 1 >= limit0) d[4 * i + 1] = -INFINITY;
                            if (column + 8 * i >= limit1) d[4 * i + 2] = -INFINITY;
                            if (column + 8 * i + 1 >= limit1) d[4 * i + 3] = -INFINITY;
                        }
                    }
                    const float top0 = row_maximum(d, 0), top1 = row_maximum(d, 2);
                    factor0 = raise_lazily(max0, top0);
                    factor1 = raise_lazily(max1, top1);
                    exponentials(d, 0, max0, sum0, factor0);
                    exponentials(d, 2, max1, sum1, factor1);
                }
                // What follows writes to tiles that the other warps' products have to be done with.
                ptx::bar_sync(kScoresBarrier, 128);
                const int tokens = kv_len - block * kBlock;
                if (tokens < kBlock) {
                    clear_tail(latent, tokens, thread);
                    if constexpr (kHeldQueries > 0) {
                        // Behind the zeros of all, as for held queries.
                        ptx::bar_sync(kScoresBarrier, 128);
                        ptx::mbarrier_arrive(at(s.tail_cleared));
                    }
                }
                // The copy engine waited for the same before it filled the slot.
                ptx::mbarrier_wait(at(s.rope_empty[rope.slot]), rope.phase ^ 1);
                if (has_rows) {
                    const bool any = __any_sync(
                        ~0u, (factor0 != 1.f && row0 < N) || (factor1 != 1.f && row1 < N));
                    if ((lane & 3) == 0) {
                        s.factor[said.slot][row0] = factor0;
                        s.factor[said.slot][row1] = factor1;
                    }
                    if (lane == 0) reinterpret_cast<int*>(&s.any_factor[said.slot])[warp] = any;
                    store_probabilities(d, rope_slot(rope.slot), warp, lane);
                }
                ptx::fence_proxy_async();
                __syncwarp();
                // Those who wrote factors; for the others' probabilities, too.
                if ((lane & 3) == 0) ptx::mbarrier_arrive(at(s.scores_full[said.slot]));
                latent.advance(kBlockSlots);
                rope.advance(1);
                said.advance(1);
            }
            if (begin == end) ptx::mbarrier_arrive(at(s.query_empty));

            ptx::mbarrier_wait(at(s.stats_empty), (queue.pieces & 1) ^ 1);
            if (has_rows) {
                sum0 += __shfl_xor_sync(~0u, sum0, 1);
                sum0 += __shfl_xor_sync(~0u, sum0, 2);
                sum1 += __shfl_xor_sync(~0u, sum1, 1);
                sum1 += __shfl_xor_sync(~0u, sum1, 2);
                if ((lane & 3) == 0) {
                    s.maximum[row0] = max0;
                    s.maximum[row1] = max1;
                    s.sum[row0] = sum0;
                    s.sum[row1] = sum1;
                    s.inverse[row0] = inverse_of(sum0);
                    s.inverse[row1] = inverse_of(sum1);
                    ptx::mbarrier_arrive(at(s.stats_full));
                    if (piece.parts == 1) {
                        const int valid = rows(piece);
#pragma unroll 1
                        for (int i = 0; i < 2; ++i) {
                            const int row = i ? row1 : row0;
                            if (row < valid)
                                write_lse(p, first + row, piece.q_begin,
                                          log2_sum_exp2(i ? max1 : max0, i ? sum1 : sum0));
                        }
                    }
                }
            }
        }
    }

    // d += Q tile times K tile, transposed: 64 of the 576 summed values.
    template <typename Queries>
    __device__ void multiply_tile(float (&d)[32], const Queries& query, int query_tile,
                                  uint32_t cache_tile, int accumulate) const {
        const uint64_t b = ptx::wgmma_descriptor(cache_tile);
        ptx::wgmma_fence();
        // By rows, every other tile is in registers.
        constexpr int stride = L::kQueryValues / 64;
        if (query_tile % stride == L::kFirstQueryValue / 64) {
            const uint64_t a =
                ptx::wgmma_descriptor(base + query_tile / stride * L::kQueryTileBytes);
#pragma unroll
            for (int k = 0; k < 4; ++k)
                ptx::Wgmma<T, 64, ptx::Major::K>::run(d, a + 2 * k, b + 2 * k,
                                                      k > 0 ? 1 : accumulate);
        } else if constexpr (kHeldQueries > 0) {
            const uint32_t* a = query[query_tile / stride];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                ptx::WgmmaFromRegisters<T, 64>::run(d, a + 4 * k, b + 2 * k,
                                                    k > 0 ? 1 : accumulate);
        }
    }

    // Takes the queries to be held from the rings, as operands of products.
    template <typename Queries>
    __device__ void hold_queries(Queries& query, LatentRing& latent, RopeRing& rope, uint32_t held,
                                 int warp, int lane) const {
        ptx::mbarrier_wait(at(s.held_query_full), held & 1);
        const int row = warp * 16 + (lane & 15);
#pragma unroll
        for (int t = 0; t < kHeldQueries; ++t)
#pragma unroll
            for (int k = 0; k < 4; ++k)
                ptx::ldmatrix_x4(
                    *reinterpret_cast<uint32_t (*)[4]>(&query[t][4 * k]),
                    held_query_slot(t, latent, rope) + swizzled<128>(row, 2 * k + (lane >> 4)));
        // The copy engine is going to write where these lanes have read. The arrivals do not wait
        // for what was read to come; the fence does, and behind the barrier of the warpgroup that
        // holds for all (docs/kernels/decode.md, "Correctness").
        ptx::fence_proxy_async();
        ptx::bar_sync(kScoresBarrier, 128);
        ptx::mbarrier_arrive(at(s.held_query_taken));
        __syncwarp();
        // In the stead of the eight warps that free a block's slots.
        if (lane < 2) {
            ptx::mbarrier_arrive(at(s.rope_empty[rope.slot]));
#pragma unroll
            for (int i = 0; i < kHeldQuerySlots; ++i)
                ptx::mbarrier_arrive(at(s.latent_empty[latent.slot + i]));
        }
        skip_held_queries(latent, rope);
    }

    // Zeroes the latent values of tokens past the end: there may be anything there, and 0 * NaN is
    // NaN.
    __device__ void clear_tail(LatentRing tile, int tokens, int thread) const {
        for (int t = 0; t < 8 / L::kSlotTiles; ++t) {
            const uint32_t slot = latent_slot(tile.slot);
            for (int i = tokens * 8 + thread; i < kBlock * 8; i += 128) {
#pragma unroll
                for (int j = 0; j < L::kSlotTiles; ++j)
                    ptx::st_shared_v4(slot + j * kTileBytes + i * 16, make_uint4(0, 0, 0, 0));
            }
            tile.advance(1);
        }
    }

    // Maximum of a row's 64 scores, in units of log2.
    __device__ float row_maximum(const float (&d)[32], int first) const {
        float m = fmaxf(d[first], d[first + 1]), n = fmaxf(d[first + 4], d[first + 5]);
#pragma unroll
        for (int i = 2; i < 8; i += 2) {
            m = fmaxf(m, fmaxf(d[4 * i + first], d[4 * i + first + 1]));
            n = fmaxf(n, fmaxf(d[4 * i + 4 + first], d[4 * i + 5 + first]));
        }
        m = fmaxf(m, n);
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
        return fmaxf(m, __shfl_xor_sync(~0u, m, 2)) * p.scale_log2;
    }

    __device__ void exponentials(float (&d)[32], int first, float maximum, float& sum,
                                 float factor) const {
        const float offset = offset_of(maximum);
        float total[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float& x = d[4 * i + first + j];
                x = ptx::ex2_approx(fmaf(x, p.scale_log2, -offset));
                total[j] += x;
            }
        }
        sum = fmaf(sum, factor, total[0] + total[1]);
    }

    // Writes P as a K-major tile: row = query row, 64 tokens.
    __device__ static void store_probabilities(const float (&d)[32], uint32_t tile, int warp,
                                               int lane) {
        const int row = warp * 16 + (lane & 15);
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const int chunk = i + (lane >> 4);
            ptx::stmatrix_x4(tile + swizzled<128>(row, chunk),
                             ptx::cvt_rn_x2<T>(d[4 * i], d[4 * i + 1]),
                             ptx::cvt_rn_x2<T>(d[4 * i + 2], d[4 * i + 3]),
                             ptx::cvt_rn_x2<T>(d[4 * i + 4], d[4 * i + 5]),
                             ptx::cvt_rn_x2<T>(d[4 * i + 6], d[4 * i + 7]));
        }
    }

    // --------------------------------------------------------------------------------------------------
    // output

    __device__ static void free_slot(const uint64_t& bar, int lane) {
        if (lane == 0) ptx::mbarrier_arrive(at(bar));
    }

    __device__ void output() {
        const int thread = threadIdx.x - 256, group = __shfl_sync(~0u, thread >> 7, 0),
                  lane = thread & 31;
        LatentRing latent;
        RopeRing rope, said;
        Queue queue;
        for (const Piece* next; (next = take(queue)); give_back(queue)) {
            const Piece& piece = *next;
            const int begin = piece.block_begin, end = piece.block_end;
            Sums sums;
            sums.clear();
            if (begin < end) skip_held_queries(latent, rope);
#pragma unroll 1
            for (int block = begin; block < end; ++block) {
                ptx::mbarrier_wait(at(s.scores_full[said.slot]), said.phase);
                const int4 any = s.any_factor[said.slot];
                if (block > begin) sums.rescale(s.factor[said.slot], any, thread);
                const uint32_t probabilities = rope_slot(rope.uniform().slot);
                // The tiles of a slot belong to both groups in turn.
                LatentRing tile = latent.uniform(), done = tile;
                const auto finish_step = [&](auto pending) {
                    ptx::wgmma_wait_group<pending.value>();
#pragma unroll
                    for (int i = 0; i < kStepSlots; ++i)
                        free_slot(s.latent_empty[done.slot + i], lane);
                    done.advance(kStepSlots);
                };
#pragma unroll
                for (int step = 0; step < Sums::kSteps; ++step) {
                    if (kByRows && step == Sums::kSteps - 1) {
                        // What is left is for the time of the next block's softmax.
                        finish_step(std::integral_constant<int, 0>());
                        RopeRing next = said;
                        next.advance(1);
                        // That of a piece's first block is not waited for. But this one's barrier
                        // has had its use before, since that block's probabilities came, and cannot
                        // have its next one, which needs a rope slot that is given back below.
                        if (block + 1 < end)
                            ptx::mbarrier_wait(at(s.scores_issued[next.slot]), next.phase);
                    }
#pragma unroll
                    for (int i = 0; i < kStepSlots; ++i)
                        ptx::mbarrier_wait(at(s.latent_full[tile.slot + i]), tile.phase);
                    ptx::wgmma_fence();
                    sums.add(step, probabilities, latent_slot(tile.slot) + group * kTileBytes);
                    ptx::wgmma_commit_group();
                    tile.advance(kStepSlots);
                }
                if constexpr (Sums::kSteps == 4) {
                    finish_step(std::integral_constant<int, 3>());
                    finish_step(std::integral_constant<int, 2>());
                }
                if constexpr (!kByRows) finish_step(std::integral_constant<int, 1>());
                finish_step(std::integral_constant<int, 0>());
                free_slot(s.rope_empty[rope.slot], lane);
                latent.advance(kBlockSlots);
                rope.advance(1);
                said.advance(1);
            }
            ptx::mbarrier_wait(at(s.stats_full), queue.pieces & 1);
            if (piece.parts == 1) {
                sums.write(output_rows(piece), s.inverse, thread);
                ptx::mbarrier_arrive(at(s.stats_empty));
            } else {
                deliver(piece, sums, thread);
            }
        }
        merge<Fragments>(queue, thread);
    }

    __device__ OutputRows<T> output_rows(const Piece& piece) const {
        return {static_cast<T*>(p.out), p.out_token_stride, p.out_head_stride, p.heads,
                p.inverse_heads,        piece.q_begin,      first_row(piece),  rows(piece)};
    }

    // What the output of a row with this sum is multiplied by at the end.
    __device__ float inverse_of(float sum) const {
        return sum > 0.f ? __fdividef(p.out_scale, sum) : 0.f;
    }

    // A partial's place in the workspace. A team has at most two unfinished tiles: one that begins
    // in its range and one that began before it.
    __device__ char* partial(int of_team, bool begins) const {
        return p.partials + (begins * gridDim.x + of_team * pair + half) * PartialLayout<N>::kBytes;
    }

    using Fragments = std::conditional_t<kByRows, RowFragments, TransposedFragments>;
    using M = MergeLayout<N, Fragments::kGroupRows>;
    // The queries and the ring are idle when there is no other piece, and hold what is merged.
    __device__ uint32_t kept_share() const { return base + kFewParts * N * 4; }

    // What a sharer keeps of its part.
    __device__ Share kept(const Piece& piece) const {
        return piece.last && piece.parts <= kFewParts
                   ? Share::of(M::kUnits, piece.part, piece.sharers)
                   : Share{0, 0};
    }

    // Puts a part of a tile into the workspace, except for what this block merges itself: that
    // stays in shared memory. Says so, and notes what the block owes to the tile.
    template <typename AnySums>
    __device__ void deliver(const Piece& piece, AnySums& sums, int thread) {
        using Partial = PartialLayout<N>;
        char* mine = partial(team, piece.part == 0);
        const Share share = kept(piece);
        const unsigned first = share.begin * M::kUnit, count = (share.end - share.begin) * M::kUnit;
        const int scale = scale_of_part(sums.largest(s.inverse, thread), thread);
        uint4 packed[AnySums::kVectors];
        sums.pack_part(packed, s.inverse, power_of_two(scale), thread);
        const int own = AnySums::first_vector(thread);
        uint4* to = reinterpret_cast<uint4*>(mine) + own;
        if (count == 0) {
#pragma unroll
            for (int i = 0; i < AnySums::kVectors; ++i) to[AnySums::vector(i)] = packed[i];
        } else {
#pragma unroll
            for (int i = 0; i < AnySums::kVectors; ++i) {
                const unsigned of_share = AnySums::vector(i) + own - first;
                if (of_share < count)
                    ptx::st_shared_v4(kept_share() + of_share * 16, packed[i]);
                else
                    to[AnySums::vector(i)] = packed[i];
            }
        }
        if (thread < N) {
            const int row = Fragments::row_of_tile(thread);
            *reinterpret_cast<float*>(mine + Partial::lse_offset(thread)) =
                log2_sum_exp2(s.maximum[row], s.sum[row]);
            *reinterpret_cast<float*>(mine + Partial::scale_offset(thread)) = power_of_two(-scale);
        }
        ptx::mbarrier_arrive(at(s.stats_empty));
        ptx::bar_sync(kOutputBarrier, kOutputThreads);
        // Until this thread's writes and the others' have arrived, the others prepare to merge.
        if (piece.last) {
            if (thread == 0) counters_of(piece)->arrive_sharer();
            return;
        }
        if (thread == 0) {
            s.owed.first = counters_of(piece)->arrive(piece.parts, piece.sharers) == MergeRole::all;
            leave(piece);
        }
        ptx::bar_sync(kOutputBarrier, kOutputThreads);
        // Only its first piece can be a part of a tile and have others after it.
        if (s.owed.first) {
            if (thread == 0) s.owed.first_piece = piece;
            ptx::bar_sync(kOutputBarrier, kOutputThreads);
        }
    }

    // 2^x, of which a float has to be the inverse, too.
    __device__ static float power_of_two(int x) { return __int_as_float((127 + x) << 23); }

    // Returns the power of two that brings the largest finite value of a part to 2^14 or more, and
    // below 2^15, given this thread's largest. In a row with others, finite values may become
    // infinite. All products have been done when a thread returns.
    __device__ int scale_of_part(float top, int thread) const {
        const uint32_t of_warp = __reduce_max_sync(~0u, __float_as_uint(top));
        if ((thread & 31) == 0) s.part_top[thread >> 5] = __uint_as_float(of_warp);
        ptx::bar_sync(kOutputBarrier, kOutputThreads);
        const float4 a = *reinterpret_cast<const float4*>(s.part_top),
                     b = *reinterpret_cast<const float4*>(s.part_top + 4);
        top =
            fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
        return min(127 + 14 - int(__float_as_uint(top) >> 23), 100);
    }

    __device__ MergeCounters* counters_of(const Piece& piece) const {
        return p.counters + piece.first_team * pair + half;
    }

    // Called once by each part's block, when it no longer looks at the counters.
    __device__ void leave(const Piece& piece) const {
        if (counters_of(piece)->leave() == piece.parts) counters_of(piece)->reset();
    }

    // Waits until this block may merge its share. If that takes too long, writes what it kept of
    // its part to the workspace, too.
    __device__ bool await(const Piece& piece, int thread) {
        // Not the thread that arrives, which is still at that.
        if (thread == kOutputThreads / 2) s.merge_role = counters_of(piece)->await(piece.parts);
        ptx::bar_sync(kOutputBarrier, kOutputThreads);
        if (s.merge_role == MergeRole::share) return true;
        const Share share = kept(piece);
        uint4* mine = reinterpret_cast<uint4*>(partial(team, piece.part == 0));
        for (int i = share.begin * M::kUnit + thread; i < share.end * M::kUnit; i += kOutputThreads)
            mine[i] = ptx::ld_shared_v4(kept_share() + (i - share.begin * M::kUnit) * 16);
        ptx::bar_sync(kOutputBarrier, kOutputThreads);
        if (thread == 0) {
            s.owed.last = counters_of(piece)->give_up(piece.parts, piece.sharers) == MergeRole::all;
            leave(piece);
        }
        ptx::bar_sync(kOutputBarrier, kOutputThreads);
        return false;
    }

    // Merges what this block owes: a share of its last tile, or whole tiles that the others gave
    // up.
    template <typename MergedFragments>
    __device__ void merge(const Queue& queue, int thread) {
        // The last piece is still where it was.
        const Piece* last = &s.pieces[(queue.pieces - 1) % kPieces];
        const bool shares = queue.pieces > 0 && last->parts > 1 && last->last;
        // Its own share; all of the last piece's tile; all of the first one's.
#pragma unroll 1
        for (int i = 0; i < 3; ++i) {
            const bool own = i == 0;
            if (!(own ? shares : i == 1 ? s.owed.last : s.owed.first)) continue;
            const Piece& piece = i == 2 ? s.owed.first_piece : *last;
            int left = 0;
            const auto ready = [&] {
                if (!own) {
                    ptx::bar_sync(kOutputBarrier, kOutputThreads);
                    return true;
                }
                if (!await(piece, thread)) return false;
                // Nobody waits for this; what it answers is looked at when the share is merged.
                if (thread == 0) left = counters_of(piece)->leave();
                return true;
            };
            const char* partials = p.partials;
            using Source = PartialSource<pair * PartialLayout<N>::kBytes>;
            const Source source{partials, uint32_t(partial(piece.first_team, true) - partials),
                                uint32_t(partial(piece.first_team, false) - partials), piece.parts};
#pragma unroll 1
            for (int share = own ? piece.part : 0, end = own ? share + 1 : piece.sharers;
                 share < end; ++share) {
                const Share units = Share::of(M::kUnits, share, piece.sharers);
                ShareMerge<T, N, MergedFragments, Source> merge(
                    p, source, output_rows(piece), units, share, base, L::kSmallOffset, thread);
                if (!ready()) break;
                if (piece.parts <= kFewParts) {
                    merge.run(own);
                } else {
                    static_assert(
                        8 * M::kWorkers * M::kUnit * sizeof(MergeState) <= L::kSmallOffset,
                        "sums of eight units");
                    MergeState* scratch = reinterpret_cast<MergeState*>(
                        reinterpret_cast<char*>(&s) - L::kSmallOffset);
                    merge_many<T, N, MergedFragments>(p, source, output_rows(piece), units, scratch,
                                                      thread);
                }
            }
            if (left == piece.parts) counters_of(piece)->reset();
        }
    }
};

// K is what a thread block does: a Kernel, or what quantised.cuh makes of it.
template <class K>
__global__ __launch_bounds__(K::kThreads,
                             1) void decode_kernel(const __grid_constant__ KernelParams p,
                                                   const __grid_constant__ TensorMaps maps) {
    using L = typename K::L;
    extern __shared__ __align__(1024) char shared[];
    typename L::Small& s = *reinterpret_cast<typename L::Small*>(shared + L::kSmallOffset);
    const int team = blockIdx.x / K::kPair;

    K kernel{p, ptx::shared_address(shared), s, int(blockIdx.x) % K::kPair, team};
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const bool rehearses = warp == 1;
    Schedule schedule(p, rehearses ? &s.imaginary_length : s.lens, rehearses ? 0 : 1, K::kTileRows,
                      team, gridDim.x / K::kPair);
    // The launch allows programmatic dependence. What follows this kernel may start where its
    // blocks have ended; and until the kernel before has ended, only shared memory and the launch's
    // own parameters are touched. Behind the barrier two warps have waited for all.
    ptx::griddepcontrol_launch_dependents();
    if (warp == 2) {
        ptx::griddepcontrol_wait();
        kernel.fetch_lengths(lane);
    } else if (warp == 0) {
        if (lane == 0) kernel.initialise();
    } else if (warp == 1) {
        kernel.prefetch_descriptors(maps, lane);
        // To rehearse, these are read, though no lengths are.
        if (p.cu_q_lens) ptx::griddepcontrol_wait();
        // Several blocks of tokens, so that tiles are cut.
        if (lane == 0) s.imaginary_length = 4096;
        __syncwarp();
    } else if (warp == 3) {
        ptx::griddepcontrol_wait();
        kernel.fetch_table(lane);
    }
    // The warp that rehearses begins at once.
    if (!rehearses) ptx::bar_sync(kStartBarrier, K::kThreads - 32);
    if (warp == 0) ptx::bar_arrive(kRehearsedBarrier, 64);

    // Where the even share of the registers is enough, they stay as they are.
    constexpr bool uneven = K::kLoadRegisters != 0;
    const int warpgroup = warp >> 2;
    if (warpgroup == 0) {
        if constexpr (uneven) ptx::setmaxnreg_dec<K::kLoadRegisters>();
        if (warp == 2) kernel.finish_lengths();
        // Warps 0 and 2 divide the work, each for itself, so that the first copies need not wait
        // for the queue. Warp 1, which waits for pieces, divides an imaginary batch before: code is
        // slow when it is run for the first time, and the lengths are still under way.
        if (warp != 3) {
            if (!rehearses) ptx::mbarrier_wait(K::at(s.lens_full), 0);
            schedule.divide();
            typename K::Queue queue;
            while (true) {
                const Piece piece = schedule.next();
                if (warp == 0) {
                    kernel.load_cache(maps, schedule, piece);
                    break;
                }
                if (rehearses) {
                    ptx::bar_sync(kRehearsedBarrier, 64);
                    kernel.load_queries(maps);
                    break;
                }
                kernel.hand_out(queue, piece);
                if (piece.request < 0) break;
            }
        } else {
            const auto place = kernel.finish_table(schedule);
            if (lane == 0 && place.page >= 0) kernel.prefetch_block(maps, place);
        }
    } else if (warpgroup <= K::kScoreGroups) {
        if constexpr (uneven && K::kScoreRegisters > K::kEvenRegisters)
            ptx::setmaxnreg_inc<K::kScoreRegisters>();
        else if constexpr (uneven)
            ptx::setmaxnreg_dec<K::kScoreRegisters>();
        if (warp == kFetchingWarp) kernel.prefetch_queries(lane);
        kernel.scores();
    } else {
        if constexpr (uneven) ptx::setmaxnreg_inc<K::kOutputRegisters>();
        kernel.output();
    }
}

}  // namespace mla::sm90::decode
