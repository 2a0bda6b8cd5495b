//! Means of a GPU for conformance tests: kernels that overlap with those before and behind them,
//! replays of graphs, and guards around buffers.

use std::ffi::{CStr, c_void};

use cudarc::driver::result;
use cudarc::driver::sys::CUlaunchAttributeID_enum as LaunchAttribute;
use cudarc::driver::sys::{self, CUfunction, CUlaunchAttribute, CUlaunchConfig, CUmodule};
use mla_runtime::device::Memory as _;
use mla_runtime::device::probe::{Dependents, Guards, Replayed};
use mla_runtime::error::{Error, Result};

use super::memory::{Bytes, BytesMut, GUARD, GUARD_BYTE};
use super::{Cuda, failed, stream};

/// The two copies, which end in a zero byte as the driver wants it.
const PTX: &str = concat!(include_str!("probe.ptx"), "\0");

/// Delay of a late copy: far longer than it takes to enqueue a call behind it.
const DELAY_NS: u64 = 500_000;

/// Threads of a copy's one CTA. It leaves the other SMs to kernels that begin early.
const THREADS: u32 = 1024;

/// The copies, loaded into a device's context.
pub(super) struct Copies {
    device: Cuda,
    module: CUmodule,
    late: CUfunction,
    dependent: CUfunction,
}

impl Copies {
    pub(super) fn load(device: &Cuda) -> Result<Self> {
        device.bind()?;
        // SAFETY: the image is text that ends in a zero byte.
        let module = unsafe { result::module::load_data(PTX.as_ptr().cast()) };
        let module = module.map_err(failed("load test kernels"))?;
        // The module is owned from here on, so that it is unloaded also if it lacks a function.
        let mut copies = Self {
            device: device.clone(),
            module,
            late: std::ptr::null_mut(),
            dependent: std::ptr::null_mut(),
        };
        copies.late = copies.function(c"copy_late")?;
        copies.dependent = copies.function(c"copy_dependent")?;
        Ok(copies)
    }

    fn function(&self, name: &CStr) -> Result<CUfunction> {
        // SAFETY: the module was loaded, and is unloaded when this is dropped.
        unsafe { result::module::get_function(self.module, name.to_owned()) }
            .map_err(failed("find a test kernel"))
    }

    /// Enqueues a copy with these parameters, which may or may not begin before the kernel before
    /// it has ended.
    ///
    /// # Safety
    ///
    /// The parameters are those of the function, and its addresses those of as many bytes on the
    /// device, which stay allocated until the stream has passed this.
    unsafe fn launch<const N: usize>(
        &self,
        function: CUfunction,
        mut values: [u64; N],
        is_early: bool,
    ) -> Result<()> {
        self.device.bind()?;
        // SAFETY: a struct of plain numbers, for which zeros are values.
        let mut early: CUlaunchAttribute = unsafe { std::mem::zeroed() };
        early.id = LaunchAttribute::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        early.value.programmaticStreamSerializationAllowed = 1;
        let config = CUlaunchConfig {
            gridDimX: 1,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: THREADS,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: self.device.stream().cu_stream(),
            attrs: &raw mut early,
            numAttrs: is_early.into(),
        };
        let mut parameters = values
            .each_mut()
            .map(|value| std::ptr::from_mut(value).cast::<c_void>());
        // SAFETY: the function is of a module that lives, in the context that is current, and the
        // driver reads the configuration and the parameters before it returns. The caller answers
        // for their values.
        unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                function,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .result()
        .map_err(failed("launch a test kernel"))
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        let unload = || {
            stream::bind(self.device.stream().context())?;
            stream::synchronize(self.device.stream())?;
            // SAFETY: it was loaded once, and the stream has passed every launch of it.
            unsafe { result::module::unload(self.module) }
        };
        if let Err(error) = unload() {
            stream::log("unload test kernels", &error);
        }
    }
}

/// Refuses copies between other lengths, and in memory of other streams.
fn lengths(device: &Cuda, from: Bytes<'_>, to: &BytesMut<'_>) -> Result<u64> {
    device.check_memory([("from", from), ("to", Cuda::freeze(to))])?;
    match from.len() == to.len() {
        true => Ok(from.len() as u64),
        false => Err(Error::argument("to", to.len(), from.len())),
    }
}

impl Dependents<Cuda> for Copies {
    fn copy_late(&self, from: Bytes<'_>, to: BytesMut<'_>) -> Result<()> {
        let bytes = lengths(&self.device, from, &to)?;
        let values = [from.address(), to.address(), bytes, DELAY_NS];
        // SAFETY: the parameters are those of the function in the PTX; both views are of memory of
        // this device with as many bytes, whose buffers wait for the stream before they are freed.
        unsafe { self.launch(self.late, values, false) }
    }

    fn copy_dependent(&self, from: Bytes<'_>, to: BytesMut<'_>) -> Result<()> {
        let bytes = lengths(&self.device, from, &to)?;
        let values = [from.address(), to.address(), bytes];
        // SAFETY: as above.
        unsafe { self.launch(self.dependent, values, true) }
    }
}

/// Does what `work` enqueues, captures it, changes its inputs, and replays it twice.
pub(super) fn replay(device: &Cuda, work: &mut dyn Replayed) -> Result<()> {
    work.enqueue()?;
    device.synchronize()?;
    let graph = device.capture(|_| work.enqueue())?;
    work.change()?;
    for _ in 0..2 {
        // SAFETY: what was captured is memory that `work` holds, which is borrowed until the stream
        // has passed the replays.
        unsafe { graph.replay() }?;
    }
    device.synchronize()
}

impl Guards for Cuda {
    fn guard(&self, on: bool) {
        self.account().guard(on);
    }

    fn guarded_bytes(&self) -> u64 {
        let guarded = self.account().guarded();
        guarded.iter().map(|(_, len)| *len as u64).sum()
    }

    fn damage(&self) -> Result<Option<String>> {
        self.synchronize()?;
        for (address, len) in self.account().guarded().iter().copied() {
            let behind = address + len as u64;
            for (place, first) in [("in front of", address - GUARD as u64), ("behind", behind)] {
                let mut guard = [0; GUARD];
                // SAFETY: the guards of a live buffer are a part of its allocation, and its list is
                // held until they are read: a buffer leaves it before it is freed.
                let bytes = unsafe { Bytes::from_raw(first, GUARD) };
                self.download(bytes, &mut guard)?;
                if let Some(at) = guard.iter().position(|byte| *byte != GUARD_BYTE) {
                    let damage = format!("byte {at} {place} a buffer of {len} bytes");
                    return Ok(Some(damage));
                }
            }
        }
        Ok(None)
    }
}
