//! The CPU device and its backends with failures. Allocations, uploads and operations are counted,
//! and one of them fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mla_cpu::{Buffer, Cpu, CpuDecode, CpuPrefill};
use mla_runtime::Error;
use mla_runtime::backend::{DecodeBackend, LayerConfig, PrefillBackend, PrefillBatch, StepLimits};
use mla_runtime::spec::{BackendSpec, Cause, Platform, Target};
use mla_runtime::tensor::Memory;

use crate::forward::*;

/// The counted kinds of calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Allocation,
    Upload,
    /// An operation of the device, or a backend's call or preparation.
    Operation,
}

/// The processor as a device that can fail. All handles of one device share its failures.
#[derive(Clone, Default)]
pub(crate) struct Faulty {
    cpu: Cpu,
    counters: Arc<[Counter; 3]>,
}

#[derive(Default)]
struct Counter {
    /// The number of calls up to the one that fails; 0 if none does.
    left: AtomicUsize,
}

impl Faulty {
    /// Lets call number `n` of a kind fail, counted from 1.
    pub(crate) fn fail(&self, kind: Kind, n: usize) {
        self.counters[kind as usize]
            .left
            .store(n, Ordering::Relaxed);
    }

    /// Turns the failure off. Returns true if it had not happened.
    pub(crate) fn mend(&self, kind: Kind) -> bool {
        self.counters[kind as usize].left.swap(0, Ordering::Relaxed) > 0
    }

    fn count(&self, kind: Kind) -> Result<()> {
        let left = &self.counters[kind as usize].left;
        let one_less = |left: usize| left.checked_sub(1);
        match left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less) {
            Ok(1) => Err(Error::Device {
                device: "faulty",
                operation: "the one that fails",
                message: format!("{kind:?}"),
            }),
            _ => Ok(()),
        }
    }

    fn operation(&self) -> Result<Option<&Cpu>> {
        self.computing().map(Some)
    }

    fn computing(&self) -> Result<&Cpu> {
        self.count(Kind::Operation)?;
        Ok(&self.cpu)
    }
}

impl Memory for Faulty {
    type Buffer = Buffer;

    mla_runtime::host_bytes!();

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        self.count(Kind::Allocation)?;
        self.cpu.allocate(bytes)
    }

    fn bytes(buffer: &Buffer) -> &[u8] {
        buffer.as_bytes()
    }

    fn bytes_mut(buffer: &mut Buffer) -> &mut [u8] {
        buffer.as_bytes_mut()
    }

    fn upload(&self, from: &[u8], to: &mut [u8]) -> Result<()> {
        self.count(Kind::Upload)?;
        self.cpu.upload(from, to)
    }

    fn download(&self, from: &[u8], to: &mut [u8]) -> Result<()> {
        self.cpu.download(from, to)
    }

    fn synchronize(&self) -> Result<()> {
        self.cpu.synchronize()
    }
}

impl Device for Faulty {
    const PLATFORM: Platform = Platform::Cpu;

    fn availability() -> Result<(), Cause> {
        Cpu::availability()
    }

    fn target(&self) -> Target {
        self.cpu.target()
    }

    forwarded_operations!();
}

/// A backend of the CPU on the failing device.
pub(crate) struct Failing<B>(B);

macro_rules! failing {
    (
        $backend:ident for $cpu:ident: $run:ident($call:ident),
        $batch:ident: $of_batch:ty => $on_cpu:expr
    ) => {
        impl $backend for Failing<$cpu> {
            type Device = Faulty;
            type State = <$cpu as $backend>::State;
            type Metadata = ();

            const SPEC: BackendSpec = $cpu::SPEC;

            fn new(device: &Faulty, config: &LayerConfig) -> Result<Self> {
                $cpu::new(&device.cpu, config).map(Self)
            }

            fn state(&self, device: &Faulty, limits: &StepLimits) -> Result<Self::State> {
                device.count(Kind::Allocation)?;
                $backend::state(&self.0, &device.cpu, limits)
            }

            fn metadata(&self, device: &Faulty, _: &StepLimits) -> Result<()> {
                device.count(Kind::Allocation)
            }

            fn prepare(
                &self,
                device: &Faulty,
                $batch: &$of_batch,
                state: &mut Self::State,
                (): &mut (),
            ) -> Result<()> {
                $backend::prepare(&self.0, device.computing()?, $on_cpu, state, &mut ())
            }

            unsafe fn $run(
                &self,
                device: &Faulty,
                mut call: $call<'_, Faulty>,
                state: &mut Self::State,
                (): &(),
            ) -> Result<()> {
                let (call, cpu) = (call.on_cpu()?, device.computing()?);
                // SAFETY: the same call; the caller keeps its contract.
                unsafe { $backend::$run(&self.0, cpu, call, state, &()) }
            }
        }
    };
}

failing! {
    PrefillBackend for CpuPrefill: prefill(PrefillCall), batch: PrefillBatch<'_> => batch
}

failing! {
    DecodeBackend for CpuDecode: decode(DecodeCall),
    batch: DecodeBatch<'_, Faulty> => &batch.on_cpu()?
}
