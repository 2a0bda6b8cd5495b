// The loading warps of tiles of more than 32 heads: they bring rows of the cache to the ring as panels
// that wgmma reads, and convert them on the way if the cache has bytes.
#pragma once

#include "../../../../common/swizzle.cuh"
#include "../../../../formats/e4m3_words.cuh"
#include "../list_walk.cuh"
#include "../rows.cuh"
#include "layout.cuh"

namespace mla::sm90::sparse {

// Sixteen bytes of e4m3 as 16 values of T.
template <typename T>
struct SixteenValues {
    uint4 low, high;
};

template <typename T>
__device__ __forceinline__ SixteenValues<T> from_e4m3(const uint4& bytes) {
    const uint32_t in[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    uint32_t out[8], nan = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // Bytes 0 and 2 become neighbours, and 1 and 3.
        const uint32_t word = __byte_perm(in[i], 0, 0x3120);
        e4m3_note_nan(nan, word);
        out[2 * i] = e4m3_even<T>(word);
        out[2 * i + 1] = e4m3_odd<T>(word);
    }
    // A NaN spoils the whole row in any case: its scores, and so the sums of them.
    if (nan & 0x80808080) {
#pragma unroll
        for (uint32_t& word : out) word = 0x7fff7fff;
    }
    return {make_uint4(out[0], out[1], out[2], out[3]), make_uint4(out[4], out[5], out[6], out[7])};
}

// The same times an f32, rounded about once: the factor is the sum of two of T.
template <typename T>
__device__ __forceinline__ void multiply(SixteenValues<T>& v, float factor) {
    const float head = __uint_as_float(ptx::cvt_rn_x2<__nv_bfloat16>(0.f, factor));
    const uint32_t high = ptx::cvt_rn_x2<__nv_bfloat16>(head, head);
    const uint32_t low = ptx::cvt_rn_x2<__nv_bfloat16>(factor - head, factor - head);
    uint32_t* const words[] = {&v.low.x,  &v.low.y,  &v.low.z,  &v.low.w,
                               &v.high.x, &v.high.y, &v.high.z, &v.high.w};
#pragma unroll
    for (uint32_t* word : words)
        *word = ptx::fma_rn_x2<T>(*word, high, ptx::mul_rn_x2<T>(*word, low));
}

// One of the four warps: 16 rows of each KV tile.
template <typename T, class R>
struct WideLoader {
    using L = WideLayout<R>;

    ListWalk<L> walk;
    uint32_t base;
    Ring<L::kLatentStages> latent = {};
    Ring<L::kRopeStages> rope = {};
    ptx::CachePolicy policy = ptx::createpolicy_evict_first();

    __device__ void run() {
        walk.run([&](uint32_t taken, int keys) { load(taken, keys); });
    }

  private:
    static constexpr int kWarpRows = 16;

    __device__ void load(uint32_t taken, int keys) {
        // A lane knows one of the warp's rows, in turns.
        const int own = walk.warp * kWarpRows + (walk.lane & (kWarpRows - 1));
        const char* row = own < keys ? walk.row(walk.entry(taken + own)) : nullptr;
        load_latent(row, 0);
        load_latent(row, 1);
        load_rope(row);
    }

    __device__ static const char* of_lane(const char* row, int lane) {
        return reinterpret_cast<const char*>(
            __shfl_sync(~0u, reinterpret_cast<unsigned long long>(row), lane));
    }

    // Where a warp's row has a chunk of 16 bytes of a panel.
    __device__ uint32_t place(uint32_t panel, int row, int chunk) const {
        return panel + swizzled<128>(walk.warp * kWarpRows + row, chunk);
    }

    // 256 latent values of each row: one stage.
    __device__ void load_latent(const char* row, int half) {
        ptx::mbarrier_wait(ptx::shared_address(&walk.s.latent_empty[latent.slot]),
                           latent.phase ^ 1);
        const uint32_t stage = base + L::kRingOffset + latent.slot * L::kStageBytes;
        const uint32_t full = ptx::shared_address(&walk.s.latent_full[latent.slot]);
        const int lane = walk.lane;
        if constexpr (R::kConverts) {
            convert_latent(row, half, stage);
            arrive(full);
        } else {
            // 16 bytes of every fourth row, of each panel: eight lanes write a whole line of shared
            // memory. A row per instruction, whose lanes write to four panels, was a fifth slower.
#pragma unroll
            for (int i = 0; i < kWarpRows / 4; ++i) {
                const int to = 4 * i + lane / 8;
                const char* from = of_lane(row, to);
#pragma unroll
                for (int j = 0; j < kStagePanels; ++j)
                    copy(place(stage + j * kPanelBytes, to, lane & 7),
                         from + half * 512 + j * 128 + (lane & 7) * 16, from != nullptr);
            }
            ptx::cp_async_mbarrier_arrive_noinc(full);
        }
        latent.advance(1);
    }

    __device__ void copy(uint32_t to, const char* from, bool valid) const {
        // Of a row that is not there nothing is read.
        const void* source = valid ? from : walk.p.q_latent;
#if defined(V_L2)
        int bytes = valid ? 16 : 0;
        asm volatile("cp.async.cg.shared.global.L2::" V_L2 " [%0], [%1], 16, %2;" ::"r"(to),
                     "l"(source), "r"(bytes)
                     : "memory");
#else
        if (walk.p.read_once)
            ptx::cp_async_16(to, source, valid, policy);
        else
            ptx::cp_async_16(to, source, valid);
#endif
    }

    // What was written is for wgmma.
    __device__ static void arrive(uint32_t full) {
        ptx::fence_proxy_async();
        ptx::mbarrier_arrive(full);
    }

    // A lane has 16 bytes of every second row.
    __device__ void convert_latent(const char* row, int half, uint32_t stage) const {
#ifndef V_BATCH
#define V_BATCH 4
#endif
        constexpr int steps = kWarpRows / 2, batch = V_BATCH;
        const int odd = walk.lane >> 4, chunk = walk.lane & 15;
        // Neighbouring panels have the same banks: of those the two halves are written in turns.
        const uint32_t panel = stage + chunk / 4 * kPanelBytes;
        const int first = chunk % 4 * 2, swap = chunk / 4 & 1;
#pragma unroll
        for (int b = 0; b < steps / batch; ++b) {
            uint4 bytes[batch];
            float scale[batch];
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                const char* from = of_lane(row, 2 * (b * batch + i) + odd);
                bytes[i] = make_uint4(0, 0, 0, 0);
                scale[i] = 0.f;
                if (from) {
                    bytes[i] = __ldg(reinterpret_cast<const uint4*>(from + half * 256) + chunk);
                    if constexpr (R::kScales)
                        scale[i] = __ldg(reinterpret_cast<const float*>(from + kLatent) + half * 2 +
                                         chunk / 8);
                }
            }
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                const int to = 2 * (b * batch + i) + odd;
                SixteenValues<T> v = from_e4m3<T>(bytes[i]);
                if constexpr (R::kScales) multiply(v, scale[i]);
                ptx::st_shared_v4(place(panel, to, first + swap), swap ? v.high : v.low);
                ptx::st_shared_v4(place(panel, to, first + 1 - swap), swap ? v.low : v.high);
            }
        }
    }

    // The rotary values: one stage.
    __device__ void load_rope(const char* row) {
        ptx::mbarrier_wait(ptx::shared_address(&walk.s.rope_empty[rope.slot]), rope.phase ^ 1);
        const uint32_t panel = base + L::kRopeOffset + rope.slot * kPanelBytes;
        const uint32_t full = ptx::shared_address(&walk.s.rope_full[rope.slot]);
        const int lane = walk.lane;
        if constexpr (R::kConverts && !R::kScales) {
            // A lane has 16 bytes of every eighth row.
#pragma unroll
            for (int i = 0; i < kWarpRows / 8; ++i) {
                const int to = 8 * i + lane / 4;
                const char* from = of_lane(row, to);
                uint4 bytes = make_uint4(0, 0, 0, 0);
                if (from)
                    bytes = __ldg(reinterpret_cast<const uint4*>(from + kLatent) + (lane & 3));
                const SixteenValues<T> v = from_e4m3<T>(bytes);
                ptx::st_shared_v4(place(panel, to, (lane & 3) * 2), v.low);
                ptx::st_shared_v4(place(panel, to, (lane & 3) * 2 + 1), v.high);
            }
            arrive(full);
        } else {
            // 16 bytes of every fourth row.
            constexpr int offset = R::kConverts ? 528 : kLatent * 2;
#pragma unroll
            for (int i = 0; i < kWarpRows / 4; ++i) {
                const int to = 4 * i + lane / 8;
                const char* from = of_lane(row, to);
                copy(place(panel, to, lane & 7), from + offset + (lane & 7) * 16, from != nullptr);
            }
            ptx::cp_async_mbarrier_arrive_noinc(full);
        }
        rope.advance(1);
    }
};

}  // namespace mla::sm90::sparse
