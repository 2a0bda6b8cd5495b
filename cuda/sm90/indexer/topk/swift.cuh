// Rows that the registers of their CTAs hold: each is read once, beside the sample.
//
//   guess      a sample of the whole row, the same in every CTA of the cluster
//   collect    what is not below the guess, in the order of positions
//   exchange   every CTA has all CTAs' candidates: one barrier of the cluster
//   cut        the last chosen candidate, as key and place, found by every CTA
//   list       each CTA's own, from where those before it end
//
// Few rows leave an SM nothing to do while a step waits, so steps are few: what needs no logits is
// done before they are there (the pages among it), and nothing is sorted or marked afterwards.
#pragma once

#include "candidates.cuh"
#include "resident.cuh"

namespace mla::sm90::topk {

// Entries of the block table that a CTA keeps.
constexpr int kPages = 2048;
// Logits that the threads of a CTA load at once, and the most that they keep.
constexpr int kVectorStep = 4 * kThreads;
constexpr int kMostInRegisters = 16 * kVectorStep;
// Candidates are numbered in so many bits.
constexpr int kPlaceBits = 16;

// Behind `Shared`.
struct SwiftBuffers {
    uint32_t* counts;    // [kMostCtas] candidates of each CTA
    int32_t* pages;      // [kPages]
    float* values;       // [ctas][room]
    int32_t* positions;  // [room], of this CTA's own

    __device__ __forceinline__ SwiftBuffers(Shared& s, uint32_t ctas, int room)
        : counts(reinterpret_cast<uint32_t*>(&s + 1)),
          pages(reinterpret_cast<int32_t*>(counts + kMostCtas)),
          values(reinterpret_cast<float*>(pages + kPages)),
          positions(reinterpret_cast<int32_t*>(values + ctas * room)) {}
};

__host__ __device__ constexpr int swift_bytes(int ctas, int room) {
    return int(sizeof(Shared)) + (kMostCtas + kPages + (ctas + 1) * room) * 4;
}

// NaN: no logit.
__device__ __forceinline__ float none() { return __int_as_float(0x7fffffff); }

__device__ __forceinline__ uint32_t byte_of(uint32_t word, int i) { return word >> 8 * i & 0xff; }

// The guess, from one vector of the sample in each thread. Values in equal steps seldom need a
// second histogram, as keys mostly do.
__device__ __forceinline__ Guess guess_from(Shared& s, const float4& x, int count, int topk) {
    const float expected = float(kSamples) * float(topk) / float(count);
    const uint32_t wanted = uint32_t(expected + 4.f * sqrtf(expected) + 8.f);
    if (wanted >= kSamples) return {logit_of(0), 0};
    const uint32_t enough = max(wanted / 3, 12u);
    const float values[4] = {x.x, x.y, x.z, x.w};
    const uint32_t keys[4] = {key_of(x.x), key_of(x.y), key_of(x.z), key_of(x.w)};
    Range range;
#pragma unroll
    for (const uint32_t key : keys) range.add(key);
    range = range_of_cta(s, range);
    const float lowest = logit_of(range.least);
    const float scale = float(kBins) / (logit_of(range.largest) - lowest);
    // Not if all are equal, nor if there are infinite ones or NaN.
    if (scale > 0 && scale < 1e30f) {
#pragma unroll
        for (const float value : values)
            atomicAdd(&s.bins[min(uint32_t((value - lowest) * scale), kBins - 1u)], 1u);
        __syncthreads();
        find_bin(s, s.bins, kBins, wanted);
        const uint32_t bin = s.bin, inside = s.inside;
        *reinterpret_cast<uint4*>(&s.bins[4 * threadIdx.x]) = {0, 0, 0, 0};
        __syncthreads();
        if (inside <= enough) {
            const float least = lowest + float(bin) / scale;
            return {least, max(range.largest, key_of(least)) - key_of(least)};
        }
    }
    Threshold t = {range.least, range.largest - range.least, wanted, kSamples};
    narrow(s, t, t.width, enough, [&](const auto& visit) {
#pragma unroll
        for (const uint32_t key : keys) visit(key);
    });
    const float least = logit_of(t.least);
    return {least, max(range.largest, key_of(least)) - key_of(least)};
}

// Where the sample's vector of this thread begins.
__device__ __forceinline__ int sampled_at(int count) {
    constexpr int together = kSampled * kSampledTogether, places = kThreads / kSampledTogether;
    const int place = threadIdx.x / kSampledTogether;
    return int(int64_t(count / together) * place / places) * together +
           int(threadIdx.x) % kSampledTogether * kSampled;
}

// Puts what is at least `least` of this thread's vectors into `values` and `positions`, in the
// order of positions, of which a warp has `kVectors` times 128 that follow each other. Returns how
// many the CTA has: nothing is written if there is no room.
template <int kVectors>
__device__ __forceinline__ uint32_t collect_in_order(Shared& s, const float4 (&x)[kVectors],
                                                     float least, int first, uint32_t room,
                                                     float* values, int32_t* positions) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // A byte for each vector: a warp has up to 128 of each.
    constexpr int kWords = (kVectors + 3) / 4;
    uint32_t own[kWords] = {}, inclusive[kWords], all[kWords];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const float of[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (of[j] >= least) own[i / 4] += 1u << 8 * (i % 4);
    }
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        inclusive[i] = inclusive_sum(own[i]);
        all[i] = __shfl_sync(~0u, inclusive[i], 31);
        sum = __dp4a(all[i], 0x01010101u, sum);
    }
    if (lane == 0) s.warp_sums[warp] = sum;
    __syncthreads();
    const uint32_t of_warp = lane < kWarps ? s.warp_sums[lane] : 0;
    const uint32_t found = __reduce_add_sync(~0u, of_warp);
    uint32_t before = __reduce_add_sync(~0u, lane < warp ? of_warp : 0);
    if (found > room) return found;
    const uint32_t to_positions =
        ptx::shared_address(positions) - ptx::shared_address(values);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const uint32_t at = before + byte_of(inclusive[i / 4] - own[i / 4], i % 4);
        before += byte_of(all[i / 4], i % 4);
        uint32_t to = ptx::shared_address(values) + at * 4;
        const float of[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (of[j] >= least) {
                ptx::st_shared(to, __float_as_uint(of[j]));
                ptx::st_shared(to + to_positions, uint32_t(first + i * 128 + j));
                to += 4;
            }
    }
    return found;
}

// The candidates that a warp looks at, of one CTA of the cluster.
struct WarpShare {
    uint32_t cta, begin, end;
    const float* values;
    uint32_t place;  // of the CTA's first one

    __device__ __forceinline__ WarpShare(const Cluster& cluster, const SwiftBuffers& b, int room) {
        const uint32_t warp = threadIdx.x / 32, warps = kWarps / cluster.ctas;
        cta = warp / warps;
        const uint32_t count = cta < cluster.ctas ? b.counts[cta] : 0;
        const uint32_t each = (count + 32 * warps - 1) / (32 * warps) * 32;
        begin = min(warp % warps * each, count);
        end = min(begin + each, count);
        place = cta * room;
        values = b.values + place;
    }
    template <typename Visit>
    __device__ __forceinline__ void each(const Visit& visit) const {
#pragma unroll 1
        for (uint32_t i = begin + threadIdx.x % 32 * 4; i < end; i += 128) {
            const float4 x = *reinterpret_cast<const float4*>(values + i);
            const float of[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (i + j < end) visit(key_of(of[j]), place + i + j);
        }
    }
};

// Larger is chosen earlier: key, then the lower place.
__device__ __forceinline__ uint64_t pair_of(uint32_t key, uint32_t place) {
    return uint64_t(key) << 32 | ((1u << kPlaceBits) - 1 - place);
}

// The last pair that is chosen of `count` candidates.
__device__ __forceinline__ uint64_t find_cut(Shared& s, const WarpShare& share,
                                             const Guess& guessed, uint32_t count, uint32_t topk) {
    Threshold t = {guessed.key(), ~0u - guessed.key(), topk, count};
    uint32_t within = guessed.range;
    if (within == 0) {
        Range range;
        share.each([&](uint32_t key, uint32_t) { range.add(key); });
        range = range_of_cta(s, range);
        within = range.largest - range.least;
        t = {range.least, within, topk, count};
    }
    narrow(s, t, within, kMostPairs / 4, [&](const auto& visit) {
        share.each([&](uint32_t key, uint32_t) { visit(key); });
    });
    if (t.inside == t.wanted) return uint64_t(t.least) << 32;
    // Of many that are equal the places are narrowed in the same way.
    Threshold places = {0, (1u << kPlaceBits) - 1, t.wanted, t.inside};
    if (t.inside > kMostPairs / 4) {
        narrow(s, places, places.width, kMostPairs / 4, [&](const auto& visit) {
            share.each([&](uint32_t key, uint32_t place) {
                if (key == t.least) visit(uint32_t(pair_of(key, place)));
            });
        });
        if (places.inside == places.wanted) return uint64_t(t.least) << 32 | places.least;
    }
    uint64_t* pairs = reinterpret_cast<uint64_t*>(s.bins);
    share.each([&](uint32_t key, uint32_t place) {
        const uint64_t pair = pair_of(key, place);
        if (t.is_inside(key) && places.is_inside(uint32_t(pair)))
            pairs[atomicAdd(&s.pairs, 1u)] = pair;
    });
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < places.inside; i += kThreads) {
        const uint64_t own = pairs[i];
        uint32_t larger = 0;
        for (uint32_t j = 0; j < places.inside; ++j) larger += pairs[j] > own;
        if (larger == places.wanted - 1) s.all[0] = own;
    }
    __syncthreads();
    return s.all[0];
}

// Gives every other CTA of the cluster what this one has found.
__device__ __forceinline__ void exchange_candidates(const Cluster& cluster, const SwiftBuffers& b,
                                                    uint32_t found, uint32_t room) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // All have begun: this says nothing of what has been collected since, also in this CTA.
    ptx::barrier_cluster_wait();
    __syncthreads();
    if (warp < cluster.ctas) {
        const float* own = b.values + cluster.rank * room;
        const uint32_t to = ptx::mapa(ptx::shared_address(own), warp);
        if (warp != cluster.rank && found <= room)
            for (uint32_t i = lane * 4; i < found; i += 128)
                ptx::st_shared_cluster_v4_u32(to + i * 4,
                                              *reinterpret_cast<const uint4*>(own + i));
        if (lane == 0)
            ptx::st_shared_cluster_u32(
                ptx::mapa(ptx::shared_address(b.counts + cluster.rank), warp), found);
    }
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
}

template <int kVectors>
__global__ void __launch_bounds__(kThreads, 1)
    swift_kernel(const __grid_constant__ KernelParams p) {
    Shared& s = *reinterpret_cast<Shared*>(ptx::dynamic_shared());
    const Cluster cluster{ptx::cluster_ctarank(), ptx::cluster_nctarank()};
    const int room = p.candidates;
    const SwiftBuffers b(s, cluster.ctas, room);
    const int number = blockIdx.x / cluster.ctas;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    if (!p.rows_ahead) ptx::griddepcontrol_wait();
    Row row = indexer::find_row(p.rows, number, lane);
    int32_t* list = p.lists + number * p.list_stride;
    if (row.seen <= p.topk) {
        ptx::griddepcontrol_wait();
        ptx::griddepcontrol_launch_dependents();
        const int first = cluster.rank * kThreads + threadIdx.x;
        for (int i = first; i < p.topk; i += cluster.ctas * kThreads)
            list[i] = i < row.seen ? indexer::slot_of(p.rows, row, i) : -1;
        return;
    }
    const int each = (row.seen + 4 * int(cluster.ctas) - 1) / (4 * int(cluster.ctas)) * 4;
    const int begin = min(int(cluster.rank) * each, row.seen), end = min(begin + each, row.seen);
    const int steps = (each + kVectorStep - 1) / kVectorStep;
    *reinterpret_cast<uint4*>(&s.bins[4 * threadIdx.x]) = {0, 0, 0, 0};
    if (threadIdx.x == 0) s.pairs = s.counts.x = s.counts.y = 0;
    if (cluster.ctas > 1) ptx::barrier_cluster_arrive();
    // The pages of this CTA's positions.
    const int first_page = begin / p.rows.page_size;
    const int pages = min(end > begin ? (end - 1) / p.rows.page_size + 1 : 0, p.rows.max_pages);
    const bool kept = pages - first_page <= kPages;
    if (kept)
        for (int i = first_page + threadIdx.x; i < pages; i += kThreads)
            b.pages[i - first_page] = row.table[i];
    __syncthreads();
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();

    const float* logits = p.logits + number * p.logits_stride;
    const bool sparing = row.seen > room;
    float4 sample = {0, 0, 0, 0};
    if (sparing) sample = load4(logits, sampled_at(row.seen), row.seen, p.vectors);
    const int first = begin + warp * steps * 128 + lane * 4;
    float4 x[kVectors];
    const int last = end & ~3;
    const bool torn = p.vectors && last < end;
    float4 of_last;
    if (p.vectors) {
        const int whole = min(last, first + steps * 128);
        const float4* vector = reinterpret_cast<const float4*>(logits + first);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            x[i] = {none(), none(), none(), none()};
            if (first + i * 128 < whole) x[i] = __ldg(vector + i * 32);
        }
        if (torn) of_last = load4(logits, last, end, false);
    } else {
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
            x[i] = load4(logits, first + i * 128, i < steps ? end : 0, false);
    }
    const Guess guessed = sparing ? guess_from(s, sample, row.seen, p.topk)
                                  : Guess{logit_of(0), 0};
    if (torn) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
            if (i < steps && first + i * 128 == last) x[i] = of_last;
    }
    float* own = b.values + cluster.rank * room;
    const uint32_t found =
        collect_in_order(s, x, guessed.least, first, room, own, b.positions);
    if (cluster.ctas > 1)
        exchange_candidates(cluster, b, found, room);
    else if (threadIdx.x == 0)
        b.counts[0] = found;
    __syncthreads();
    const uint32_t of_cta = lane < int(cluster.ctas) ? b.counts[lane] : 0;
    const uint32_t all = __reduce_add_sync(~0u, of_cta);
    const uint32_t most = __reduce_max_sync(~0u, of_cta);
    if (all < uint32_t(p.topk) || most > uint32_t(room)) {
        // The sample misled. The row is still there: its keys are counted where they are.
        const Buffers buffers(s, p.rows.columns);
        __syncthreads();
        for (int i = threadIdx.x; i < (each + 31) / 32; i += kThreads)
            buffers.chosen[i] = buffers.tied(p.resident)[i] = 0;
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
            if (i < steps && first + i * 128 < end)
                *reinterpret_cast<float4*>(buffers.row() + (first - begin) + i * 128) = x[i];
        __syncthreads();
        choose_kept(s, buffers, p, row, cluster, guessed, begin, end - begin, list);
        return;
    }
    const WarpShare share(cluster, b, room);
    const uint64_t cut = find_cut(s, share, guessed, all, p.topk);

    // Every warp writes some of this CTA's own, behind what is chosen before them.
    const uint32_t each_warp = (found + kThreads - 1) / kThreads * 32;
    const uint32_t own_begin = min(warp * each_warp, found), own_place = cluster.rank * room;
    const uint32_t own_end = min(own_begin + each_warp, found);
    const auto is_chosen = [&](uint32_t i) {
        return i < own_end && pair_of(key_of(own[i]), own_place + i) >= cut;
    };
    uint32_t before = 0, mine = 0;
    if (share.cta < cluster.rank)
        share.each([&](uint32_t key, uint32_t place) { before += pair_of(key, place) >= cut; });
    for (uint32_t i = own_begin + lane; i < own_end; i += 32) mine += is_chosen(i);
    // In one number: no list is as long as there are places.
    const uint32_t both = __reduce_add_sync(~0u, before << kPlaceBits | mine);
    if (lane == 0) s.warp_sums[warp] = both;
    __syncthreads();
    const uint32_t of_warp = lane < kWarps ? s.warp_sums[lane] : 0;
    uint32_t at = __reduce_add_sync(
        ~0u, (of_warp >> kPlaceBits) + (lane < warp ? of_warp & ((1u << kPlaceBits) - 1) : 0));
    if (kept) row.table = b.pages - first_page;
#pragma unroll 1
    for (uint32_t base = own_begin; base < own_end; base += 32) {
        const bool is = is_chosen(base + lane);
        const uint32_t chosen = __ballot_sync(~0u, is);
        if (is)
            list[at + __popc(chosen & ((1u << lane) - 1))] =
                indexer::slot_of(p.rows, row, b.positions[base + lane]);
        at += __popc(chosen);
    }
}

}  // namespace mla::sm90::topk
