//! Launch functions of this family, under the names that the backends of all families call.

use std::ffi::c_void;

use crate::backends::absorbed::DenseKernel;
use crate::backends::expanded::ExpandedKernel;
use crate::raw::{self, MlaDecodeParams, MlaDeviceLimits, MlaPrefillParams, MlaStatus};

/// The kernels, which use no more of a device than these limits.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Portable(pub(super) MlaDeviceLimits);

impl DenseKernel for Portable {
    unsafe fn workspace(self, params: &MlaDecodeParams, bytes: &mut usize) -> MlaStatus {
        // SAFETY: the caller keeps the trait's contract. `params` and `self.0` outlive the call.
        unsafe { raw::mla_decode_sm80_workspace(params, &self.0, bytes) }
    }

    unsafe fn launch(self, params: &MlaDecodeParams, stream: *mut c_void) -> MlaStatus {
        // SAFETY: the caller keeps the contract of the trait's function.
        unsafe { raw::mla_decode_sm80(params, &self.0, stream) }
    }
}

impl ExpandedKernel for Portable {
    unsafe fn load(self, params: &MlaPrefillParams) -> MlaStatus {
        // SAFETY: the caller keeps the contract of the trait's function.
        unsafe { raw::mla_load_prefill_sm80(params) }
    }

    unsafe fn workspace(self, params: &MlaPrefillParams, bytes: &mut usize) -> MlaStatus {
        // SAFETY: the caller keeps the trait's contract. `params` and `self.0` outlive the call.
        unsafe { raw::mla_prefill_sm80_workspace(params, &self.0, bytes) }
    }

    unsafe fn launch(self, params: &MlaPrefillParams, stream: *mut c_void) -> MlaStatus {
        // SAFETY: the caller keeps the contract of the trait's function.
        unsafe { raw::mla_prefill_sm80(params, &self.0, stream) }
    }
}
