// Copies rows to the places that an index names: from an engine's own order of tokens into the
// order of a step, and results back.
//
// Columns that are contiguous in both tensors are copied in units of up to 16 bytes. Each thread
// has two units in flight, of one row or of neighbouring ones.

#include "helpers.cuh"

namespace mla {
namespace {

constexpr int kThreads = 256;
constexpr int kUnits = 2;

struct CopyRowsPlan {
    const void* from;
    const int64_t* places;
    void* to;
    int64_t to_rows;
    // Number of heads of a row, of units of a head, and of all units.
    uint64_t heads, width, units;
    // Strides of rows, heads and columns, in units.
    int64_t from_strides[3];
    int64_t to_strides[3];
};

template <typename Unit, typename Index>
__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(const __grid_constant__ CopyRowsPlan p) {
    const Index first = Index(blockIdx.x) * (kThreads * kUnits) + threadIdx.x;
    Unit x[kUnits];
    int64_t to[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
        to[i] = -1;
        const Index index = first + i * kThreads;
        if (index >= Index(p.units)) continue;
        const Index column = index % Index(p.width), rest = index / Index(p.width);
        const Index head = rest % Index(p.heads), row = rest / Index(p.heads);
        const int64_t place = p.places[row];
        if (place < 0 || place >= p.to_rows) continue;
        to[i] = place * p.to_strides[0] + int64_t(head) * p.to_strides[1] +
                int64_t(column) * p.to_strides[2];
        x[i] = static_cast<const Unit*>(
            p.from)[int64_t(row) * p.from_strides[0] + int64_t(head) * p.from_strides[1] +
                    int64_t(column) * p.from_strides[2]];
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
        if (to[i] >= 0) static_cast<Unit*>(p.to)[to[i]] = x[i];
}

using Kernel = void (*)(CopyRowsPlan);

Kernel copy_rows_kernel_for(int64_t unit, bool small) {
    switch (unit) {
        case 16:
            return small ? copy_rows_kernel<uint4, uint32_t> : copy_rows_kernel<uint4, uint64_t>;
        case 8:
            return small ? copy_rows_kernel<uint2, uint32_t> : copy_rows_kernel<uint2, uint64_t>;
        case 4:
            return small ? copy_rows_kernel<uint32_t, uint32_t>
                         : copy_rows_kernel<uint32_t, uint64_t>;
        case 2:
            return small ? copy_rows_kernel<uint16_t, uint32_t>
                         : copy_rows_kernel<uint16_t, uint64_t>;
        default:
            return small ? copy_rows_kernel<uint8_t, uint32_t>
                         : copy_rows_kernel<uint8_t, uint64_t>;
    }
}

// The bytes of the largest unit in which rows can be copied.
int64_t unit_of(const MlaCopyRowsParams& p, const int64_t (&from)[3], const int64_t (&to)[3]) {
    if (from[2] != 1 || to[2] != 1) return p.element_bytes;
    const auto fits = [&](int64_t bytes) {
        if (!is_aligned(p.from, bytes) || !is_aligned(p.to, bytes)) return false;
        for (const int64_t elements : {p.width, from[0], from[1], to[0], to[1]})
            if (elements * p.element_bytes % bytes) return false;
        return true;
    };
    for (int64_t bytes = 16; bytes > p.element_bytes; bytes /= 2)
        if (fits(bytes)) return bytes;
    return p.element_bytes;
}

}  // namespace

MlaStatus load_copy_rows_kernels() {
    for (const int64_t unit : {1, 2, 4, 8, 16})
        for (const bool small : {false, true}) {
            const MlaStatus status = load("copy rows", copy_rows_kernel_for(unit, small));
            if (status.code != MLA_OK) return status;
        }
    return ok();
}

}  // namespace mla

using namespace mla;

extern "C" MlaStatus mla_copy_rows(const MlaCopyRowsParams* params, void* stream) {
    if (!params) return refuse("params", 0, "a pointer");
    const MlaCopyRowsParams& p = *params;
    constexpr int64_t kMax = int64_t(1) << 40;
    Check check;
    check
        .that(p.element_bytes == 1 || p.element_bytes == 2 || p.element_bytes == 4, "element_bytes",
              p.element_bytes, "1, 2 or 4")
        .that(p.rows >= 0 && p.rows <= INT32_MAX, "rows", p.rows, "0..=2147483647")
        .that(p.to_rows >= 0 && p.to_rows < kMax, "to_rows", p.to_rows, "0 to 2^40")
        .that(p.heads >= 0 && p.heads <= 65536, "heads", p.heads, "0..=65536")
        .that(p.width >= 0 && p.width <= 65536, "width", p.width, "0..=65536");
    if (check.failed() || p.rows == 0 || p.to_rows == 0 || p.heads == 0 || p.width == 0)
        return check.status();
    const int64_t elements = p.heads * p.width;
    check.that(p.rows <= kMax / elements, "rows", p.rows, "at most 2^40 elements")
        .pointer(p.from, p.element_bytes, "from")
        .pointer(p.places, 8, "places")
        .pointer(p.to, p.element_bytes, "to");
    const int64_t from_extents[] = {p.rows, p.heads, p.width};
    const int64_t to_extents[] = {p.to_rows, p.heads, p.width};
    CopyRowsPlan plan = {p.from, p.places, p.to, p.to_rows, uint64_t(p.heads), 0, 0, {}, {}};
    // Strides of an axis of one element are never used.
    for (int i = 0; i < 3; ++i) {
        plan.from_strides[i] = from_extents[i] > 1 ? p.from_strides[i] : i == 2 ? 1 : 0;
        plan.to_strides[i] = to_extents[i] > 1 ? p.to_strides[i] : i == 2 ? 1 : 0;
        check.stride(plan.from_strides[i], "from_strides")
            .stride(plan.to_strides[i], "to_strides", to_extents[i] > 1 ? 1 : 0);
    }
    if (check.failed()) return check.status();
    const int64_t unit = unit_of(p, plan.from_strides, plan.to_strides);
    const int64_t per_unit = unit / p.element_bytes;
    plan.width = uint64_t(p.width / per_unit);
    plan.units = uint64_t(p.rows) * plan.heads * plan.width;
    if (per_unit > 1)
        for (int i = 0; i < 2; ++i) {
            plan.from_strides[i] /= per_unit;
            plan.to_strides[i] /= per_unit;
        }
    const int64_t blocks = ceil_div(int64_t(plan.units), kThreads * kUnits);
    if (blocks > INT32_MAX) return refuse("rows", p.rows, "fewer elements");
    // Indices up to the end of the last CTA must fit.
    const bool small = plan.units <= INT32_MAX;
    return launch("copy rows", copy_rows_kernel_for(unit, small), dim3(uint32_t(blocks)),
                  dim3(kThreads), stream, plan);
}
