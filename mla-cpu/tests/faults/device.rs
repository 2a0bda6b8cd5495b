//! The CPU device and its backends with failures: of all allocations, uploads or operations that
//! are counted, one fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mla_cpu::{Buffer, Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, Keys, LayerConfig, Output, PrefillBackend,
    PrefillBatch, PrefillCall, Query, StepLimits,
};
use mla_runtime::device::{Device, Fp8Blocks, GatherRows};
use mla_runtime::spec::{Availability, BackendSpec, Platform, Target};
use mla_runtime::tensor::{
    ArrayRef, BlockTable, CacheMut, CacheRef, LseConvention, LseMut, LseRef, Memory, Rotary,
    RotaryQuery, Scalar, TensorMut, TensorRef,
};
use mla_runtime::{Error, Result};

/// The counted kinds of calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Allocation,
    Upload,
    /// An operation of the device, or a call or preparation of a backend.
    Operation,
}

/// The processor. The handles of one device share its failures.
#[derive(Clone, Default)]
pub(crate) struct Faulty {
    cpu: Cpu,
    counters: Arc<[Counter; 3]>,
}

#[derive(Default)]
struct Counter {
    /// The number of calls until one fails; 0: none does.
    left: AtomicUsize,
}

impl Faulty {
    /// Lets number `n` of a kind fail, counted from 1.
    pub(crate) fn fail(&self, kind: Kind, n: usize) {
        self.counters[kind as usize]
            .left
            .store(n, Ordering::Relaxed);
    }

    /// Lets nothing fail. True if the failure has not come.
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

    fn operation(&self) -> Result<&Cpu> {
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

// The same views of the same bytes, for the device that computes.

fn tensor<'a>(tensor: &TensorRef<'a, Faulty>) -> Result<TensorRef<'a, Cpu>> {
    TensorRef::new(tensor.bytes(), *tensor.layout())
}

fn output<'a>(tensor: TensorMut<'a, Faulty>) -> Result<TensorMut<'a, Cpu>> {
    let layout = *tensor.layout();
    TensorMut::new(tensor.into_bytes(), layout)
}

fn array<'a, T: Scalar>(array: &ArrayRef<'a, Faulty, T>) -> Result<ArrayRef<'a, Cpu, T>> {
    ArrayRef::new(array.bytes(), array.len())
}

fn table<'a>(table: &BlockTable<'a, Faulty>) -> Result<BlockTable<'a, Cpu>> {
    let entries = array(&table.entries())?;
    BlockTable::new(entries, table.requests(), table.max_pages())
}

fn cache<'a>(cache: &CacheRef<'a, Faulty>) -> Result<CacheRef<'a, Cpu>> {
    let layout = *cache.layout();
    match layout.is_split() {
        true => CacheRef::split(cache.bytes(), cache.rope_bytes(), layout),
        false => CacheRef::new(cache.bytes(), layout),
    }
}

fn cache_mut<'a>(cache: CacheMut<'a, Faulty>) -> Result<CacheMut<'a, Cpu>> {
    let layout = *cache.layout();
    match cache.into_parts() {
        (latents, Some(rope)) => CacheMut::split(latents, rope, layout),
        (rows, None) => CacheMut::new(rows, layout),
    }
}

fn lse<'a, C: LseConvention>(lse: &LseRef<'a, Faulty, C>) -> Result<LseRef<'a, Cpu, C>> {
    LseRef::new(lse.bytes(), lse.layout())
}

fn lse_mut<'a>(lse: LseMut<'a, Faulty>) -> Result<LseMut<'a, Cpu>> {
    let layout = lse.layout();
    LseMut::new(lse.into_bytes(), layout)
}

fn rotary<'a>(rotary: &Rotary<'a, Faulty>) -> Result<Rotary<'a, Cpu>> {
    let tables = [tensor(&rotary.cos)?, tensor(&rotary.sin)?];
    Ok(Rotary::new(array(&rotary.positions)?, tables, rotary.style))
}

fn rotated<'a>(query: RotaryQuery<'a, Faulty>) -> Result<RotaryQuery<'a, Cpu>> {
    Ok(match query {
        RotaryQuery::InPlace(to) => RotaryQuery::InPlace(output(to)?),
        RotaryQuery::Into { from, to } => RotaryQuery::Into {
            from: tensor(&from)?,
            to: output(to)?,
        },
    })
}

fn out<'a>(out: Output<'a, Faulty>) -> Result<Output<'a, Cpu>> {
    Ok(match out {
        Output::Plain(to) => Output::Plain(output(to)?),
        Output::Fp8 { bytes, scale } => Output::Fp8 { bytes, scale },
    })
}

fn batch<'a>(batch: &DecodeBatch<'a, Faulty>) -> Result<DecodeBatch<'a, Cpu>> {
    let same = DecodeBatch::new(
        table(&batch.block_table)?,
        (array(&batch.seq_lens)?, batch.max_seq_len),
        (array(&batch.query_starts)?, batch.max_query_len),
    );
    Ok(match batch.host {
        Some(host) => same.with_host(host),
        None => same,
    })
}

impl Device for Faulty {
    const PLATFORM: Platform = Platform::Cpu;

    fn availability() -> Availability {
        Cpu::availability()
    }

    fn target(&self) -> Target {
        self.cpu.target()
    }

    fn gemm(
        &self,
        a: TensorRef<'_, Self>,
        b: TensorRef<'_, Self>,
        c: TensorMut<'_, Self>,
    ) -> Result<()> {
        self.operation()?.gemm(tensor(&a)?, tensor(&b)?, output(c)?)
    }

    fn copy(&self, from: TensorRef<'_, Self>, to: TensorMut<'_, Self>) -> Result<()> {
        self.operation()?.copy(tensor(&from)?, output(to)?)
    }

    fn scatter_rows(
        &self,
        from: TensorRef<'_, Self>,
        places: ArrayRef<'_, Self, i64>,
        to: TensorMut<'_, Self>,
    ) -> Result<()> {
        self.operation()?
            .scatter_rows(tensor(&from)?, array(&places)?, output(to)?)
    }

    fn dequantize_blocks(&self, from: Fp8Blocks<'_, Self>, to: TensorMut<'_, Self>) -> Result<()> {
        let blocks = Fp8Blocks::from_row(
            from.codes(),
            array(&from.scales())?,
            from.shape(),
            from.first_row(),
        )?;
        self.operation()?.dequantize_blocks(blocks, output(to)?)
    }

    fn clear(&self, to: TensorMut<'_, Self>) -> Result<()> {
        self.operation()?.clear(output(to)?)
    }

    fn write_cache(
        &self,
        latent: TensorRef<'_, Self>,
        rope: TensorRef<'_, Self>,
        slots: ArrayRef<'_, Self, i64>,
        cache: CacheMut<'_, Self>,
    ) -> Result<()> {
        let (latent, rope) = (tensor(&latent)?, tensor(&rope)?);
        let cpu = self.operation()?;
        cpu.write_cache(latent, rope, array(&slots)?, cache_mut(cache)?)
    }

    fn write_cache_rotated(
        &self,
        latent: TensorRef<'_, Self>,
        rope: TensorRef<'_, Self>,
        angles: &Rotary<'_, Self>,
        query: Option<RotaryQuery<'_, Self>>,
        slots: ArrayRef<'_, Self, i64>,
        cache: CacheMut<'_, Self>,
    ) -> Result<()> {
        let (latent, rope, angles) = (tensor(&latent)?, tensor(&rope)?, rotary(angles)?);
        let query = query.map(rotated).transpose()?;
        let (slots, cache) = (array(&slots)?, cache_mut(cache)?);
        let cpu = self.operation()?;
        cpu.write_cache_rotated(latent, rope, &angles, query, slots, cache)
    }

    fn rotate(&self, angles: &Rotary<'_, Self>, vectors: RotaryQuery<'_, Self>) -> Result<()> {
        let cpu = self.operation()?;
        cpu.rotate(&rotary(angles)?, rotated(vectors)?)
    }

    fn gather_cache(
        &self,
        from: CacheRef<'_, Self>,
        rows: GatherRows<'_, Self>,
        latent: TensorMut<'_, Self>,
        rope: TensorMut<'_, Self>,
    ) -> Result<()> {
        let rows = GatherRows::new(
            table(&rows.block_table)?,
            array(&rows.token_starts)?,
            array(&rows.row_starts)?,
            rows.rows,
        );
        let (latent, rope) = (output(latent)?, output(rope)?);
        let cpu = self.operation()?;
        cpu.gather_cache(cache(&from)?, rows, latent, rope)
    }

    fn merge(
        &self,
        out: TensorMut<'_, Self>,
        out_lse: LseMut<'_, Self>,
        other: TensorRef<'_, Self>,
        other_lse: LseRef<'_, Self>,
    ) -> Result<()> {
        let (out, out_lse) = (output(out)?, lse_mut(out_lse)?);
        let cpu = self.operation()?;
        cpu.merge(out, out_lse, tensor(&other)?, lse(&other_lse)?)
    }

    fn convert_lse<C: LseConvention>(
        &self,
        from: LseRef<'_, Self, C>,
        to: LseMut<'_, Self>,
    ) -> Result<()> {
        let cpu = self.operation()?;
        cpu.convert_lse(lse(&from)?, lse_mut(to)?)
    }
}

/// A backend of the CPU on the device that fails.
pub(crate) struct Failing<B>(B);

impl PrefillBackend for Failing<CpuPrefill> {
    type Device = Faulty;
    type State = <CpuPrefill as PrefillBackend>::State;
    type Metadata = ();

    const SPEC: BackendSpec = CpuPrefill::SPEC;

    fn new(device: &Faulty, config: &LayerConfig) -> Result<Self> {
        CpuPrefill::new(&device.cpu, config).map(Self)
    }

    fn state(&self, device: &Faulty, limits: &StepLimits) -> Result<Self::State> {
        device.count(Kind::Allocation)?;
        PrefillBackend::state(&self.0, &device.cpu, limits)
    }

    fn metadata(&self, device: &Faulty, _: &StepLimits) -> Result<()> {
        device.count(Kind::Allocation)
    }

    fn prepare(
        &self,
        device: &Faulty,
        batch: &PrefillBatch<'_>,
        state: &mut Self::State,
        (): &mut (),
    ) -> Result<()> {
        PrefillBackend::prepare(&self.0, device.operation()?, batch, state, &mut ())
    }

    unsafe fn prefill(
        &self,
        device: &Faulty,
        call: PrefillCall<'_, Faulty>,
        state: &mut Self::State,
        (): &(),
    ) -> Result<()> {
        let keys = match &call.keys {
            Keys::Packed(keys) => Keys::Packed(tensor(keys)?),
            Keys::Split { nope, rope } => Keys::Split {
                nope: tensor(nope)?,
                rope: tensor(rope)?,
            },
        };
        let same = PrefillCall::new(
            tensor(&call.query)?,
            keys,
            tensor(&call.values)?,
            out(call.out)?,
            (array(&call.query_starts)?, call.max_query_len),
            (array(&call.key_starts)?, call.max_key_len),
        );
        let same = same
            .with_lse(call.lse.map(lse_mut).transpose()?)
            .with_chunk(call.chunk);
        let cpu = device.operation()?;
        // SAFETY: the same call, of which the caller keeps the contract.
        unsafe { PrefillBackend::prefill(&self.0, cpu, same, state, &()) }
    }
}

impl DecodeBackend for Failing<CpuDecode> {
    type Device = Faulty;
    type State = <CpuDecode as DecodeBackend>::State;
    type Metadata = ();

    const SPEC: BackendSpec = CpuDecode::SPEC;

    fn new(device: &Faulty, config: &LayerConfig) -> Result<Self> {
        CpuDecode::new(&device.cpu, config).map(Self)
    }

    fn state(&self, device: &Faulty, limits: &StepLimits) -> Result<Self::State> {
        device.count(Kind::Allocation)?;
        DecodeBackend::state(&self.0, &device.cpu, limits)
    }

    fn metadata(&self, device: &Faulty, _: &StepLimits) -> Result<()> {
        device.count(Kind::Allocation)
    }

    fn prepare(
        &self,
        device: &Faulty,
        of: &DecodeBatch<'_, Faulty>,
        state: &mut Self::State,
        (): &mut (),
    ) -> Result<()> {
        let cpu = device.operation()?;
        DecodeBackend::prepare(&self.0, cpu, &batch(of)?, state, &mut ())
    }

    unsafe fn decode(
        &self,
        device: &Faulty,
        call: DecodeCall<'_, Faulty>,
        state: &mut Self::State,
        (): &(),
    ) -> Result<()> {
        let query = match &call.query {
            Query::Concatenated(query) => Query::Concatenated(tensor(query)?),
            Query::Split { latent, rope } => Query::Split {
                latent: tensor(latent)?,
                rope: tensor(rope)?,
            },
        };
        assert!(call.slots.is_none() && call.sinks.is_none());
        let same = DecodeCall::new(
            query,
            cache(&call.cache)?,
            batch(&call.batch)?,
            out(call.out)?,
        )
        .with_lse(call.lse.map(lse_mut).transpose()?);
        let cpu = device.operation()?;
        // SAFETY: the same call, of which the caller keeps the contract.
        unsafe { DecodeBackend::decode(&self.0, cpu, same, state, &()) }
    }
}
