//! Kernels that are PTX of this crate's own, which the driver compiles: a build with the device
//! alone has no other.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::CUlaunchAttributeID_enum as LaunchAttribute;
use cudarc::driver::sys::{self, CUfunction, CUlaunchAttribute, CUlaunchConfig, CUmodule};
use cudarc::driver::{CudaStream, result};
use mla_runtime::Result;

use super::{failed, stream};

/// Makes the text that the driver takes of a file that a zero byte was added to.
pub(super) const fn text(ptx: &str) -> &CStr {
    match CStr::from_bytes_with_nul(ptx.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("a zero byte that is not the last, or none"),
    }
}

/// A module with one kernel, loaded for launches on one stream: none of these loads anything, so
/// that each can be captured.
pub(super) struct Module {
    stream: Arc<CudaStream>,
    module: CUmodule,
    kernel: CUfunction,
}

// SAFETY: the driver takes calls on a module and its kernel from any thread, and nothing of them
// changes until the module is unloaded, when no handle is left.
unsafe impl Send for Module {}
// SAFETY: as for `Send`, calls from any thread change nothing of it.
unsafe impl Sync for Module {}

impl Module {
    /// Compiles and loads the kernel of this name. The stream's context is current.
    pub(super) fn load(stream: &Arc<CudaStream>, ptx: &CStr, kernel: &CStr) -> Result<Self> {
        // SAFETY: the image is text that ends in a zero byte.
        let module = unsafe { result::module::load_data(ptx.as_ptr().cast()) };
        // The module is owned from here on, so that it is unloaded also if it lacks the kernel.
        let mut loaded = Self {
            stream: stream.clone(),
            module: module.map_err(failed("load PTX"))?,
            kernel: ptr::null_mut(),
        };
        // SAFETY: the module is loaded, and unloaded when this is dropped.
        loaded.kernel = unsafe { result::module::get_function(loaded.module, kernel.to_owned()) }
            .map_err(failed("find a kernel of PTX"))?;
        Ok(loaded)
    }

    /// Enqueues one CTA of the kernel, which may or may not begin before the kernel before it has
    /// ended. The stream's context is current.
    ///
    /// # Safety
    ///
    /// The kernel takes these parameters and this many threads, and what it accesses through them
    /// stays allocated until the stream has passed this.
    pub(super) unsafe fn launch<const N: usize>(
        &self,
        threads: u32,
        mut values: [u64; N],
        is_early: bool,
    ) -> Result<()> {
        // SAFETY: a struct of plain numbers, for which zeros are values.
        let mut early: CUlaunchAttribute = unsafe { std::mem::zeroed() };
        early.id = LaunchAttribute::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        early.value.programmaticStreamSerializationAllowed = 1;
        let config = CUlaunchConfig {
            gridDimX: 1,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: self.stream.cu_stream(),
            attrs: &raw mut early,
            numAttrs: is_early.into(),
        };
        let mut parameters = values
            .each_mut()
            .map(|value| ptr::from_mut(value).cast::<c_void>());
        // SAFETY: the kernel is of a module that lives, in the stream's context, and the driver
        // reads the configuration and the parameters before it returns. The caller answers for the
        // rest.
        unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.kernel,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        }
        .result()
        .map_err(failed("launch a kernel of PTX"))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let unload = || {
            stream::synchronize(&self.stream)?;
            // SAFETY: it was loaded once, and the stream has passed every launch of it.
            unsafe { result::module::unload(self.module) }
        };
        if let Err(error) = unload() {
            stream::log("unload PTX", &error);
        }
    }
}
