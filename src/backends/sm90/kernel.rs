//! Launch functions of this family, under the names that the backends of all families call.

use std::ffi::c_void;

use crate::backends::kernel::Kernel;
use crate::device::Buffer;
use crate::raw::{self, MlaDecodeParams, MlaPrefillParams, MlaSparseParams, MlaStatus};

/// The kernels.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Hopper;

impl Kernel<MlaDecodeParams> for Hopper {
    unsafe fn workspace(self, params: &MlaDecodeParams, bytes: &mut usize) -> MlaStatus {
        // SAFETY: a context is current, as `Kernel::workspace` demands. Both addresses are
        // those of references, which outlive the call.
        unsafe { raw::mla_decode_sm90_workspace(params, bytes) }
    }

    unsafe fn launch(
        self,
        params: &MlaDecodeParams,
        _: &mut Buffer,
        stream: *mut c_void,
    ) -> MlaStatus {
        // SAFETY: `Kernel::launch` demands for every address in `params` what the header
        // demands. `params` itself is read before the call returns.
        unsafe { raw::mla_decode_sm90(params, stream) }
    }
}

impl Kernel<MlaPrefillParams> for Hopper {
    unsafe fn load(self, params: &MlaPrefillParams) -> MlaStatus {
        // SAFETY: a context is current, as `Kernel::load` demands; the address is that of a
        // reference, which outlives the call.
        unsafe { raw::mla_load_prefill_sm90(params) }
    }

    unsafe fn workspace(self, params: &MlaPrefillParams, bytes: &mut usize) -> MlaStatus {
        // SAFETY: a context is current, as `Kernel::workspace` demands. Both addresses are
        // those of references, which outlive the call.
        unsafe { raw::mla_prefill_sm90_workspace(params, bytes) }
    }

    unsafe fn launch(
        self,
        params: &MlaPrefillParams,
        _: &mut Buffer,
        stream: *mut c_void,
    ) -> MlaStatus {
        // SAFETY: `Kernel::launch` demands for every address in `params` what the header
        // demands. `params` itself is read before the call returns.
        unsafe { raw::mla_prefill_sm90(params, stream) }
    }
}

impl Kernel<MlaSparseParams> for Hopper {
    unsafe fn workspace(self, _: &MlaSparseParams, _: &mut usize) -> MlaStatus {
        MlaStatus::default()
    }

    unsafe fn launch(
        self,
        params: &MlaSparseParams,
        _: &mut Buffer,
        stream: *mut c_void,
    ) -> MlaStatus {
        // SAFETY: `Kernel::launch` demands for every address in `params` what the header demands.
        // `params` itself is read before the call returns.
        unsafe { raw::mla_sparse_sm90(params, stream) }
    }
}
