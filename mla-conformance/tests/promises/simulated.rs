//! A device on the host with the properties of a GPU that promises depend on: overlapping kernels,
//! graphs, and guards around buffers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use mla_cpu::{Buffer, Cpu};
use mla_runtime::Error;
use mla_runtime::device::probe::{Dependents, Guards, Replayed};
use mla_runtime::spec::{Cause, Platform, Target};
use mla_runtime::tensor::Memory;

use crate::forward::*;

/// A handle of the simulated device.
#[derive(Clone, Default)]
pub(crate) struct Simulated(Arc<Mutex<Stream>>);

/// State of the device's one stream.
#[derive(Default)]
struct Stream {
    /// True if a kernel has let its dependents begin, but has not written yet.
    writes_late: bool,
    /// True if kernels of a call are still running, although the last one has ended.
    runs_on: bool,
    graph: Graph,
    guarding: bool,
    guarded: Vec<Weak<Guarded>>,
}

/// The role of graphs in the work that a call enqueues.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Graph {
    #[default]
    None,
    Captures,
    Replays,
}

impl Simulated {
    fn stream(&self) -> MutexGuard<'_, Stream> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a kernel, which may wait for preceding ones. Returns false if its inputs are not
    /// there.
    pub(crate) fn begin(&self, waits: bool) -> bool {
        let mut stream = self.stream();
        stream.writes_late &= !waits;
        !stream.writes_late
    }

    /// Ends the last kernel of a call, after all others of the call or before.
    pub(crate) fn end(&self, is_last: bool) {
        self.stream().runs_on = !is_last;
    }

    pub(crate) fn graph(&self) -> Graph {
        self.stream().graph
    }

    fn operation(&self) -> Result<Option<&Cpu>> {
        let accepted = "none: it is not simulated";
        Err(Error::argument("operation", "any", accepted))
    }
}

/// Memory with a guard behind it.
pub(crate) struct Kept {
    buffer: Buffer,
    guarded: Arc<Guarded>,
}

struct Guarded {
    bytes: usize,
    is_damaged: AtomicBool,
}

impl Kept {
    /// Simulates a kernel that writes `bytes` bytes from the beginning on.
    pub(crate) fn write(&self, bytes: usize) {
        let is_beyond = bytes > self.guarded.bytes;
        self.guarded
            .is_damaged
            .fetch_or(is_beyond, Ordering::Relaxed);
    }
}

impl Memory for Simulated {
    type Buffer = Kept;

    mla_runtime::host_bytes!();

    fn allocate(&self, bytes: usize) -> Result<Kept> {
        let guarded = Arc::new(Guarded {
            bytes,
            is_damaged: AtomicBool::new(false),
        });
        let mut stream = self.stream();
        if stream.guarding {
            stream.guarded.push(Arc::downgrade(&guarded));
        }
        Ok(Kept {
            buffer: Buffer::zeroed(bytes)?,
            guarded,
        })
    }

    fn bytes(buffer: &Kept) -> &[u8] {
        buffer.buffer.as_bytes()
    }

    fn bytes_mut(buffer: &mut Kept) -> &mut [u8] {
        buffer.buffer.as_bytes_mut()
    }

    fn upload(&self, from: &[u8], to: &mut [u8]) -> Result<()> {
        to.copy_from_slice(from);
        Ok(())
    }

    fn download(&self, from: &[u8], to: &mut [u8]) -> Result<()> {
        to.copy_from_slice(from);
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        self.fence()
    }
}

impl Dependents<Self> for Simulated {
    /// Writes at once. [`Simulated::begin`] tells kernels that do not wait that their inputs are
    /// not there.
    fn copy_late(&self, from: &[u8], to: &mut [u8]) -> Result<()> {
        to.copy_from_slice(from);
        self.stream().writes_late = true;
        Ok(())
    }

    fn copy_dependent(&self, from: &[u8], to: &mut [u8]) -> Result<()> {
        match self.stream().runs_on {
            true => to.fill(0xff),
            false => to.copy_from_slice(from),
        }
        Ok(())
    }

    fn copy_at_once(&self, from: &[u8], to: &mut [u8]) -> Result<()> {
        match self.begin(false) {
            true => to.copy_from_slice(from),
            false => to.fill(0xff),
        }
        Ok(())
    }
}

impl Guards for Simulated {
    fn guard(&self, on: bool) {
        self.stream().guarding = on;
    }

    fn guarded_bytes(&self) -> u64 {
        let stream = self.stream();
        let live = stream.guarded.iter().filter_map(Weak::upgrade);
        live.map(|guarded| guarded.bytes as u64).sum()
    }

    fn damage(&self) -> Result<Option<String>> {
        let stream = self.stream();
        let mut live = stream.guarded.iter().filter_map(Weak::upgrade);
        let damaged = live.find(|guarded| guarded.is_damaged.load(Ordering::Relaxed));
        Ok(damaged.map(|guarded| format!("behind a buffer of {} bytes", guarded.bytes)))
    }
}

impl Device for Simulated {
    const PLATFORM: Platform = Platform::Cpu;

    fn availability() -> Result<(), Cause> {
        Ok(())
    }

    fn target(&self) -> Target {
        Target::CPU
    }

    fn fence(&self) -> Result<()> {
        let mut stream = self.stream();
        (stream.writes_late, stream.runs_on) = (false, false);
        Ok(())
    }

    fn probe_dependents(&self) -> Result<Option<Box<dyn Dependents<Self> + '_>>> {
        Ok(Some(Box::new(self.clone())))
    }

    /// A capture sees its own inputs. Each replay sees the inputs of that time.
    fn probe_replay(&self, work: &mut dyn Replayed) -> Result<bool> {
        work.enqueue()?;
        self.stream().graph = Graph::Captures;
        work.enqueue()?;
        self.stream().graph = Graph::None;
        work.change()?;
        self.stream().graph = Graph::Replays;
        work.enqueue()?;
        work.enqueue()?;
        self.stream().graph = Graph::None;
        Ok(true)
    }

    fn probe_guards(&self) -> Option<&dyn Guards> {
        Some(self)
    }

    forwarded_operations!();
}
