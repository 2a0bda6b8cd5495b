//! Failures on demand. Tests use them to look at an engine's state after a failure.

use std::sync::atomic::{AtomicU64, Ordering};

use mla_runtime::{Error, Result};

use super::Cuda;

/// A kind of operation that can be told to fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// An allocation of device memory.
    Allocation,
    /// A launch by this library or by a backend. Each begins with [`Cuda::bind`].
    Launch,
    /// A copy from the host.
    Upload,
}

impl Operation {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Allocation, Self::Launch, Self::Upload];
}

/// Counters for each kind of operation.
#[derive(Default)]
pub(super) struct Faults([Counter; 3]);

#[derive(Default)]
struct Counter {
    reached: AtomicU64,
    /// The number of the operation that fails, from 1, or 0 if none does.
    failing: AtomicU64,
}

impl Faults {
    /// Counts an operation, and refuses it if its turn to fail has come.
    pub(super) fn reach(&self, operation: Operation) -> Result<()> {
        let counter = self.counter(operation);
        let number = counter.reached.fetch_add(1, Ordering::Relaxed) + 1;
        if number != counter.failing.load(Ordering::Relaxed) {
            return Ok(());
        }
        counter.failing.store(0, Ordering::Relaxed);
        Err(Error::Device {
            device: "cuda",
            operation: match operation {
                Operation::Allocation => "allocate",
                Operation::Launch => "launch",
                Operation::Upload => "upload",
            },
            message: "a failure that was asked for".to_owned(),
        })
    }

    fn counter(&self, operation: Operation) -> &Counter {
        &self.0[operation as usize]
    }
}

impl Cuda {
    /// Returns the number of operations of a kind so far, on this device and its clones.
    pub fn operations(&self, operation: Operation) -> u64 {
        let counter = self.account().faults().counter(operation);
        counter.reached.load(Ordering::Relaxed)
    }

    /// Makes one later operation of a kind fail before it reaches the driver. `number` counts from
    /// now, beginning with 1. If it is 0, none fails.
    pub fn fail(&self, operation: Operation, number: u64) {
        let counter = self.account().faults().counter(operation);
        let from = counter.reached.load(Ordering::Relaxed);
        let failing = if number == 0 { 0 } else { from + number };
        counter.failing.store(failing, Ordering::Relaxed);
    }
}
