// Copies, repeats or clears up to three axes of elements with any strides.
//
// The host reduces the problem first. It drops axes of one element, sorts the others by the
// output's strides, and merges neighbours that continue each other. It takes the elements of a
// contiguous innermost axis in units of up to 16 bytes. A loop over units is left, in which each
// thread has four units in flight.

#include <algorithm>

#include "../common/octet.cuh"
#include "helpers.cuh"

namespace mla {
namespace {

constexpr int kThreads = 256;
constexpr int kUnits = 4;

struct CopyPlan {
    const void* from;
    void* to;
    // Axes, the outermost first, in units.
    int64_t shape[3];
    int64_t from_strides[3];
    int64_t to_strides[3];
    int64_t units;
};

template <typename Unit, typename Index>
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ CopyPlan p) {
    const Index first = Index(blockIdx.x) * (kThreads * kUnits) + threadIdx.x;
    Unit x[kUnits];
    int64_t to[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
        const Index index = first + i * kThreads;
        if (index >= Index(p.units)) continue;
        const Index inner = index % Index(p.shape[2]), rest = index / Index(p.shape[2]);
        const Index middle = rest % Index(p.shape[1]), outer = rest / Index(p.shape[1]);
        to[i] = int64_t(outer) * p.to_strides[0] + int64_t(middle) * p.to_strides[1] +
                int64_t(inner) * p.to_strides[2];
        if (p.from)
            x[i] = static_cast<const Unit*>(
                p.from)[int64_t(outer) * p.from_strides[0] + int64_t(middle) * p.from_strides[1] +
                        int64_t(inner) * p.from_strides[2]];
        else
            x[i] = Unit{};
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
        if (first + i * kThreads < Index(p.units)) static_cast<Unit*>(p.to)[to[i]] = x[i];
}

using Kernel = void (*)(CopyPlan);

Kernel copy_kernel_for(int64_t unit, bool small) {
    switch (unit) {
        case 16: return small ? copy_kernel<uint4, uint32_t> : copy_kernel<uint4, uint64_t>;
        case 8: return small ? copy_kernel<uint2, uint32_t> : copy_kernel<uint2, uint64_t>;
        case 4: return small ? copy_kernel<uint32_t, uint32_t> : copy_kernel<uint32_t, uint64_t>;
        case 2: return small ? copy_kernel<uint16_t, uint32_t> : copy_kernel<uint16_t, uint64_t>;
        default: return small ? copy_kernel<uint8_t, uint32_t> : copy_kernel<uint8_t, uint64_t>;
    }
}

struct Axis {
    int64_t extent, from, to;
};

// Reduces the problem; returns the bytes of a unit.
int64_t reduce(const MlaCopyParams& p, CopyPlan& plan) {
    Axis axes[3];
    int count = 0;
    for (int i = 0; i < 3; ++i)
        if (p.shape[i] > 1)
            axes[count++] = {p.shape[i], p.from ? p.from_strides[i] : 0, p.to_strides[i]};
    std::stable_sort(axes, axes + count, [](const Axis& a, const Axis& b) { return a.to > b.to; });
    for (int i = count - 1; i > 0; --i) {
        Axis &outer = axes[i - 1], &inner = axes[i];
        if (outer.to != inner.to * inner.extent ||
            (p.from && outer.from != inner.from * inner.extent))
            continue;
        outer = {outer.extent * inner.extent, inner.from, inner.to};
        for (int j = i; j + 1 < count; ++j) axes[j] = axes[j + 1];
        --count;
    }

    int64_t unit = p.element_bytes;
    const Axis none = {1, 0, 0};
    const Axis last = count ? axes[count - 1] : none;
    if (count && last.to == 1 && (!p.from || last.from == 1)) {
        const auto fits = [&](int64_t bytes) {
            if (!is_aligned(p.from, bytes) || !is_aligned(p.to, bytes) ||
                last.extent * p.element_bytes % bytes)
                return false;
            for (int i = 0; i + 1 < count; ++i)
                if (axes[i].from * p.element_bytes % bytes || axes[i].to * p.element_bytes % bytes)
                    return false;
            return true;
        };
        for (int64_t bytes = 16; bytes > unit; bytes /= 2)
            if (fits(bytes)) unit = bytes;
        const int64_t elements = unit / p.element_bytes;
        axes[count - 1].extent /= elements;
        for (int i = 0; i + 1 < count; ++i) {
            axes[i].from /= elements;
            axes[i].to /= elements;
        }
    }
    plan.from = p.from;
    plan.to = p.to;
    plan.units = 1;
    for (int i = 0; i < 3; ++i) {
        const Axis axis = i + count < 3 ? none : axes[i + count - 3];
        plan.shape[i] = axis.extent;
        plan.from_strides[i] = axis.from;
        plan.to_strides[i] = axis.to;
        plan.units *= axis.extent;
    }
    return unit;
}

}  // namespace

MlaStatus load_copy_kernels() {
    for (const int64_t unit : {1, 2, 4, 8, 16})
        for (const bool small : {false, true}) {
            const MlaStatus status = load("copy", copy_kernel_for(unit, small));
            if (status.code != MLA_OK) return status;
        }
    return ok();
}

}  // namespace mla

using namespace mla;

extern "C" MlaStatus mla_copy(const MlaCopyParams* params, void* stream) {
    if (!params) return refuse("params", 0, "a pointer");
    const MlaCopyParams& p = *params;
    Check check;
    check.that(p.element_bytes == 1 || p.element_bytes == 2 || p.element_bytes == 4,
               "element_bytes", p.element_bytes, "1, 2 or 4");
    int64_t elements = 1;
    for (const int64_t extent : p.shape) {
        check.that(extent >= 0 && extent < (int64_t(1) << 40), "shape", extent,
                   "extents from 0 to 2^40");
        if (check.failed()) return check.status();
        check.that(extent == 0 || elements <= (int64_t(1) << 40) / extent, "shape", extent,
                   "at most 2^40 elements");
        elements *= extent;
        if (check.failed()) return check.status();
    }
    if (elements == 0) return ok();
    check.pointer(p.to, p.element_bytes, "to");
    if (p.from) check.pointer(p.from, p.element_bytes, "from");
    for (int i = 0; i < 3; ++i) {
        check.stride(p.to_strides[i], "to_strides", p.shape[i] > 1 ? 1 : 0);
        if (p.from) check.stride(p.from_strides[i], "from_strides");
    }
    if (check.failed()) return check.status();
    CopyPlan plan;
    const int64_t unit = reduce(p, plan);
    const int64_t blocks = ceil_div(plan.units, kThreads * kUnits);
    if (blocks > INT32_MAX) return refuse("shape", elements, "fewer elements");
    // Indexes up to the end of the last CTA must fit.
    const bool small = plan.units <= INT32_MAX;
    return launch("copy", copy_kernel_for(unit, small), dim3(uint32_t(blocks)), dim3(kThreads),
                  stream, plan);
}
