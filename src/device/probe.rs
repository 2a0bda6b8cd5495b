//! The GPU's tools for conformance tests: kernels that overlap with the preceding and following
//! ones, replays of graphs, and guards around buffers.

use std::ffi::CStr;

use mla_runtime::device::probe::{Dependents, Guards, Replayed};
use mla_runtime::tensor::Memory as _;
use mla_runtime::{Error, Result};

use super::Cuda;
use super::memory::{Bytes, BytesMut, GUARD, GUARD_BYTE};
use super::module::{Module, text};

const PTX: &CStr = text(concat!(include_str!("probe.ptx"), "\0"));

/// Delay of a late copy: far longer than it takes to enqueue a call behind it.
const DELAY_NS: u64 = 500_000;

/// Threads of a copy's one CTA. A single CTA leaves the other SMs to kernels that begin early.
const THREADS: u32 = 1024;

/// The copy kernel, loaded into a device's context.
pub(super) struct Copies {
    device: Cuda,
    kernel: Module,
}

impl Copies {
    pub(super) fn load(device: &Cuda) -> Result<Self> {
        device.bind()?;
        Ok(Self {
            device: device.clone(),
            kernel: Module::load(device.stream(), PTX, c"copy")?,
        })
    }

    /// Enqueues a copy. `is_early` says whether it may begin before the preceding kernel has ended.
    /// Refuses ranges of different lengths, and memory of other streams.
    fn copy(
        &self,
        from: Bytes<'_>,
        to: &BytesMut<'_>,
        [releases, waits, delay]: [u64; 3],
        is_early: bool,
    ) -> Result<()> {
        let device = &self.device;
        device.check_memory([("from", from), ("to", Cuda::freeze(to))])?;
        if from.len() != to.len() {
            return Err(Error::argument("to", to.len(), from.len()));
        }
        device.bind()?;
        let bytes = from.len() as u64;
        let values = [from.address(), to.address(), bytes, releases, waits, delay];
        // SAFETY: the parameters and the number of threads are those of the kernel in the PTX. Both
        // views are memory of this device with that number of bytes. Their buffers wait for the
        // stream before they are freed.
        unsafe { self.kernel.launch(THREADS, values, is_early) }
    }
}

impl Dependents<Cuda> for Copies {
    fn copy_late(&self, from: Bytes<'_>, to: BytesMut<'_>) -> Result<()> {
        self.copy(from, &to, [1, 0, DELAY_NS], false)
    }

    fn copy_dependent(&self, from: Bytes<'_>, to: BytesMut<'_>) -> Result<()> {
        self.copy(from, &to, [0, 1, 0], true)
    }

    fn copy_at_once(&self, from: Bytes<'_>, to: BytesMut<'_>) -> Result<()> {
        self.copy(from, &to, [1, 0, 0], true)
    }
}

/// Runs `work` once, captures it, changes its inputs, and replays the graph twice.
pub(super) fn replay(device: &Cuda, work: &mut dyn Replayed) -> Result<()> {
    work.enqueue()?;
    device.synchronize()?;
    let graph = device.capture(|_| work.enqueue())?;
    work.change()?;
    for _ in 0..2 {
        // SAFETY: the graph uses only memory that `work` holds. `work` is borrowed until the stream
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
                // SAFETY: the guards of a live buffer are a part of its allocation. The list of
                // live buffers is locked until the guards are read, and a buffer leaves the list
                // before it is freed.
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
