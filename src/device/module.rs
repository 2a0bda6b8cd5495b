//! Kernels in PTX of this crate's own, which the driver compiles. A build without other kernels has
//! only these.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::CUlaunchAttributeID_enum as LaunchAttribute;
use cudarc::driver::sys::{self, CUfunction, CUlaunchAttribute, CUlaunchConfig, CUmodule};
use cudarc::driver::{CudaStream, result};
use mla_runtime::Result;

use super::{failed, stream};

/// Converts a file's text, with a zero byte appended, to the text that the driver takes.
pub(super) const fn text(ptx: &str) -> &CStr {
    match CStr::from_bytes_with_nul(ptx.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("a zero byte that is not the last, or none"),
    }
}

/// A module with one kernel, loaded for launches on one stream. No launch loads anything, so each
/// can be captured.
pub(super) struct Module {
    stream: Arc<CudaStream>,
    module: CUmodule,
    kernel: CUfunction,
}

// SAFETY: the driver takes calls on a module and its kernel from any thread. They do not change
// until the module is unloaded, and then no handle is left.
unsafe impl Send for Module {}
// SAFETY: as for `Send`, calls from any thread do not change it.
unsafe impl Sync for Module {}

impl Module {
    /// Compiles and loads the kernel of this name. The stream's context must be current.
    pub(super) fn load(stream: &Arc<CudaStream>, ptx: &CStr, kernel: &CStr) -> Result<Self> {
        // SAFETY: the image is text that ends in a zero byte.
        let module = unsafe { result::module::load_data(ptx.as_ptr().cast()) };
        // `loaded` owns the module from here on, so the module is unloaded even if it lacks the
        // kernel.
        let mut loaded = Self {
            stream: stream.clone(),
            module: module.map_err(failed("load PTX"))?,
            kernel: ptr::null_mut(),
        };
        // SAFETY: the module is loaded. It is unloaded when `loaded` is dropped.
        loaded.kernel = unsafe { result::module::get_function(loaded.module, kernel.to_owned()) }
            .map_err(failed("find a kernel of PTX"))?;
        Ok(loaded)
    }

    /// Enqueues one CTA of the kernel. `is_early` says whether it may begin before the preceding
    /// kernel has ended. The stream's context must be current.
    ///
    /// # Safety
    ///
    /// The kernel takes these parameters and this number of threads. The memory that it accesses
    /// through them stays allocated until the stream has passed this launch.
    pub(super) unsafe fn launch<const N: usize>(
        &self,
        threads: u32,
        mut values: [u64; N],
        is_early: bool,
    ) -> Result<()> {
        // SAFETY: the struct has only numbers, which may be zero.
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
        // SAFETY: the kernel belongs to a module that lives, in the stream's context. The driver
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
            // SAFETY: the module was loaded once, and the stream has passed every launch of it.
            unsafe { result::module::unload(self.module) }
        };
        if let Err(error) = unload() {
            stream::log("unload PTX", &error);
        }
    }
}
