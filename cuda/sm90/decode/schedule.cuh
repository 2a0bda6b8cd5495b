// Which part of the batch each team works on, derived on the device from the lengths alone. A team
// is `pair` neighbouring blocks, which do different rows of the same tiles.
//
// A tile is up to N * pair query rows of one request (rows count query tokens and heads together).
// Its cost is its number of 64-token blocks (at least one) plus a constant. There are two ways to
// divide tiles among teams:
//
//   in line   All tiles of all requests, in order, form one line of cost units, which is cut into equal ranges, one per team. A
//             team walks its range tile by tile; a tile that a cut crosses is done in parts, which are merged afterwards.
//   apart     No team has blocks of two tiles. Tiles of equal cost that are more than the teams are dealt out whole. Where
//             there are at least as many teams as tiles, each tile has teams of its own: one, or as many as it takes for none to
//             have more than a share of blocks, and then it is cut equally among them; the share is the smallest for
//             which the teams suffice.
//
// Apart is preferred unless it takes noticeably longer: it makes fewer parts, and no second pieces.
//
// Two warps of every block do this, each for itself: the one that copies the cache, which then
// begins, and one that hands the pieces to the others through a queue in shared memory. A third one
// divides an imaginary batch before the lengths are there, since instructions are slow to come the
// first time. On the host one thread does the same (mla_decode_sm90_pieces), so that it can be
// tested.
#pragma once

#include "params.cuh"

namespace mla::sm90::decode {

struct Piece {
    // -1: there are no more.
    int request;
    // Row of the request's first row in this tile (for the whole team).
    int first_row;
    int q_len, q_begin, kv_len;
    // Blocks of this part of the tile.
    int block_begin, block_end;
    // This is part `part` of `parts`; part i was given to team first_team + i.
    int part, parts, first_team;
    // How many teams share in merging the tile, those that have no piece after it: their parts are
    // the first ones.
    int16_t sharers;
    // The team has no piece after this one.
    bool last;
};

// A block of a request.
struct Start {
    int request, block;
};

#ifdef __CUDA_ARCH__
// What the lanes of a warp do together.
struct Lanes {
    static constexpr int kCount = 32;
    __device__ static int own() { return threadIdx.x & 31; }
    __device__ static int lowest(int x) { return __reduce_min_sync(~0u, x); }
    __device__ static int highest(int x) { return __reduce_max_sync(~0u, x); }
    __device__ static int sum(int x) { return __reduce_add_sync(~0u, x); }
    __device__ static int of(int x, int lane) { return __shfl_sync(~0u, x, lane); }
    __device__ static int last(int x) { return of(x, kCount - 1); }
    __device__ static bool all(bool own) { return __all_sync(~0u, own); }
    // The first lane that says so; 0 where none does.
    __device__ static int first(bool own) {
        const unsigned lanes = __ballot_sync(~0u, own);
        return lanes ? __ffs(lanes) - 1 : 0;
    }
    // The sum of the lanes up to this one.
    __device__ static int running_sum(int x) {
#pragma unroll
        for (int d = 1; d < kCount; d *= 2) {
            const int other = __shfl_up_sync(~0u, x, d);
            if (own() >= d) x += other;
        }
        return x;
    }
    // f(a) and f(b), by two lanes at the same time.
    template <typename F>
    __device__ static int2 both(F f, int a, int b) {
        const int x = f(own() == 0 ? a : b);
        return make_int2(__shfl_sync(~0u, x, 0), __shfl_sync(~0u, x, 1));
    }
};
#else
// A single lane.
struct Lanes {
    static constexpr int kCount = 1;
    static int own() { return 0; }
    static int lowest(int x) { return x; }
    static int highest(int x) { return x; }
    static int sum(int x) { return x; }
    static int of(int x, int) { return x; }
    static int last(int x) { return x; }
    static bool all(bool own) { return own; }
    static int first(bool) { return 0; }
    static int running_sum(int x) { return x; }
    template <typename F>
    static int2 both(F f, int a, int b) {
        return make_int2(f(a), f(b));
    }
};
#endif

// Its functions are called by one whole warp, or on the host.
class Schedule {
  public:
    // `lens`: the lengths of all requests, once they are there, one after the other or, if
    // `lens_step` is 0, all in the same place.
    __host__ __device__ Schedule(const KernelParams& p, const int* lens, int lens_step,
                                 int tile_rows, int team, int teams)
        : p_(p),
          lens_(lens),
          lens_step_(lens_step),
          tile_rows_(tile_rows),
          team_(team),
          teams_(teams) {}

    // Divides the batch among the teams.
    __host__ __device__ void divide() {
        if (divide_alike()) return;
        const int requests = p_.requests;
        // Each lane has neighbouring requests.
        const int own = unsigned(requests + Lanes::kCount - 1) / unsigned(Lanes::kCount),
                  first = Lanes::own() * own;
        const int last = first + own < requests ? first + own : requests;
        int tiles = 0, low = INT32_MAX, high = 0;
        share_ = parts_ = 0;
        total_ = 0;
#pragma unroll 1
        for (int request = first; request < last; ++request) {
            const int of_request = tiles_of(request), cost = cost_of(request);
            if (of_request > 0) {
                tiles += of_request;
                total_ += of_request * cost;
                low = low < cost ? low : cost;
                high = high > cost ? high : cost;
            }
        }
        low = Lanes::lowest(low);
        high = Lanes::highest(high);
        tiles = Lanes::sum(tiles);
        total_ = Lanes::sum(total_);
        blocks_ = total_ - tiles * p_.tile_cost;
        step_ = unsigned(total_) / unsigned(teams_);
        longer_ = total_ - step_ * teams_;
        if (tiles > 0 && tiles <= teams_) {
            // Whole, if that will do.
            const int longest = high - p_.tile_cost;
            const int share = worth(high) ? longest : smallest_share(tiles, low, high);
            if (worth(share + p_.tile_cost)) {
                share_ = share;
                if (share == longest || low == high) parts_ = parts_of(longest, share);
            }
        } else if (tiles > 0 && low == high) {
            const int whole = unsigned(tiles + teams_ - 1) / unsigned(teams_) * high;
            if (worth(whole)) {
                step_ = whole;
                longer_ = 0;
            }
        }
        int units = 0;
#pragma unroll 1
        for (int request = first; request < last; ++request) units += units_of(request);
        const int sum = Lanes::running_sum(units);
        total_ = Lanes::last(sum);
        begin_at_boundary();
        // The first lane whose requests end after the position has it among them.
        const int lane = Lanes::first(sum > position_);
        request_ = Lanes::of(first, lane);
        begins_ = Lanes::of(sum - units, lane);
        ends_ = begins_ + units_of(request_);
    }

#ifdef __CUDACC__
    // Where the team begins if all requests have as many blocks, found in a fraction of the time
    // that `divide` takes. Otherwise some block of the batch; a negative request where there is
    // none.
    __device__ Start likely_start() const {
        const Guess& g = p_.guess;
        const Start none = {-1, 0};
        // Exact for quotients that a float holds.
        if (g.teams_of_tile == 0) {
            const int tile = team_ * g.tiles_of_team;
            return tile < g.tiles ? Start{int((tile + 0.5f) * g.inverse_tiles_of_request), 0}
                                  : none;
        }
        // As if the first request were like all others.
        const int blocks = blocks_of(0);
        const Cut cut = cut_of(blocks);
        const int tile = int((team_ + 0.5f) * cut.inverse_parts), part = team_ - tile * cut.parts;
        const int request = int((tile + 0.5f) * g.inverse_tiles_of_request);
        if (blocks == 0 || tile >= g.tiles) return none;
        return {request, begin_of_part(blocks_of(request), part, cut.inverse_parts)};
    }
#endif

    // Blocks of all tiles of the batch.
    __host__ __device__ int blocks() const { return blocks_; }

    // The next piece of this team's range; its request is -1 at the end.
    __host__ __device__ Piece next() {
        Piece piece;
        while (position_ < end_) {
            while (ends_ <= position_) {
                begins_ = ends_;
                ends_ += units_of(++request_);
            }
            const int blocks = blocks_of(request_);
            const int offset = position_ - begins_;
            piece.request = request_;
            piece.q_len = query_len(request_);
            piece.q_begin = p_.cu_q_lens ? p_.cu_q_lens[request_] : request_ * p_.query_len;
            piece.kv_len = lens_[request_ * lens_step_];
            if (share_ > 0) {
                const int parts = parts_of(request_),
                          tile = offset < parts ? 0 : unsigned(offset) / unsigned(parts);
                piece.first_row = tile * tile_rows_;
                piece.part = offset - tile * parts;
                piece.parts = parts;
                piece.sharers = int16_t(parts);
                piece.first_team = team_ - piece.part;
                piece.block_begin = 0;
                piece.block_end = blocks;
                if (parts > 1) {
                    const float inverse = inverse_of(parts);
                    piece.block_begin = begin_of_part(blocks, piece.part, inverse);
                    if (piece.part + 1 < parts)
                        piece.block_end = begin_of_part(blocks, piece.part + 1, inverse);
                }
                piece.last = true;
                position_ = end_;
                return piece;
            }
            const int cost = cost_of(request_), idle = cost - blocks;
            const int tile = offset < cost ? 0 : unsigned(offset) / unsigned(cost);
            const int tile_begin = begins_ + tile * cost, tile_end = tile_begin + cost;
            const int stop = end_ < tile_end ? end_ : tile_end;
            const int begin = position_ - tile_begin - idle, finish = stop - tile_begin - idle;
            const bool empty = blocks == 0 && position_ == tile_begin;
            position_ = stop;
            if (finish <= 0 && !empty) continue;
            piece.first_row = tile * tile_rows_;
            piece.block_begin = begin > 0 ? begin : 0;
            piece.block_end = finish > 0 ? finish : 0;
            const int2 team = Lanes::both([&](int unit) { return team_of(unit); },
                                          tile_begin + idle, tile_end - 1);
            piece.first_team = empty ? team_ : team.x;
            piece.parts = empty ? 1 : team.y - team.x + 1;
            piece.part = team_ - piece.first_team;
            piece.last = position_ >= end_;
            // Every part but the last one ends where its team's range ends.
            piece.sharers =
                int16_t(piece.parts - (boundary(piece.first_team + piece.parts) != tile_end));
            return piece;
        }
        piece.request = -1;
        return piece;
    }

  private:
    __host__ __device__ int query_len(int request) const {
        return p_.cu_q_lens ? p_.cu_q_lens[request + 1] - p_.cu_q_lens[request] : p_.query_len;
    }
    __host__ __device__ int tiles_of(int request) const {
        return unsigned(query_len(request) * p_.heads + tile_rows_ - 1) / unsigned(tile_rows_);
    }
    __host__ __device__ int blocks_of(int request) const {
        return (lens_[request * lens_step_] + kBlock - 1) / kBlock;
    }
    __host__ __device__ int cost_of(int request) const {
        const int blocks = blocks_of(request);
        return (blocks > 0 ? blocks : 1) + p_.tile_cost;
    }
    // Into how many parts a tile of so many blocks is cut so that none has more than `share`.
    __host__ __device__ static int parts_of(int blocks, int share) {
        return blocks <= share ? 1 : unsigned(blocks + share - 1) / unsigned(share);
    }
    // Where a part but the first one begins: in order, and none is empty, though of a very long
    // tile some may be a block longer than others.
    __host__ __device__ static int begin_of_part(int blocks, int part, float inverse_parts) {
        return int((float(blocks) * part + 0.5f) * inverse_parts);
    }
    __host__ __device__ int parts_of(int request) const {
        return parts_ > 0 ? parts_ : parts_of(blocks_of(request), share_);
    }
    // How much of the line a request's tiles take: their cost, or, apart, as many teams as they
    // have parts.
    __host__ __device__ int units_of(int request) const {
        return tiles_of(request) * (share_ > 0 ? parts_of(request) : cost_of(request));
    }

    // How a tile of so many blocks is cut among the teams that it has of its own.
    struct Cut {
        int share, parts;
        float inverse_parts;
    };
    __host__ __device__ Cut cut_of(int blocks) const {
        const Guess& g = p_.guess;
        const int share = int((blocks + g.teams_of_tile - 0.5f) * g.inverse_teams_of_tile);
        const int parts = int((blocks + share - 0.5f) * inverse_of(share));
        return {share, parts, inverse_of(parts)};
    }

    // As `divide`, in a fraction of its time, where all requests are alike and their tiles are kept
    // apart and have teams of their own. Says whether that is so. A single tile is always cut,
    // unless it has hardly more blocks than a merge takes time.
    __host__ __device__ bool divide_alike() {
        const Guess& g = p_.guess;
        const int blocks = blocks_of(0);
        // Up to there, the quotients below are exact.
        bool alike = g.teams_of_tile > 0 && blocks > 0 && blocks < 1 << 18;
#pragma unroll 1
        for (int request = Lanes::own(); request < p_.requests; request += Lanes::kCount)
            alike = alike && blocks_of(request) == blocks &&
                    (!p_.cu_q_lens || tiles_of(request) == g.tiles_of_request);
        if (!Lanes::all(alike)) return false;
        const int cost = blocks + p_.tile_cost;
        step_ = g.tiles > 1 ? int((g.tiles * cost + 0.5f) * g.inverse_teams) : 0;
        Cut cut = {blocks, 1, 1.f};
        if (!worth(cost)) {
            cut = cut_of(blocks);
            if (g.tiles > 1 && !worth(cut.share + p_.tile_cost)) return false;
        }
        share_ = cut.share;
        parts_ = cut.parts;
        blocks_ = g.tiles * blocks;
        total_ = g.tiles * parts_;
        begin_at_boundary();
        const int of_request = g.tiles_of_request * parts_;
        request_ = int((team_ + 0.5f) * cut.inverse_parts * g.inverse_tiles_of_request);
        begins_ = request_ * of_request;
        ends_ = begins_ + of_request;
        return true;
    }

    // Of a small number, which quotients that are rounded down allow not to be exact.
    __host__ __device__ static float inverse_of(int x) {
#ifdef __CUDA_ARCH__
        return __fdividef(1.f, float(x));
#else
        return 1.f / float(x);
#endif
    }

    __host__ __device__ void begin_at_boundary() {
        if (share_ > 0) {
            // The line is one of teams.
            step_ = 1;
            longer_ = 0;
        }
        position_ = boundary(team_);
        end_ = boundary(team_ + 1);
    }

    // The smallest number of blocks for which the teams suffice when no part has more. `low` and
    // `high` bound the tiles' costs.
    __host__ __device__ int smallest_share(int tiles, int low, int high) const {
        const int longest = high - p_.tile_cost;
        if (low == high) {
            const int parts = unsigned(teams_) / unsigned(tiles);
            return unsigned(longest + parts - 1) / unsigned(parts);
        }
        // No fewer teams than that many blocks need; and parts that fill their share but for one of
        // each tile are enough.
        int least = unsigned(blocks_ + teams_ - 1) / unsigned(teams_);
        int most = longest;
        if (tiles < teams_) {
            const int enough = unsigned(blocks_ + teams_ - tiles - 1) / unsigned(teams_ - tiles);
            most = most < enough ? most : enough;
        }
#pragma unroll 1
        while (least < most) {
            const int share = (least + most) / 2;
            int needed = 0;
#pragma unroll 1
            for (int request = Lanes::own(); request < p_.requests; request += Lanes::kCount)
                needed += tiles_of(request) * parts_of(blocks_of(request), share);
            if (Lanes::sum(needed) <= teams_)
                most = share;
            else
                least = share + 1;
        }
        return least;
    }

    // Whether to keep tiles apart when the longest team then has `cost`. Cut in line, all have
    // step_, and at the end parts are written and merged, for as long as three to six blocks take.
    // Up to 64 rows, a block also takes less time while some multiprocessors leave the memory to
    // the others, with 64 rows not by as much.
    __host__ __device__ bool worth(int cost) const {
        // 17/16 of a step and 6 blocks; 4/3 and 2 2/3; 5/3 and 5 1/3.
        if (tile_rows_ > 64) return cost * 16 <= step_ * 17 + 96;
        return cost * 3 <= (tile_rows_ > 32 ? step_ * 4 + 8 : step_ * 5 + 16);
    }

    // Ranges are step_ long, the first longer_ of them one more; a range past the end is empty.
    __host__ __device__ int boundary(int team) const {
        const int end = team * step_ + (team < longer_ ? team : longer_);
        return end < total_ ? end : total_;
    }
    // The team whose range holds a cost unit.
    __host__ __device__ int team_of(int unit) const {
        const int in_longer = longer_ * (step_ + 1);
        const bool longer = unit < in_longer;
        return (longer ? 0 : longer_) +
               unsigned(longer ? unit : unit - in_longer) / unsigned(longer ? step_ + 1 : step_);
    }

    const KernelParams& p_;
    const int* lens_;
    int lens_step_, tile_rows_, team_, teams_;
    // Apart: the most blocks of a part; in line, 0.
    int share_;
    // Apart: the parts of each tile where all have as many, else 0.
    int parts_;
    // Blocks of all tiles, without the tiles' constant.
    int blocks_;
    // Of the line: what all tiles take, and where the request of the next piece, request_, begins
    // and ends.
    int total_, begins_, ends_;
    // See `boundary`.
    int step_, longer_;
    // What is left of this team's range.
    int position_, end_, request_;
};

}  // namespace mla::sm90::decode
