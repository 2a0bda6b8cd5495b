// cuda/sm80/mla_sm80.h
pub const MLA_DECODE_SM80_COUNTER_BYTES: u32 = 8192;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct MlaDeviceLimits {
    pub shared_memory_bytes: i32,
    pub multiprocessors: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of MlaDeviceLimits"][::core::mem::size_of::<MlaDeviceLimits>() - 8usize];
    [
        "Alignment of MlaDeviceLimits",
    ][::core::mem::align_of::<MlaDeviceLimits>() - 4usize];
};
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_decode_sm80_workspace"]
    pub fn mla_decode_sm80_workspace(
        params: *const MlaDecodeParams,
        limits: *const MlaDeviceLimits,
        bytes: *mut usize,
    ) -> MlaStatus;
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_decode_sm80"]
    pub fn mla_decode_sm80(
        params: *const MlaDecodeParams,
        limits: *const MlaDeviceLimits,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_sparse_sm80_workspace"]
    pub fn mla_sparse_sm80_workspace(
        params: *const MlaSparseParams,
        limits: *const MlaDeviceLimits,
        bytes: *mut usize,
    ) -> MlaStatus;
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_sparse_sm80"]
    pub fn mla_sparse_sm80(
        params: *const MlaSparseParams,
        limits: *const MlaDeviceLimits,
        workspace: *mut ::core::ffi::c_void,
        workspace_bytes: usize,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_load_prefill_sm80"]
    pub fn mla_load_prefill_sm80(params: *const MlaPrefillParams) -> MlaStatus;
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_prefill_sm80_workspace"]
    pub fn mla_prefill_sm80_workspace(
        params: *const MlaPrefillParams,
        limits: *const MlaDeviceLimits,
        bytes: *mut usize,
    ) -> MlaStatus;
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_prefill_sm80"]
    pub fn mla_prefill_sm80(
        params: *const MlaPrefillParams,
        limits: *const MlaDeviceLimits,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
