// Warpgroup MMAs (wgmma) of tiles in shared memory, with f32 accumulators in registers.
//
// Operand tiles are 64 elements (128 bytes) wide with 128-byte swizzle, as TMA writes them, and
// begin at multiples of 1024 bytes. In a K-major tile, the 64 elements run along K. In an M-major
// tile, they run along M, and the rows of the tile run along K. One instruction has a K of 16. The
// next 16 lie 32 bytes further in a K-major tile, and 16 rows (2048 bytes) further in an M-major
// one.
//
// Accumulator layout of m64nN, with g = lane / 4 and q = lane % 4: d[4 i] and d[4 i + 1] of warp w
// of the warpgroup are row 16 w + g at columns 8 i + 2 q and 8 i + 2 q + 1. d[4 i + 2] and d[4 i +
// 3] are row 16 w + g + 8 at the same columns.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace mla::ptx {

// Descriptor of a tile whose groups of eight rows are 1024 bytes apart. `panel` counts if tiles lie
// side by side and their rows run along K: it is the distance in bytes from one tile to the next.
// For a single tile, it is ignored.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t panel = 16) {
    constexpr uint64_t swizzle_128 = uint64_t(1) << 62;
    constexpr uint64_t stride = uint64_t(1024 >> 4) << 32;
    return swizzle_128 | stride | uint64_t(panel >> 4) << 16 | ((address & 0x3FFFF) >> 4);
}

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `pending` committed groups are unfinished.
template <int pending>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving a use of a register that an MMA reads or writes across this call.
__device__ __forceinline__ void wgmma_settle(float& x) {
    asm volatile("" : "+f"(x)::"memory");
}
__device__ __forceinline__ void wgmma_settle(uint32_t& x) {
    asm volatile("" : "+r"(x)::"memory");
}

// Dimension along which an operand's rows run. M stands for N if the operand is B.
enum class Major { K = 0, M = 1 };

// The accumulators' part of an instruction: their names in its text, and their operands.
#define MLA_NAMES_4 "%0, %1, %2, %3"
#define MLA_NAMES_8 MLA_NAMES_4 ", %4, %5, %6, %7"
#define MLA_NAMES_16 MLA_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MLA_NAMES_32                                                                \
    MLA_NAMES_16                                                                    \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, " \
    "%31"
#define MLA_NAMES_48 \
    MLA_NAMES_32     \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MLA_NAMES_64 \
    MLA_NAMES_48     \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MLA_NAMES_128                                                                       \
    MLA_NAMES_64                                                                            \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "    \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, " \
    "%97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "     \
    "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "  \
    "%125, %126, %127"
#define MLA_SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MLA_SUMS_8(d, i) MLA_SUMS_4(d, i), MLA_SUMS_4(d, i + 4)
#define MLA_SUMS_16(d, i) MLA_SUMS_8(d, i), MLA_SUMS_8(d, i + 8)
#define MLA_SUMS_32(d, i) MLA_SUMS_16(d, i), MLA_SUMS_16(d, i + 16)
#define MLA_SUMS_48(d, i) MLA_SUMS_32(d, i), MLA_SUMS_16(d, i + 32)
#define MLA_SUMS_64(d, i) MLA_SUMS_32(d, i), MLA_SUMS_32(d, i + 32)
#define MLA_SUMS_128(d, i) MLA_SUMS_64(d, i), MLA_SUMS_64(d, i + 64)

// The instruction's text. It takes K, the type of both operands, N, the number of accumulators, and
// the names of the other operands. These are numbered on from the accumulators. `majors` gives the
// major dimension of the operands in shared memory, for types that allow a choice.
#define MLA_WGMMA_TEXT(k, type, n, count, a, b, accumulate, majors)                            \
    "{\n"                                                                                      \
    ".reg .pred p;\n"                                                                          \
    "setp.ne.b32 p, " accumulate                                                               \
    ", 0;\n"                                                                                   \
    "wgmma.mma_async.sync.aligned.m64n" #n "k" #k ".f32." type "." type " {" MLA_NAMES_##count \
        "}, " a ", " b ", p, 1, 1" majors                                                      \
        ";\n"                                                                                  \
        "}\n"

// d (64 x N) = a (64 x 16) b (16 x N), plus d if `accumulate` is not 0. If an operand is not
// K-major, its rows run along K, and the descriptor's `panel` is the distance between its tiles of
// 64 columns.
template <typename T, int N, Major a_major, Major b_major = Major::K>
struct Wgmma;

#define MLA_WGMMA(T, type, n, count, name_a, name_b, name_accumulate, name_a_major, name_b_major) \
    template <Major a_major, Major b_major>                                                       \
    struct Wgmma<T, n, a_major, b_major> {                                                        \
        __device__ static __forceinline__ void run(float (&d)[count], uint64_t a, uint64_t b,     \
                                                   int accumulate) {                              \
            asm volatile(MLA_WGMMA_TEXT(16, type, n, count, name_a, name_b, name_accumulate,      \
                                        ", " name_a_major ", " name_b_major)                      \
                         : MLA_SUMS_##count(d, 0)                                                 \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(int(a_major)),                    \
                           "n"(int(b_major)));                                                    \
        }                                                                                         \
    };
#define MLA_WGMMA_OF(T, type)                                      \
    MLA_WGMMA(T, type, 8, 4, "%4", "%5", "%6", "%7", "%8")         \
    MLA_WGMMA(T, type, 16, 8, "%8", "%9", "%10", "%11", "%12")     \
    MLA_WGMMA(T, type, 32, 16, "%16", "%17", "%18", "%19", "%20")  \
    MLA_WGMMA(T, type, 64, 32, "%32", "%33", "%34", "%35", "%36")  \
    MLA_WGMMA(T, type, 96, 48, "%48", "%49", "%50", "%51", "%52")  \
    MLA_WGMMA(T, type, 128, 64, "%64", "%65", "%66", "%67", "%68")

MLA_WGMMA_OF(__nv_bfloat16, "bf16")
MLA_WGMMA_OF(__half, "f16")

// The same with A in registers, in the layout of accumulators. a[0] of lane 4 g + q is row 16 w + g
// at columns 2 q and 2 q + 1, and a[1] is row 16 w + g + 8 there. a[2] and a[3] are both rows at
// columns 2 q + 8 and 2 q + 9. These registers must not change until the MMA has been waited for.
template <typename T, int N, Major b_major = Major::K>
struct WgmmaFromRegisters;

#define MLA_WGMMA_FROM_REGISTERS(T, type, n, count, names_a, name_b, name_accumulate, name_major) \
    template <Major b_major>                                                                      \
    struct WgmmaFromRegisters<T, n, b_major> {                                                    \
        __device__ static __forceinline__ void run(float (&d)[count], const uint32_t* a,          \
                                                   uint64_t b, int accumulate) {                  \
            asm volatile(MLA_WGMMA_TEXT(16, type, n, count, "{" names_a "}", name_b,              \
                                        name_accumulate, ", " name_major)                         \
                         : MLA_SUMS_##count(d, 0)                                                 \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),   \
                           "n"(int(b_major)));                                                    \
        }                                                                                         \
    };
#define MLA_WGMMA_FROM_REGISTERS_OF(T, type)                                                      \
    MLA_WGMMA_FROM_REGISTERS(T, type, 16, 8, "%8, %9, %10, %11", "%12", "%13", "%14")             \
    MLA_WGMMA_FROM_REGISTERS(T, type, 32, 16, "%16, %17, %18, %19", "%20", "%21", "%22")          \
    MLA_WGMMA_FROM_REGISTERS(T, type, 64, 32, "%32, %33, %34, %35", "%36", "%37", "%38")          \
    MLA_WGMMA_FROM_REGISTERS(T, type, 128, 64, "%64, %65, %66, %67", "%68", "%69", "%70")         \
    MLA_WGMMA_FROM_REGISTERS(T, type, 256, 128, "%128, %129, %130, %131", "%132", "%133", "%134")

MLA_WGMMA_FROM_REGISTERS_OF(__nv_bfloat16, "bf16")
MLA_WGMMA_FROM_REGISTERS_OF(__half, "f16")

// d (64 x N) = a (64 x 32) b (N x 32)^T of e4m3, plus d if `accumulate` is not 0. Both operands are
// K-major. The 32 columns of an instruction are 32 bytes.
template <int N>
struct WgmmaE4m3;

#define MLA_WGMMA_E4M3(n, count, name_a, name_b, name_accumulate)                             \
    template <>                                                                               \
    struct WgmmaE4m3<n> {                                                                     \
        __device__ static __forceinline__ void run(float (&d)[count], uint64_t a, uint64_t b, \
                                                   int accumulate) {                          \
            asm volatile(                                                                     \
                MLA_WGMMA_TEXT(32, "e4m3", n, count, name_a, name_b, name_accumulate, "")     \
                : MLA_SUMS_##count(d, 0)                                                      \
                : "l"(a), "l"(b), "r"(accumulate));                                           \
        }                                                                                     \
    };

MLA_WGMMA_E4M3(32, 16, "%16", "%17", "%18")
MLA_WGMMA_E4M3(64, 32, "%32", "%33", "%34")
MLA_WGMMA_E4M3(128, 64, "%64", "%65", "%66")

#undef MLA_WGMMA_E4M3
#undef MLA_WGMMA_FROM_REGISTERS_OF
#undef MLA_WGMMA_FROM_REGISTERS
#undef MLA_WGMMA_OF
#undef MLA_WGMMA
#undef MLA_WGMMA_TEXT
#undef MLA_SUMS_128
#undef MLA_SUMS_64
#undef MLA_SUMS_32
#undef MLA_SUMS_16
#undef MLA_SUMS_8
#undef MLA_SUMS_4
#undef MLA_NAMES_128
#undef MLA_NAMES_64
#undef MLA_NAMES_32
#undef MLA_NAMES_16
#undef MLA_NAMES_8
#undef MLA_NAMES_4

}  // namespace mla::ptx
