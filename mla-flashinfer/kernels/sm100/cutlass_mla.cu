// Absorbed decode on Blackwell: CUTLASS's kernel with the fixes that FlashInfer made. FlashInfer's
// own runMla is not called: it knows one softmax scale, and writes no log-sum-exp.
#include <flashinfer/attention/cutlass_mla.cuh>

#include "dtype.cuh"
#include "flashinfer.h"

namespace {

template <typename T>
typename flashinfer::attention::MlaSm100<T>::Fmha::Arguments arguments(const FiCutlassMla& call) {
    using Kernel = flashinfer::attention::MlaSm100<T>;
    constexpr int kLatent = 512, kRow = 512 + 64;
    T *query = fi::address<T>(call.query), *cache = fi::address<T>(call.cache);
    const auto strides = [](int64_t row, int64_t request) {
        return cute::make_tuple(row, cute::_1{}, request);
    };
    const auto rows = strides(call.row_stride, call.page_stride);
    const int64_t heads = FI_CUTLASS_MLA_HEADS;
    cutlass::KernelHardwareInfo hardware;
    hardware.sm_count = call.sms;
    typename Kernel::Fmha::Arguments arguments{
        cute::make_tuple(typename Kernel::TileShapeH{}, call.page_size * call.table_width,
                         typename Kernel::TileShapeD{}, call.requests),
        {call.softmax_scale, query, strides(kRow, heads * kRow), query + kLatent,
         strides(kRow, heads * kRow), cache, rows, cache + kLatent, rows,
         fi::address<int32_t>(call.seq_lens), fi::address<int32_t>(call.block_table),
         cute::make_stride(cute::_1{}, call.table_width), call.page_count, call.page_size},
        {fi::address<T>(call.out), strides(kLatent, heads * kLatent), call.lse,
         cute::make_tuple(cute::_1{}, static_cast<int>(heads))},
        hardware,
    };
    Kernel::Fmha::set_split_kv(arguments);
    return arguments;
}

template <typename T>
cudaError_t attend(const FiCutlassMla& call, cudaStream_t stream) {
    using Operation = typename flashinfer::attention::MlaSm100<T>::Fmha;
    using Kernel = typename Operation::Kernel;
    // CUTLASS does so once per process, which is once too few where there are several GPUs.
    const cudaError_t status = cudaFuncSetAttribute(cutlass::device_kernel<Kernel>,
                                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    Kernel::SharedStorageSize);
    if (status != cudaSuccess) return status;
    const auto check = [](cutlass::Status status, const char* step) {
        if (status == cutlass::Status::kSuccess) return;
        throw std::runtime_error(std::string(step) + ": " + cutlassGetStatusString(status));
    };
    const auto prepared = arguments<T>(call);
    check(Operation::can_implement(prepared), "arguments of CUTLASS_MLA");
    if (Operation::get_workspace_size(prepared) > static_cast<size_t>(call.workspace_bytes)) {
        throw std::length_error("workspace: given " + std::to_string(call.workspace_bytes) +
                                " bytes, accepted at least " +
                                std::to_string(Operation::get_workspace_size(prepared)));
    }
    Operation operation;
    check(operation.run(prepared, call.workspace, stream), "launch of CUTLASS_MLA");
    return cudaSuccess;
}

}  // namespace

extern "C" int32_t fi_cutlass_mla(const FiCutlassMla* call, void* stream) {
    return fi::guarded([&] {
        return fi::of_dtype(call->dtype, [&](auto zero) {
            return attend<flashinfer::cutlass_dtype_t<decltype(zero)>>(
                *call, static_cast<cudaStream_t>(stream));
        });
    });
}
