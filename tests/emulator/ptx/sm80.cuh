// Host versions of the functions of cuda/ptx/sm80.cuh, and of CUDA's own functions that the kernels
// use. They come first on the include path when a C++ compiler compiles the kernels.
#pragma once

#define __forceinline__ inline
#define __launch_bounds__(...)

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "../fibers.h"

#define __noinline__

#define threadIdx (mla::emulator::Block::current()->thread().index)
#define blockIdx (mla::emulator::Block::current()->block_index)
#define gridDim (mla::emulator::Block::current()->grid_dim)

using std::max;
using std::min;

inline mla::emulator::Block& emulated() { return *mla::emulator::Block::current(); }

inline void __syncthreads() { emulated().sync_threads(); }
inline void __threadfence() {}
inline int __ffs(unsigned x) { return x ? std::countr_zero(x) + 1 : 0; }
inline int __popc(unsigned x) { return std::popcount(x); }
inline uint32_t __vcmpeq2(uint32_t a, uint32_t b) {
    const uint32_t differ = a ^ b;
    return (differ & 0xffff ? 0 : 0xffff) | (differ >> 16 ? 0 : 0xffff0000);
}
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
template <typename T>
T __ldcg(const T* from) {
    return *from;
}
// Each read of the clock advances it by the same time.
inline int64_t clock64() {
    static int64_t clock = 0;
    return clock += 1000;
}

// Each lane takes the words of the lane that `source` returns for it.
template <typename T, typename Source>
T emulated_shuffle(T x, const Source& source) {
    uint32_t given[2] = {}, taken[2];
    std::memcpy(given, &x, sizeof(x));
    emulated().together(given, taken, [&](mla::emulator::Warp& w) {
        for (int lane = 0; lane < 32; ++lane) {
            // The last lane to arrive has given `source`: what differs between lanes has to be
            // computed from `lane` and `w`.
            const int from = source(lane, w);
            w.taken[lane][0] = w.given[from][0];
            w.taken[lane][1] = w.given[from][1];
        }
    });
    T result;
    std::memcpy(&result, taken, sizeof(result));
    return result;
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
    return emulated_shuffle(x, [=](int lane, auto&) { return lane ^ mask; });
}
template <typename T>
T __shfl_up_sync(unsigned, T x, int delta) {
    return emulated_shuffle(x,
                            [=](int lane, auto&) { return lane >= delta ? lane - delta : lane; });
}
template <typename T>
T __shfl_sync(unsigned, T x, int source) {
    uint32_t given[3] = {}, taken[2];
    std::memcpy(given, &x, sizeof(x));
    given[2] = uint32_t(source) % 32;
    emulated().together(given, taken, [](mla::emulator::Warp& w) {
        for (int lane = 0; lane < 32; ++lane)
            std::memcpy(w.taken[lane], w.given[w.given[lane][2]], 8);
    });
    T result;
    std::memcpy(&result, taken, sizeof(result));
    return result;
}
inline unsigned __ballot_sync(unsigned, bool x) {
    const uint32_t given[1] = {x};
    uint32_t taken[1];
    emulated().together(given, taken, [](mla::emulator::Warp& w) {
        uint32_t all = 0;
        for (int lane = 0; lane < 32; ++lane) all |= w.given[lane][0] << lane;
        for (int lane = 0; lane < 32; ++lane) w.taken[lane][0] = all;
    });
    return taken[0];
}
inline int __reduce_add_sync(unsigned mask, int x) {
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(mask, x, d);
    return x;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned x) {
    for (int d = 16; d > 0; d /= 2) {
        const unsigned other = __shfl_xor_sync(mask, x, d);
        x = other > x ? other : x;
    }
    return x;
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned x) {
    return ~__reduce_max_sync(mask, ~x);
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline void __syncwarp() { __ballot_sync(~0u, true); }

namespace mla {

// Host version of split_protocol.cuh's memory: one thread at a time runs, until it yields.
struct DeviceMemory {
    static int add_acq_rel(int32_t* at, int n) { return (*at += n) - n; }
    static void add_release(int32_t* at, int n) { *at += n; }
    static int increment(int32_t* at) { return (*at)++; }
    static int load_acquire(const int32_t* at) {
        emulated().yield();
        return *at;
    }
    static bool exchange(int32_t* at, int from, int to) {
        if (*at != from) return false;
        *at = to;
        return true;
    }
};

}  // namespace mla

namespace mla::ptx {

inline int laneid() { return emulated().lane(); }
inline void prefetch_global_l2(const void* address) {
    static_cast<void>(*static_cast<const volatile char*>(address));
}
// Loads a value from shared memory, aligned to its size.
template <typename T>
T emulated_load(uint32_t address) {
    T r;
    std::memcpy(&r, emulated().shared_at(address, sizeof(T)), sizeof(T));
    return r;
}
template <typename T>
void emulated_store(uint32_t address, T x) {
    std::memcpy(emulated().shared_at(address, sizeof(T)), &x, sizeof(T));
}
inline int ld_shared_s32(uint32_t address) { return emulated_load<int>(address); }
inline uint4 ld_shared_v4(uint32_t address) { return emulated_load<uint4>(address); }
inline float ld_shared_f32(uint32_t address) { return emulated_load<float>(address); }
inline void st_shared(uint32_t address, uint32_t x) { emulated_store(address, x); }
inline void st_shared_v4(uint32_t address, uint4 x) { emulated_store(address, x); }
inline char* dynamic_shared() { return emulated().shared(); }
inline uint32_t shared_address(const void* p) {
    return emulator::Block::kSharedBase +
           uint32_t(static_cast<const char*>(p) - emulated().shared());
}

// Loads `matrices` of eight rows of 16 bytes.
template <int kMatrices>
void emulated_ldmatrix(uint32_t (&r)[kMatrices], uint32_t address, bool transposed) {
    const uint32_t given[1] = {address};
    emulated().together(given, r, [=](emulator::Warp& w) {
        for (int matrix = 0; matrix < kMatrices; ++matrix) {
            uint16_t x[8][8];
            for (int row = 0; row < 8; ++row)
                std::memcpy(x[row], emulated().shared_at(w.given[matrix * 8 + row][0], 16), 16);
            for (int lane = 0; lane < 32; ++lane) {
                const int i = lane / 4, j = lane % 4 * 2;
                const uint16_t low = transposed ? x[j][i] : x[i][j];
                const uint16_t high = transposed ? x[j + 1][i] : x[i][j + 1];
                w.taken[lane][matrix] = low | uint32_t(high) << 16;
            }
        }
    });
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    emulated_ldmatrix(r, address, false);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    emulated_ldmatrix(r, address, true);
}
inline void ldmatrix_x2(uint32_t (&r)[2], uint32_t address) {
    emulated_ldmatrix(r, address, false);
}

template <typename T>
float half_of(uint32_t word, int half) {
    const uint16_t bits = uint16_t(word >> 16 * half);
    T x;
    std::memcpy(static_cast<void*>(&x), &bits, 2);
    return float(x);
}

template <typename T>
void mma_m16n8k16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t given[6] = {a[0], a[1], a[2], a[3], b0, b1};
    uint32_t taken[4];
    emulated().together(given, taken, [](emulator::Warp& w) {
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) {
                const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
                float sum = 0;
                for (int k = 0; k < 16; ++k) {
                    const int from_a = row % 8 * 4 + k % 8 / 2, from_b = column * 4 + k % 8 / 2;
                    const uint32_t a = w.given[from_a][row / 8 + k / 8 * 2];
                    const uint32_t b = w.given[from_b][4 + k / 8];
                    sum += half_of<T>(a, k % 2) * half_of<T>(b, k % 2);
                }
                w.taken[lane][i] = std::bit_cast<uint32_t>(sum);
            }
    });
    for (int i = 0; i < 4; ++i) d[i] += std::bit_cast<float>(taken[i]);
}

// The destination of a copy holds NaN until the copy is waited for. The source has to be the
// address of something even if none of it is read.
inline void emulated_copy(uint32_t to, const void* from, int bytes, bool valid) {
    emulated().perhaps_yield();
    char* at = emulated().shared_at(to, bytes);
    if (from == nullptr || reinterpret_cast<uintptr_t>(from) % bytes != 0) {
        std::fprintf(stderr, "a copy of %d bytes from %p\n", bytes, from);
        std::abort();
    }
    std::memset(at, 0xff, bytes);
    emulated().thread().open.push_back({at, from, bytes, valid ? bytes : 0});
}
inline void cp_async_16(uint32_t to, const void* from, bool valid) {
    emulated_copy(to, from, 16, valid);
}
template <int to_offset, int from_offset>
void cp_async_16_at(uint32_t to, const void* from, bool valid) {
    cp_async_16(to + to_offset, static_cast<const char*>(from) + from_offset, valid);
}
inline void cp_async_4(uint32_t to, const void* from, bool valid) {
    emulated_copy(to, from, 4, valid);
}
inline void cp_async_commit_group() {
    emulator::Thread& t = emulated().thread();
    t.groups.push_back(std::move(t.open));
    t.open.clear();
}
template <int N>
void cp_async_wait_group() {
    emulator::Thread& t = emulated().thread();
    while (int(t.groups.size()) > N) {
        for (const emulator::Copy& c : t.groups.front()) c.land();
        t.groups.erase(t.groups.begin());
    }
    emulated().perhaps_yield();
}

// Waits also for copies of no group.
inline void cp_async_wait_all() {
    cp_async_commit_group();
    cp_async_wait_group<0>();
}

template <typename T>
uint32_t cvt_rn_x2(float low, float high) {
    const T pair[2] = {T(low), T(high)};
    uint32_t r;
    std::memcpy(&r, pair, 4);
    return r;
}
template <typename T>
uint32_t mul_rn_x2(uint32_t a, uint32_t b) {
    return cvt_rn_x2<T>(half_of<T>(a, 0) * half_of<T>(b, 0), half_of<T>(a, 1) * half_of<T>(b, 1));
}
inline void bar_sync(int id, int threads) { emulated().bar_sync(id, threads); }
inline bool bar_red_or(int id, int threads, bool own) {
    return emulated().bar_red_or(id, threads, own);
}
inline void bar_arrive(int id, int threads) { emulated().bar_arrive(id, threads); }
inline float ex2_approx(float x) { return std::exp2(x); }
inline float lg2_approx(float x) { return std::log2(x); }

}  // namespace mla::ptx
