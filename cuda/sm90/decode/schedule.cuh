// Which part of the batch each team works on, derived on the device from the lengths alone. A team is `pair` neighbouring
// blocks, which do different rows of the same tiles.
//
// A tile is up to N * pair query rows of one request (rows count query tokens and heads together). Its cost is its
// number of 64-token blocks (at least one) plus a constant. All tiles of all requests, in order, form one line of cost
// units, which is cut into equal ranges, one per team. A team walks its range tile by tile; a tile that a cut
// crosses is done in parts, which are merged afterwards.
//
// When all tiles cost the same, cutting only between tiles is preferred unless it takes noticeably longer.
//
// One warp of every block does this, each for itself, and hands the pieces to the other warps through a queue in shared
// memory.
#pragma once

#include "../../common/instructions.cuh"
#include "../../common/mbarrier.cuh"
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
    // The team has no piece after this one: it shares in merging the tile.
    bool last;
    // How many teams do; their parts are the first ones.
    int sharers;
};

class Schedule {
  public:
    // `lens` has room for all requests, `prefix` for one more.
    __device__ Schedule(const KernelParams& p, int* lens, int* prefix, int tile_rows, int team)
        : p_(p), lens_(lens), prefix_(prefix), tile_rows_(tile_rows), team_(team) {}

    // Asks for the lengths. Called, like the others, by one whole warp.
    __device__ void fetch_lengths() const {
        for (int i = threadIdx.x & 31; i < p_.requests; i += 32) copy_async4(shared_address(lens_ + i), p_.kv_lens + i);
    }

    // Divides the batch among the teams.
    __device__ void divide(int teams) {
        const KernelParams& p = p_;
        const int requests = p.requests;
        copy_async_wait();
        __syncwarp();
        const int lane = threadIdx.x & 31;
        int total = 0, all_tiles = 0, low = INT32_MAX, high = 0;
        if (requests == 1) {
            // All lanes know everything.
            all_tiles = tiles_of(query_len(0));
            low = high = max(blocks_of(lens_[0]), 1) + p.tile_cost;
            total = all_tiles * high;
            if (lane == 0) prefix_[0] = 0;
        } else {
#pragma unroll 1
            for (int first = 0; first < requests; first += 32) {
                const int request = first + lane;
                int cost = 0;
                if (request < requests) {
                    const int tiles = tiles_of(query_len(request));
                    const int tile_cost = max(blocks_of(lens_[request]), 1) + p.tile_cost;
                    cost = tiles * tile_cost;
                    all_tiles += tiles;
                    if (tiles > 0) {
                        low = min(low, tile_cost);
                        high = max(high, tile_cost);
                    }
                }
                int sum = cost;
#pragma unroll
                for (int d = 1; d < 32; d *= 2) {
                    const int other = __shfl_up_sync(~0u, sum, d);
                    if (lane >= d) sum += other;
                }
                if (request < requests) prefix_[request] = total + sum - cost;
                total += __shfl_sync(~0u, sum, 31);
            }
            low = __reduce_min_sync(~0u, low);
            high = __reduce_max_sync(~0u, high);
            all_tiles = __reduce_add_sync(~0u, all_tiles);
        }
        if (lane == 0) prefix_[requests] = total;
        __syncwarp();
        // Two lanes divide at once.
        const int quotient = unsigned(lane == 0 ? total : all_tiles + teams - 1) / unsigned(teams);
        total_ = total;
        step_ = __shfl_sync(~0u, quotient, 0);
        longer_ = total - step_ * teams;
        if (low == high) {
            const int whole = __shfl_sync(~0u, quotient, 1) * high;
            // A split tile costs the writing and merging of its parts, about as long as three blocks; on the other hand a
            // block takes less time while some multiprocessors leave the memory to the others.
            if (whole * 3 <= step_ * 5 + 16) {
                step_ = whole;
                longer_ = 0;
            }
        }
        position_ = boundary(team_);
        end_ = boundary(team_ + 1);
        // The last request that begins at or before the position.
        int first = 0, last = requests;
        while (last - first > 1) {
            const int middle = (first + last) / 2;
            (prefix_[middle] <= position_ ? first : last) = middle;
        }
        request_ = first;
    }

    // The next piece of this team's range; its request is -1 at the end.
    __device__ Piece next() {
        Piece piece;
        while (position_ < end_) {
            while (prefix_[request_ + 1] <= position_) ++request_;
            const int kv_len = lens_[request_];
            const int blocks = blocks_of(kv_len);
            const int cost = max(blocks, 1) + p_.tile_cost, idle = cost - blocks;
            const int offset = position_ - prefix_[request_];
            const int tile = offset < cost ? 0 : unsigned(offset) / unsigned(cost);
            const int tile_begin = prefix_[request_] + tile * cost;
            const int stop = min(end_, tile_begin + cost);
            const int begin = max(position_ - tile_begin - idle, 0);
            const int finish = max(stop - tile_begin - idle, 0);
            const bool empty = blocks == 0 && position_ == tile_begin;
            position_ = stop;
            if (finish == begin && !empty) continue;
            piece.request = request_;
            piece.first_row = tile * tile_rows_;
            piece.q_len = query_len(request_);
            piece.q_begin = p_.cu_q_lens ? p_.cu_q_lens[request_] : request_ * p_.query_len;
            piece.kv_len = kv_len;
            piece.block_begin = begin;
            piece.block_end = finish;
            // Two lanes look for the teams of the first and the last block.
            const int team = team_of(tile_begin + ((threadIdx.x & 31) == 0 ? idle : cost - 1));
            piece.first_team = empty ? team_ : __shfl_sync(~0u, team, 0);
            piece.parts = empty ? 1 : __shfl_sync(~0u, team, 1) - piece.first_team + 1;
            piece.part = team_ - piece.first_team;
            piece.last = position_ >= end_;
            // Every part but the last one ends where its team's range ends.
            piece.sharers = piece.parts - (boundary(piece.first_team + piece.parts) != tile_begin + cost);
            return piece;
        }
        piece.request = -1;
        return piece;
    }

  private:
    __device__ int query_len(int request) const {
        return p_.cu_q_lens ? p_.cu_q_lens[request + 1] - p_.cu_q_lens[request] : p_.query_len;
    }
    __device__ int tiles_of(int q_len) const { return unsigned(q_len * p_.heads + tile_rows_ - 1) / unsigned(tile_rows_); }
    __device__ static int blocks_of(int kv_len) { return (kv_len + kBlock - 1) / kBlock; }

    // Ranges are step_ long, the first longer_ of them one more; a range past the end is empty.
    __device__ int boundary(int team) const { return min(team * step_ + min(team, longer_), total_); }
    // The team whose range holds a cost unit.
    __device__ int team_of(int unit) const {
        const int in_longer = longer_ * (step_ + 1);
        const bool longer = unit < in_longer;
        return (longer ? 0 : longer_) + unsigned(longer ? unit : unit - in_longer) / unsigned(longer ? step_ + 1 : step_);
    }

    const KernelParams& p_;
    int* lens_;
    int* prefix_;
    int tile_rows_, team_;
    int total_, step_, longer_, position_, end_, request_;
};

}  // namespace mla::sm90::decode
