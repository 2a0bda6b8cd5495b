//! A device on the host with the properties of a GPU that backends' promises depend on: kernels
//! that overlap, graphs, and guards around buffers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use mla_cpu::{Buffer, Cpu};
use mla_runtime::backend::{DecodeBatch, DecodeCall, Keys, Output, PrefillCall, Query};
use mla_runtime::device::probe::{Dependents, Guards, Replayed};
use mla_runtime::device::{Device, Fp8Blocks, GatherRows};
use mla_runtime::spec::{Availability, Platform, Target};
use mla_runtime::tensor::{
    ArrayRef, BlockTable, CacheMut, CacheRef, LseConvention, LseMut, LseRef, Memory, Rotary,
    RotaryQuery, Scalar, TensorMut, TensorRef,
};
use mla_runtime::{Error, Result};

/// A handle of the device.
#[derive(Clone, Default)]
pub(crate) struct Simulated(Arc<Mutex<Stream>>);

/// State of the device's one stream.
#[derive(Default)]
struct Stream {
    /// A kernel has let its dependents begin, and has not written yet.
    writes_late: bool,
    /// Kernels of a call have not ended, though the last that was enqueued has.
    runs_on: bool,
    graph: Graph,
    guarding: bool,
    guarded: Vec<Weak<Guarded>>,
}

/// The part that graphs play in what a call enqueues.
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

    /// A kernel begins, and waits for those before it or does not. `false`: its inputs are not
    /// there.
    pub(crate) fn begin(&self, waits: bool) -> bool {
        let mut stream = self.stream();
        stream.writes_late &= !waits;
        !stream.writes_late
    }

    /// The last kernel of a call ends, behind all others of the call or before.
    pub(crate) fn end(&self, is_last: bool) {
        self.stream().runs_on = !is_last;
    }

    pub(crate) fn graph(&self) -> Graph {
        self.stream().graph
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
    /// Plays a kernel that writes `bytes` bytes from the beginning on.
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
    /// Writes at once; [`Simulated::begin`] tells kernels that do not wait that their inputs are
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

fn left_out() -> Result<()> {
    Err(Error::argument(
        "operation",
        "any",
        "none: it is not simulated",
    ))
}

impl Device for Simulated {
    const PLATFORM: Platform = Platform::Cpu;

    fn availability() -> Availability {
        Availability::Available
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

    /// A capture sees its own inputs, and each replay those that are there then.
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

    fn gemm(
        &self,
        _: TensorRef<'_, Self>,
        _: TensorRef<'_, Self>,
        _: TensorMut<'_, Self>,
    ) -> Result<()> {
        left_out()
    }

    fn copy(&self, _: TensorRef<'_, Self>, _: TensorMut<'_, Self>) -> Result<()> {
        left_out()
    }

    fn scatter_rows(
        &self,
        _: TensorRef<'_, Self>,
        _: ArrayRef<'_, Self, i64>,
        _: TensorMut<'_, Self>,
    ) -> Result<()> {
        left_out()
    }

    fn dequantize_blocks(&self, _: Fp8Blocks<'_, Self>, _: TensorMut<'_, Self>) -> Result<()> {
        left_out()
    }

    fn clear(&self, _: TensorMut<'_, Self>) -> Result<()> {
        left_out()
    }

    fn write_cache(
        &self,
        _: TensorRef<'_, Self>,
        _: TensorRef<'_, Self>,
        _: ArrayRef<'_, Self, i64>,
        _: CacheMut<'_, Self>,
    ) -> Result<()> {
        left_out()
    }

    fn write_cache_rotated(
        &self,
        _: TensorRef<'_, Self>,
        _: TensorRef<'_, Self>,
        _: &Rotary<'_, Self>,
        _: Option<RotaryQuery<'_, Self>>,
        _: ArrayRef<'_, Self, i64>,
        _: CacheMut<'_, Self>,
    ) -> Result<()> {
        left_out()
    }

    fn rotate(&self, _: &Rotary<'_, Self>, _: RotaryQuery<'_, Self>) -> Result<()> {
        left_out()
    }

    fn gather_cache(
        &self,
        _: CacheRef<'_, Self>,
        _: GatherRows<'_, Self>,
        _: TensorMut<'_, Self>,
        _: TensorMut<'_, Self>,
    ) -> Result<()> {
        left_out()
    }

    fn merge(
        &self,
        _: TensorMut<'_, Self>,
        _: LseMut<'_, Self>,
        _: TensorRef<'_, Self>,
        _: LseRef<'_, Self>,
    ) -> Result<()> {
        left_out()
    }

    fn convert_lse<C: LseConvention>(
        &self,
        _: LseRef<'_, Self, C>,
        _: LseMut<'_, Self>,
    ) -> Result<()> {
        left_out()
    }
}

/// A view of the same memory as the processor's device sees it.
pub(crate) trait OnCpu {
    type View;

    fn on_cpu(self) -> Result<Self::View>;
}

impl<'a> OnCpu for TensorRef<'a, Simulated> {
    type View = TensorRef<'a, Cpu>;

    fn on_cpu(self) -> Result<Self::View> {
        TensorRef::new(self.bytes(), *self.layout())
    }
}

impl<'a> OnCpu for Output<'a, Simulated> {
    type View = Output<'a, Cpu>;

    fn on_cpu(self) -> Result<Self::View> {
        Ok(match self {
            Output::Plain(out) => {
                let layout = *out.layout();
                Output::Plain(TensorMut::new(out.into_bytes(), layout)?)
            }
            Output::Fp8 { bytes, scale } => Output::Fp8 { bytes, scale },
        })
    }
}

impl<'a> OnCpu for LseMut<'a, Simulated> {
    type View = LseMut<'a, Cpu>;

    fn on_cpu(self) -> Result<Self::View> {
        let layout = self.layout();
        LseMut::new(self.into_bytes(), layout)
    }
}

impl<'a, T: Scalar> OnCpu for ArrayRef<'a, Simulated, T> {
    type View = ArrayRef<'a, Cpu, T>;

    fn on_cpu(self) -> Result<Self::View> {
        ArrayRef::new(self.bytes(), self.len())
    }
}

impl<'a> OnCpu for DecodeBatch<'a, Simulated> {
    type View = DecodeBatch<'a, Cpu>;

    fn on_cpu(self) -> Result<Self::View> {
        let table = self.block_table;
        let entries = table.entries().on_cpu()?;
        Ok(DecodeBatch::new(
            BlockTable::new(entries, table.requests(), table.max_pages())?,
            (self.seq_lens.on_cpu()?, self.max_seq_len),
            (self.query_starts.on_cpu()?, self.max_query_len),
        ))
    }
}

impl<'a> OnCpu for DecodeCall<'a, Simulated> {
    type View = DecodeCall<'a, Cpu>;

    fn on_cpu(self) -> Result<Self::View> {
        let query = match self.query {
            Query::Concatenated(query) => Query::Concatenated(query.on_cpu()?),
            Query::Split { latent, rope } => Query::Split {
                latent: latent.on_cpu()?,
                rope: rope.on_cpu()?,
            },
        };
        let cache = CacheRef::new(self.cache.bytes(), *self.cache.layout())?;
        let (batch, out) = (self.batch.on_cpu()?, self.out.on_cpu()?);
        Ok(DecodeCall::new(query, cache, batch, out)
            .with_lse(self.lse.map(OnCpu::on_cpu).transpose()?))
    }
}

impl<'a> OnCpu for PrefillCall<'a, Simulated> {
    type View = PrefillCall<'a, Cpu>;

    fn on_cpu(self) -> Result<Self::View> {
        let keys = match self.keys {
            Keys::Packed(keys) => Keys::Packed(keys.on_cpu()?),
            Keys::Split { nope, rope } => Keys::Split {
                nope: nope.on_cpu()?,
                rope: rope.on_cpu()?,
            },
        };
        let (query, values, out) = (
            self.query.on_cpu()?,
            self.values.on_cpu()?,
            self.out.on_cpu()?,
        );
        let queries = (self.query_starts.on_cpu()?, self.max_query_len);
        let of_keys = (self.key_starts.on_cpu()?, self.max_key_len);
        Ok(PrefillCall::new(query, keys, values, out, queries, of_keys)
            .with_lse(self.lse.map(OnCpu::on_cpu).transpose()?)
            .with_chunk(self.chunk)
            .with_causal(self.causal))
    }
}
