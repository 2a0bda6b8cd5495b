// Top-k of rows that fit into the registers of one cluster. Besides the sample, each logit is read
// only once.
//
//   estimate   a bound from a sample of the whole row, the same in every CTA of the cluster
//   collect    the logits that are not below the bound, in the order of positions
//   exchange   every CTA gets the candidates of all CTAs, with one barrier of the cluster
//   cut        every CTA finds the last chosen candidate, as key and index
//   list       each CTA writes its own candidates, behind those of the CTAs before it
//
// If rows are few, an SM has no other work while one of these steps waits. There are therefore few
// steps: nothing is sorted or marked afterwards. Work that needs no logits, such as loading pages,
// is done before the logits are there.
#pragma once

#include "candidates.cuh"
#include "shared_resident.cuh"

namespace mla::sm90::topk {

// Entries of the block table that a CTA keeps.
constexpr int kPages = 2048;
// Number of logits that the threads of a CTA load at once, and maximum number that they keep.
constexpr int kVectorStep = 4 * kThreads;
constexpr int kMaxInRegisters = 16 * kVectorStep;
// Number of logits in a line of L2.
constexpr int kLine = 32;
// Number of bits of a candidate's index among those of all CTAs.
constexpr int kIndexBits = 16;

// If a bin has at most this number of candidates, every warp compares all of them.
constexpr int kMaxCompared = 32;

// Memory behind `Shared`.
struct RegisterResidentShared {
    uint32_t bins[kBins];  // histogram of the candidates
    uint64_t pairs[kMaxCompared];
    uint2 counted[kWarps];
    uint32_t counts[kMaxCtas];  // candidates of each CTA
    int32_t pages[kPages];
};
static_assert(sizeof(RegisterResidentShared) % 16 == 0);

// Memory behind `RegisterResidentShared`.
struct RegisterResidentBuffers {
    RegisterResidentShared& more;
    float* values;       // [ctas][room]
    int32_t* positions;  // [room], of this CTA's candidates

    __device__ __forceinline__ RegisterResidentBuffers(Shared& s, uint32_t ctas, int room)
        : more(*reinterpret_cast<RegisterResidentShared*>(&s + 1)),
          values(reinterpret_cast<float*>(&more + 1)),
          positions(reinterpret_cast<int32_t*>(values + ctas * room)) {}
};

__host__ __device__ constexpr int register_resident_bytes(int ctas, int room) {
    return int(sizeof(Shared) + sizeof(RegisterResidentShared)) + (ctas + 1) * room * 4;
}

// A NaN marks an entry without a logit.
__device__ __forceinline__ float none() { return __int_as_float(0x7fffffff); }

__device__ __forceinline__ uint32_t byte_of(uint32_t word, int i) { return word >> 8 * i & 0xff; }

// Writes this thread's logits that are at least `bound` to `values`, and their positions to
// `positions`, in the order of positions. A warp has `kVectors` times 128 consecutive positions.
// Returns the CTA's number of candidates. If there is no room for them, nothing is written.
template <int kVectors>
__device__ __forceinline__ uint32_t collect_in_order(Shared& s, const float4 (&x)[kVectors],
                                                     float bound, int first, uint32_t room,
                                                     float* values, int32_t* positions) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Each byte counts the candidates that a warp has in one vector of each lane: at most 128.
    constexpr int kWords = (kVectors + 3) / 4;
    uint32_t own[kWords] = {}, inclusive[kWords], all[kWords];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const float of[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (of[j] >= bound) own[i / 4] += 1u << 8 * (i % 4);
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
    // Fills up the last vector of candidates.
    if (threadIdx.x < (-found & 3)) values[found + threadIdx.x] = none();
    const uint32_t to_positions = ptx::shared_address(positions) - ptx::shared_address(values);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const uint32_t at = before + byte_of(inclusive[i / 4] - own[i / 4], i % 4);
        before += byte_of(all[i / 4], i % 4);
        uint32_t to = ptx::shared_address(values) + at * 4;
        const float of[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (of[j] >= bound) {
                ptx::st_shared(to, __float_as_uint(of[j]));
                ptx::st_shared(to + to_positions, uint32_t(first + i * 128 + j));
                to += 4;
            }
    }
    return found;
}

// A thread's share of the candidates: vectors of four candidates, all of one CTA of the cluster.
struct CandidateShare {
    uint32_t cta, first, step;

    __device__ __forceinline__ explicit CandidateShare(const Cluster& cluster) {
        const uint32_t warp = threadIdx.x / 32, warps = kWarps / cluster.ctas;
        cta = ptx::in_register(warp / warps);
        first = ptx::in_register((threadIdx.x - cta * warps * 32) * 4);
        step = ptx::in_register(warps * 128);
    }
};

// The candidates in a thread's share. Values behind the last candidate are NaN; no candidate is.
struct Candidates {
    const float* values;
    uint32_t cta, first, step, count;
    uint32_t index;  // index of the CTA's first candidate

    __device__ __forceinline__ Candidates(const CandidateShare& share, const Cluster& cluster,
                                          const RegisterResidentBuffers& b, int room)
        : values(b.values + share.cta * room),
          cta(share.cta),
          first(share.first),
          step(share.step),
          count(cta < cluster.ctas ? b.more.counts[cta] : 0),
          index(cta * room) {}

    template <typename Visit>
    __device__ __forceinline__ void each_vector(const Visit& visit) const {
#pragma unroll 1
        for (uint32_t i = first; i < count; i += step) {
            const float4 x = *reinterpret_cast<const float4*>(values + i);
            const float of[4] = {x.x, x.y, x.z, x.w};
            visit(of, index + i);
        }
    }
    template <typename Visit>
    __device__ __forceinline__ void each(const Visit& visit) const {
        each_vector([&](const float (&x)[4], uint32_t at) {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (x[j] == x[j]) visit(key_of(x[j]), at + j);
        });
    }
};

// Packs a key and an index. Larger pairs are chosen earlier: first by key, then by lower index.
__device__ __forceinline__ uint64_t pair_of(uint32_t key, uint32_t index) {
    return uint64_t(key) << 32 | ((1u << kIndexBits) - 1 - index);
}

// Finds a pair such that the chosen ones of `count` candidates are those from this pair on.
__device__ __forceinline__ uint64_t find_cut(Shared& s, const Candidates& candidates,
                                             uint32_t count, uint32_t topk) {
    clear_bins(s);
    Range range;
    candidates.each([&](uint32_t key, uint32_t) { range.add(key); });
    range = range_of_cta(s, range);
    Threshold t = {range.lowest, range.largest - range.lowest, topk, count};
    narrow(s, t, t.width, kMaxPairs / 4, [&](const auto& visit) {
        candidates.each([&](uint32_t key, uint32_t) { visit(key); });
    });
    if (t.inside == t.wanted) return uint64_t(t.lowest) << 32;
    // Among many equal keys, the indices are narrowed in the same way.
    Threshold indices = {0, (1u << kIndexBits) - 1, t.wanted, t.inside};
    if (t.inside > kMaxPairs / 4) {
        narrow(s, indices, indices.width, kMaxPairs / 4, [&](const auto& visit) {
            candidates.each([&](uint32_t key, uint32_t index) {
                if (key == t.lowest) visit(uint32_t(pair_of(key, index)));
            });
        });
        if (indices.inside == indices.wanted) return uint64_t(t.lowest) << 32 | indices.lowest;
    }
    uint64_t* pairs = reinterpret_cast<uint64_t*>(s.bins);
    candidates.each([&](uint32_t key, uint32_t index) {
        const uint64_t pair = pair_of(key, index);
        if (t.is_inside(key) && indices.is_inside(uint32_t(pair)))
            pairs[atomicAdd(&s.pairs, 1u)] = pair;
    });
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < indices.inside; i += kThreads) {
        const uint64_t own = pairs[i];
        uint32_t larger = 0;
        for (uint32_t j = 0; j < indices.inside; ++j) larger += pairs[j] > own;
        if (larger == indices.wanted - 1) s.all[0] = own;
    }
    __syncthreads();
    return s.all[0];
}

// The range of its CTA's candidates that a warp writes, and the place of the first one in the list.
struct WarpPart {
    uint32_t begin, end;
    uint32_t at;
    uint64_t cut;   // pairs from this one on are chosen
    uint32_t tied;  // a key of which only some candidates are chosen
    uint32_t ties;  // number of further candidates with that key, the first ones, that are chosen
};

// Each thread has counted candidates of the CTAs before this one, and of its own warp's range.
// Returns the sum over everything that comes before this warp's range.
__device__ __forceinline__ uint32_t add_counts(const RegisterResidentBuffers& b, uint32_t before,
                                               uint32_t mine) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    before = __reduce_add_sync(~0u, before);
    mine = __reduce_add_sync(~0u, mine);
    if (lane == 0) b.more.counted[warp] = {before, mine};
    __syncthreads();
    uint2 of = {0, 0};
    if (lane < kWarps) of = b.more.counted[lane];
    return __reduce_add_sync(~0u, of.x + (lane < warp ? of.y : 0));
}

// Finds the chosen ones of `all` candidates. The first histogram has bins of equal width in values.
// If the bin of the last chosen candidate has few candidates, every warp compares them with one
// another. If it has many, histograms of keys follow, unless all of them are equal.
__device__ __forceinline__ void cut_candidates(Shared& s, const Cluster& cluster,
                                               const RegisterResidentBuffers& b,
                                               const Candidates& candidates,
                                               const SampleEstimate& estimate, const float* own,
                                               uint32_t own_index, uint32_t all, uint32_t topk,
                                               WarpPart& part) {
    const uint32_t lane = threadIdx.x % 32;
    const bool earlier = candidates.cta < cluster.rank;
    const Steps<kBins> steps(estimate.lowest, logit_of(estimate.key() + estimate.range));
    part.tied = part.ties = 0;
    if (estimate.range > 0 && steps.usable()) {
        candidates.each_vector([&](const float (&x)[4], uint32_t) {
            uint32_t bins[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) bins[j] = steps.bin_of(x[j]);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (x[j] == x[j]) atomicAdd(&b.more.bins[bins[j]], 1u);
        });
        __syncthreads();
        find_bin(s, b.more.bins, kBins, topk);
        const uint32_t bin = s.bin, wanted = topk - s.above, inside = s.inside;
        const bool few = inside <= kMaxCompared;
        // The lower ends of the bin and of the next one. The first bin has no lower end, the last
        // one no upper end.
        const float low = bin > 0 ? float(bin) : -__int_as_float(0x7f800000);
        const float high = bin < kBins - 1 ? float(bin + 1) : none();
        // Each word has two counts of candidates: in its upper half those above the bin, in its
        // lower half those inside.
        uint32_t before = 0, mine = 0;
        Range range;
        candidates.each_vector([&](const float (&x)[4], uint32_t index) {
            uint32_t found = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float at = steps.at(x[j]);
                const bool above = at >= high;
                before += above ? 1u << kIndexBits : 0;
                found |= uint32_t(at >= low && !above) << j;
            }
            for (; found; found &= found - 1, ++before) {
                const uint32_t of = index + __ffs(found) - 1, key = key_of(b.values[of]);
                range.add(key);
                if (few) b.more.pairs[atomicAdd(&s.pairs, 1u)] = pair_of(key, of);
            }
        });
#pragma unroll 1
        for (uint32_t i = part.begin + lane; i < part.end; i += 32) {
            const float at = steps.at(own[i]);
            const bool above = at >= high;
            mine += above ? 1u << kIndexBits : at >= low;
        }
        const uint32_t ahead = add_counts(b, earlier ? before : 0, mine);
        const uint32_t unknown = ahead & ((1u << kIndexBits) - 1);
        part.at = ahead >> kIndexBits;
        if (few) {
            const uint64_t pair = lane < inside ? b.more.pairs[lane] : 0;
            uint32_t larger = 0;
#pragma unroll 4
            for (uint32_t i = 0; i < inside; ++i) larger += b.more.pairs[i] > pair;
            const bool chosen = lane < inside && larger < wanted;
            const uint32_t last = __ballot_sync(~0u, chosen && larger == wanted - 1);
            part.cut = __shfl_sync(~0u, pair, __ffs(last) - 1);
            part.at += __popc(
                __ballot_sync(~0u, chosen && pair_of(0, own_index + part.begin) < uint32_t(pair)));
            return;
        }
        range = range_of_cta(s, range);
        if (range.lowest == range.largest) {
            part.cut = uint64_t(range.lowest + 1) << 32;
            part.tied = range.lowest;
            part.ties = wanted - min(unknown, wanted);
            part.at += min(unknown, wanted);
            return;
        }
    }
    part.cut = find_cut(s, candidates, all, topk);
    uint32_t before = 0, mine = 0;
    candidates.each(
        [&](uint32_t key, uint32_t index) { before += pair_of(key, index) >= part.cut; });
    for (uint32_t i = part.begin + lane; i < part.end; i += 32)
        mine += pair_of(key_of(own[i]), own_index + i) >= part.cut;
    part.at = add_counts(b, earlier ? before : 0, mine);
}

// Sends this CTA's candidates to every CTA of the cluster, and waits for those of the others.
__device__ __forceinline__ void exchange_candidates(const Shared& s, const Cluster& cluster,
                                                    const RegisterResidentBuffers& b,
                                                    const CandidateShare& share, uint32_t found,
                                                    uint32_t room) {
    // After this wait, all CTAs have begun, so their shared memory may be written to. The wait does
    // not order what this CTA's threads have collected since they arrived; the barrier of the CTA
    // does.
    ptx::barrier_cluster_wait();
    __syncthreads();
    const uint32_t filled = s.arrived.address();
    if (share.cta < cluster.ctas) {
        const bool sent = found <= room && share.cta != cluster.rank;
        const uint32_t bar = ptx::mapa(filled, share.cta);
        if (share.first == 0) {
            ptx::mbarrier_arrive_expect_tx_cluster(bar, 4 + (sent ? (found + 3) / 4 * 16 : 0));
            ptx::st_async_u32(
                ptx::mapa(ptx::shared_address(b.more.counts + cluster.rank), share.cta), found,
                bar);
        }
        const float* own = b.values + cluster.rank * room;
        const uint32_t to = ptx::mapa(ptx::shared_address(own), share.cta);
        if (sent)
            for (uint32_t i = share.first; i < found; i += share.step)
                ptx::st_async_v4_u32(to + i * 4, *reinterpret_cast<const uint4*>(own + i), bar);
    }
    ptx::mbarrier_wait(filled, 0);
}

template <int kVectors>
__global__ void __launch_bounds__(kThreads, 1)
    register_resident_kernel(const __grid_constant__ KernelParams p) {
    // Keeps the address of shared memory in a register, so that it is not computed for each access.
    Shared& s = *static_cast<Shared*>(
        __cvta_shared_to_generic(ptx::in_register(ptx::shared_address(ptx::dynamic_shared()))));
    const Cluster cluster{ptx::cluster_ctarank(), ptx::cluster_nctarank()};
    const int room = p.candidates;
    const RegisterResidentBuffers b(s, cluster.ctas, room);
    const int number = ptx::clusterid();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    const float* logits = p.logits + number * p.logits_stride;
    if (!p.rows_ahead) {
        // Unless a kernel has just written the logits, they may be in device memory. This CTA's
        // part of a row that sees all columns is prefetched while the row's real length is being
        // found.
        ptx::griddepcontrol_wait();
        const int each = (p.rows.columns + int(cluster.ctas) - 1) / int(cluster.ctas);
        const int part = int(cluster.rank) * each, end = min(part + each, p.rows.columns);
        for (int i = part + kLine * int(threadIdx.x); i < end; i += kLine * kThreads)
            ptx::prefetch_global_l2(logits + i);
    }
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
    *reinterpret_cast<uint4*>(&b.more.bins[4 * threadIdx.x]) = {0, 0, 0, 0};
    if (threadIdx.x == 0) {
        s.pairs = s.counts.x = s.counts.y = 0;
        s.arrived.init(cluster.ctas);
        ptx::fence_mbarrier_init();
    }
    ptx::barrier_cluster_arrive_relaxed();
    const CandidateShare share(cluster);
    // The loads of pages are issued before those of logits, and their results are stored later.
    const int first_page = begin / p.rows.page_size;
    const int pages = min(end > begin ? (end - 1) / p.rows.page_size + 1 : 0, p.rows.max_pages);
    const bool kept = pages - first_page <= kPages;
    int32_t page[kPages / kThreads];
#pragma unroll
    for (int i = 0; i < kPages / kThreads; ++i) {
        const int at = first_page + i * kThreads + int(threadIdx.x);
        if (kept && at < pages) page[i] = row.table[at];
    }
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();

    const bool samples = row.seen > room;
    float4 sample[Shared::kSampledEach] = {};
    if (samples) load_sample<kThreads>(sample, logits, row.seen, p.vectors);
    // All warps issue the loads of the sample before any of them loads its part of the row.
    __syncthreads();
    const int first = begin + warp * steps * 128 + lane * 4;
    float4 x[kVectors];
    const int last = end & ~3;
    const bool has_partial_vector = p.vectors && last < end;
    float4 of_last;
    if (p.vectors) {
        const int whole = min(last, first + steps * 128);
        const float4* vector = reinterpret_cast<const float4*>(logits + first);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            x[i] = {none(), none(), none(), none()};
            if (first + i * 128 < whole) x[i] = __ldg(vector + i * 32);
        }
        if (has_partial_vector) of_last = load4(logits, last, end, false);
    } else {
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
            x[i] = load4(logits, first + i * 128, i < steps ? end : 0, false);
    }
#pragma unroll
    for (int i = 0; i < kPages / kThreads; ++i) {
        const int at = i * kThreads + int(threadIdx.x);
        if (kept && first_page + at < pages) b.more.pages[at] = page[i];
    }
    const SampleEstimate estimate =
        samples ? estimate_from(s, sample, row.seen, p.topk) : SampleEstimate{logit_of(0), 0};
    if (has_partial_vector) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
            if (i < steps && first + i * 128 == last) x[i] = of_last;
    }
    float* own = b.values + cluster.rank * room;
    const uint32_t found = collect_in_order(s, x, estimate.lowest, first, room, own, b.positions);
    exchange_candidates(s, cluster, b, share, found, room);
    const uint32_t of_cta = lane < int(cluster.ctas) ? b.more.counts[lane] : 0;
    const uint32_t all = __reduce_add_sync(~0u, of_cta);
    const uint32_t max_of_cta = __reduce_max_sync(~0u, of_cta);
    if (all < uint32_t(p.topk) || max_of_cta > uint32_t(room)) {
        // The sample was misleading. The row is still in registers. It is stored to shared memory,
        // and its keys are counted there.
        const Buffers buffers(s, p.rows.columns);
        clear_bins(s);
        for (int i = threadIdx.x; i < (each + 31) / 32; i += kThreads)
            buffers.chosen[i] = buffers.tied(p.shared_resident)[i] = 0;
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
            if (i < steps && first + i * 128 < end)
                *reinterpret_cast<float4*>(buffers.row() + (first - begin) + i * 128) = x[i];
        __syncthreads();
        choose_kept(s, buffers, p, row, cluster, estimate, begin, end - begin, list);
        return;
    }
    // Every warp writes some of this CTA's candidates to the list. They follow the chosen
    // candidates of earlier CTAs and warps.
    const uint32_t each_warp = (found + kThreads - 1) / kThreads * 32;
    const uint32_t own_index = cluster.rank * room;
    WarpPart part;
    part.begin = min(warp * each_warp, found);
    part.end = min(part.begin + each_warp, found);
    cut_candidates(s, cluster, b, Candidates(share, cluster, b, room), estimate, own, own_index,
                   all, p.topk, part);
    if (kept) row.table = b.more.pages - first_page;
    const uint32_t below = (1u << lane) - 1;
#pragma unroll 1
    for (uint32_t base = part.begin; base < part.end; base += 32) {
        const uint32_t i = base + lane;
        const uint32_t key = i < part.end ? key_of(own[i]) : 0;
        const uint32_t tied = __ballot_sync(~0u, key == part.tied);
        const bool first = key == part.tied && uint32_t(__popc(tied & below)) < part.ties;
        const bool is = i < part.end && (first || pair_of(key, own_index + i) >= part.cut);
        const uint32_t chosen = __ballot_sync(~0u, is);
        if (is)
            list[part.at + __popc(chosen & below)] = indexer::slot_of(p.rows, row, b.positions[i]);
        part.at += __popc(chosen);
        part.ties -= min(uint32_t(__popc(tied)), part.ties);
    }
}

}  // namespace mla::sm90::topk
