// The kernel that an instantiation is an instance of.
#pragma once

#include "kernel.cuh"
#include "roles/kernel.cuh"

namespace mla::sm80::decode {

template <class C>
constexpr auto kernel_of() {
    if constexpr (C::kRoles)
        return &roles_kernel<C>;
    else
        return &decode_kernel<C>;
}

}  // namespace mla::sm80::decode
