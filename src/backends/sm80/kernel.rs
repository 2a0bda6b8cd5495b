//! Launch functions of this family, under the names that the backends of all families call.

use std::ffi::c_void;

use crate::backends::kernel::Kernel;
use crate::device::Buffer;
use crate::raw::{
    self, MlaDecodeParams, MlaDeviceLimits, MlaPrefillParams, MlaSparseParams, MlaStatus,
};

/// The kernels, which use no more of a device than these limits.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Portable(pub(super) MlaDeviceLimits);

impl Kernel<MlaDecodeParams> for Portable {
    unsafe fn workspace(self, params: &MlaDecodeParams, bytes: &mut usize) -> MlaStatus {
        // SAFETY: the caller keeps the trait's contract. `params` and `self.0` outlive the call.
        unsafe { raw::mla_decode_sm80_workspace(params, &self.0, bytes) }
    }

    unsafe fn launch(
        self,
        params: &MlaDecodeParams,
        _: &mut Buffer,
        stream: *mut c_void,
    ) -> MlaStatus {
        // SAFETY: the caller keeps the contract of the trait's function.
        unsafe { raw::mla_decode_sm80(params, &self.0, stream) }
    }
}

impl Kernel<MlaPrefillParams> for Portable {
    unsafe fn load(self, params: &MlaPrefillParams) -> MlaStatus {
        // SAFETY: the caller keeps the contract of the trait's function.
        unsafe { raw::mla_load_prefill_sm80(params) }
    }

    unsafe fn workspace(self, params: &MlaPrefillParams, bytes: &mut usize) -> MlaStatus {
        // SAFETY: the caller keeps the trait's contract. `params` and `self.0` outlive the call.
        unsafe { raw::mla_prefill_sm80_workspace(params, &self.0, bytes) }
    }

    unsafe fn launch(
        self,
        params: &MlaPrefillParams,
        _: &mut Buffer,
        stream: *mut c_void,
    ) -> MlaStatus {
        // SAFETY: the caller keeps the contract of the trait's function.
        unsafe { raw::mla_prefill_sm80(params, &self.0, stream) }
    }
}

impl Kernel<MlaSparseParams> for Portable {
    unsafe fn workspace(self, params: &MlaSparseParams, bytes: &mut usize) -> MlaStatus {
        // SAFETY: the caller keeps the trait's contract. `params` and `self.0` outlive the call.
        unsafe { raw::mla_sparse_sm80_workspace(params, &self.0, bytes) }
    }

    unsafe fn launch(
        self,
        params: &MlaSparseParams,
        workspace: &mut Buffer,
        stream: *mut c_void,
    ) -> MlaStatus {
        let (address, bytes) = (workspace.address() as *mut _, workspace.len());
        // SAFETY: the caller keeps the contract of the trait's function. The workspace has this
        // number of bytes.
        unsafe { raw::mla_sparse_sm80(params, &self.0, address, bytes, stream) }
    }
}
