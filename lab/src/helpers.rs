//! `cargo lab helpers`: the helper operations of a device, and the layer's GEMMs per head.
//!
//! The data is random and normally distributed. The pages have 64 tokens and are shuffled.

use std::path::PathBuf;

use fastrand::Rng;
use mla_cli::parts::{
    About, Ceilings, CliError, DeviceName, Job, Normal, Progress, Protocol, Stopwatch, check_files,
    positive, samples, upload, warm_up,
};
use mla_runtime::Result;
use mla_runtime::device::GatherRows;
use mla_runtime::model::{DType, KvFormat, MlaDims, RotaryStyle};
use mla_runtime::tensor::{
    ArrayRef, Base2TokensFirst, BlockTable, CacheLayout, CacheMut, CacheRef, Layout, LseLayout,
    LseMut, LseRef, Rotary, TensorMut, TensorRef,
};
use serde::Serialize;

use crate::timing::{Row, Timer, describe, saved};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Device to time.
    #[arg(long, default_value = "cuda")]
    device: DeviceName,
    /// Measure only the rows whose names contain this text.
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Timed runs of each row.
    #[arg(long, value_name = "N", default_value = "41", value_parser = samples)]
    samples: u32,
    /// Untimed runs of each row, before the first sample.
    #[arg(long, value_name = "N", default_value = "3", value_parser = warm_up)]
    warm_up: u32,
    /// Maximum number of tokens of a row.
    #[arg(long, value_name = "TOKENS", default_value = "65536", value_parser = positive)]
    tokens: u32,
    /// File with the machine's ceilings, as `cargo lab ceilings` wrote it [default: the known
    /// ones].
    #[arg(long, value_name = "FILE")]
    ceilings: Option<PathBuf>,
    /// File for all results.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The result of the command.
#[derive(Serialize)]
struct Report {
    device: String,
    protocol: Protocol,
    ceilings: Option<Ceilings>,
    rows: Vec<Row>,
}

/// Returns the table.
pub(crate) fn output(args: &Args) -> std::result::Result<(String, bool), CliError> {
    check_files([&args.json])?;
    let report = args.device.run(Helpers(args))?;
    let table = describe(&report.rows, report.ceilings.as_ref());
    let text = format!("{}\n{}\n", report.device, table.trim_fmt());
    saved(args.json.as_deref(), &report, text, true)
}

struct Helpers<'a>(&'a Args);

impl Job for Helpers<'_> {
    type Output = Report;

    fn run<D: Stopwatch>(self, device: &D, about: &About) -> std::result::Result<Report, CliError> {
        let args = self.0;
        let progress = Progress::spinner();
        let mut bench = Bench {
            timer: Timer::new(device, [args.samples, args.warm_up], &progress)?,
            args,
            normal: Normal::new(7, DType::BF16, 1.0),
            wide: Normal::new(7, DType::F32, 1.0),
        };
        bench.writes()?;
        bench.gathers()?;
        bench.merges()?;
        bench.copies()?;
        bench.products()?;
        #[cfg(feature = "gpu")]
        bench.driver_copies()?;
        let Timer { protocol, rows, .. } = bench.timer;
        progress.finish();
        if rows.is_empty() {
            return Err(CliError::argument(
                "--only",
                args.only.clone(),
                "text that the name of a row contains",
            ));
        }
        Ok(Report {
            ceilings: Ceilings::find(args.ceilings.as_deref(), &about.description)?,
            device: about.description.clone(),
            protocol,
            rows,
        })
    }
}

const PAGE: usize = 64;
const DIMS: MlaDims = MlaDims::R1;
const LATENT: usize = 512;
const NOPE: usize = 128;
const ROPE: usize = 64;
const V: usize = 128;
/// The number of elements of a token's row in the cache.
const ROW: usize = LATENT + ROPE;

const FORMATS: [KvFormat; 4] = [
    KvFormat::BF16,
    KvFormat::Fp8,
    KvFormat::Fp8DsMla,
    KvFormat::Fp8PerToken,
];

struct Bench<'a, D: Stopwatch> {
    timer: Timer<'a, D>,
    args: &'a Args,
    normal: Normal,
    wide: Normal,
}

fn bf16(shape: [usize; 3]) -> Layout {
    Layout::contiguous(DType::BF16, shape)
}

fn tensor<D: Stopwatch>(buffer: &D::Buffer, layout: Layout) -> Result<TensorRef<'_, D>> {
    TensorRef::new(D::bytes(buffer), layout)
}

fn output_of<D: Stopwatch>(buffer: &mut D::Buffer, layout: Layout) -> Result<TensorMut<'_, D>> {
    TensorMut::new(D::bytes_mut(buffer), layout)
}

/// Returns pages in random order, like those of an engine that has run for a while.
fn shuffled_pages(pages: usize) -> Vec<i32> {
    let mut order: Vec<i32> = (0..pages as i32).collect();
    Rng::with_seed(11).shuffle(&mut order);
    order
}

impl<D: Stopwatch> Bench<'_, D> {
    /// True if no row with this name and number of tokens is asked for.
    fn skips(&self, name: &str, tokens: usize) -> bool {
        tokens > self.args.tokens as usize || !name.contains(&self.args.only)
    }

    fn time(
        &mut self,
        name: &str,
        bytes: usize,
        mut work: impl FnMut(&D) -> Result<()>,
    ) -> Result<()> {
        self.timer.time(name, [0.0, bytes as f64], &mut work)?;
        Ok(())
    }

    fn numbers(&self, dtype: DType, elements: usize) -> Result<D::Buffer> {
        let numbers = match dtype {
            DType::F32 => &self.wide,
            _ => &self.normal,
        };
        numbers.buffer(self.timer.device, 0, elements)
    }

    fn writes(&mut self) -> Result<()> {
        for tokens in [128, 8192, 65536] {
            for format in FORMATS {
                for heads in [None, Some(16)] {
                    self.write(tokens, format, heads)?;
                }
            }
        }
        Ok(())
    }

    /// Times the write of `tokens` rows, with and without a rotation of them and of queries.
    fn write(&mut self, tokens: usize, format: KvFormat, heads: Option<usize>) -> Result<()> {
        let mut bytes = tokens * (2 * ROW + 8 + format.row_bytes(DIMS));
        let mut name = format!("cache write {format}, {tokens} tokens");
        if let Some(heads) = heads {
            bytes += tokens * 8 + tokens.min(4096) * 256 + 2 * tokens * heads * 128;
            name += &format!(", rotary, {heads} heads");
        }
        if self.skips(&name, tokens) {
            return Ok(());
        }
        let device = self.timer.device;
        let layout = CacheLayout::contiguous(DIMS, format, tokens.div_ceil(PAGE) + 7, PAGE);
        let pages = shuffled_pages(layout.pages);
        let slots: Vec<i64> = (0..tokens)
            .map(|token| i64::from(pages[token / PAGE]) * PAGE as i64 + (token % PAGE) as i64)
            .collect();
        let positions: Vec<i64> = (0..tokens as i64).map(|token| token % 4096).collect();
        let latent = self.numbers(DType::BF16, tokens * LATENT)?;
        let rope = self.numbers(DType::BF16, tokens * ROPE)?;
        let (slots, positions) = (upload(device, &slots)?, upload(device, &positions)?);
        let mut cache = device.allocate(layout.pages * layout.page_stride)?;
        let table = self.numbers(DType::F32, 4096 * ROPE)?;
        let angles = Layout {
            dtype: DType::F32,
            shape: [1, 4096, ROPE / 2],
            strides: [0, ROPE, 1],
        };
        let query_layout = bf16([tokens, heads.unwrap_or(0), ROPE]);
        let elements = query_layout.elements().max(1);
        let query = self.numbers(DType::BF16, elements)?;
        let mut rotated = self.numbers(DType::BF16, elements)?;
        self.time(&name, bytes, |device| {
            let latent = tensor::<D>(&latent, bf16([tokens, 1, LATENT]))?;
            let rope = tensor::<D>(&rope, bf16([tokens, 1, ROPE]))?;
            let slots = ArrayRef::new(D::bytes(&slots), tokens)?;
            let cache = CacheMut::new(D::bytes_mut(&mut cache), layout)?;
            if heads.is_none() {
                return device.write_cache(latent, rope, slots, cache);
            }
            let sines = D::byte_range(D::bytes(&table), 4 * ROPE / 2..4096 * 4 * ROPE);
            let rotary = Rotary::new(
                ArrayRef::new(D::bytes(&positions), tokens)?,
                [tensor::<D>(&table, angles)?, TensorRef::new(sines, angles)?],
                RotaryStyle::Interleaved,
            );
            let query = tensor::<D>(&query, query_layout)?;
            let query = (query, output_of::<D>(&mut rotated, query_layout)?);
            device.write_cache_rotated(latent, rope, &rotary, Some(query), slots, cache)
        })
    }

    fn gathers(&mut self) -> Result<()> {
        for (rows, segments) in [(8192, 4), (65536, 1), (65536, 32), (65536, 1024)] {
            for format in FORMATS {
                let name = format!("gather {format}, {rows} rows, {segments} segments");
                if self.skips(&name, rows) {
                    continue;
                }
                let device = self.timer.device;
                let each = rows / segments;
                let max_pages = each.div_ceil(PAGE);
                let layout = CacheLayout::contiguous(DIMS, format, segments * max_pages, PAGE);
                let table = upload(device, &shuffled_pages(layout.pages))?;
                let token_starts = upload(device, &vec![0i32; segments])?;
                let row_starts = (0..=segments).map(|segment| (segment * each) as i32);
                let row_starts = upload(device, &row_starts.collect::<Vec<_>>())?;
                let cache = self.numbers(DType::BF16, layout.pages * layout.page_stride / 2)?;
                let mut latent = device.allocate(rows * 2 * LATENT)?;
                let mut rope = device.allocate(rows * 2 * ROPE)?;
                let bytes = rows * (format.row_bytes(DIMS) + 2 * ROW);
                self.time(&name, bytes, |device| {
                    let table = ArrayRef::new(D::bytes(&table), layout.pages)?;
                    device.gather_cache(
                        CacheRef::new(D::bytes(&cache), layout)?,
                        GatherRows::new(
                            BlockTable::new(table, segments, max_pages)?,
                            ArrayRef::new(D::bytes(&token_starts), segments)?,
                            ArrayRef::new(D::bytes(&row_starts), segments + 1)?,
                            rows,
                        ),
                        output_of::<D>(&mut latent, bf16([rows, 1, LATENT]))?,
                        output_of::<D>(&mut rope, bf16([rows, 1, ROPE]))?,
                    )
                })?;
            }
        }
        Ok(())
    }

    fn merges(&mut self) -> Result<()> {
        for (tokens, heads, width, dtype) in [
            (4096, 128, V, DType::BF16),
            (4096, 128, V, DType::F32),
            (4096, 16, V, DType::BF16),
            (512, 128, V, DType::BF16),
            (128, 128, LATENT, DType::BF16),
        ] {
            let name = format!("merge {dtype}, {tokens} tokens x {heads} heads x {width}");
            if self.skips(&name, tokens) {
                continue;
            }
            let layout = Layout::contiguous(dtype, [tokens, heads, width]);
            let mut out = self.numbers(dtype, layout.elements())?;
            let other = self.numbers(dtype, layout.elements())?;
            let mut lse = self.numbers(DType::F32, tokens * heads)?;
            let other_lse = self.numbers(DType::F32, tokens * heads)?;
            let bytes = 3 * layout.elements() * dtype.bytes() + 3 * 4 * tokens * heads;
            let states = LseLayout::heads_first(heads, tokens);
            self.time(&name, bytes, |device| {
                device.merge(
                    output_of::<D>(&mut out, layout)?,
                    LseMut::new(D::bytes_mut(&mut lse), states)?,
                    tensor::<D>(&other, layout)?,
                    LseRef::new(D::bytes(&other_lse), states)?,
                )
            })?;
        }
        Ok(())
    }

    /// Times other copies: a rotary key for all heads, and a log-sum-exp in another convention.
    fn copies(&mut self) -> Result<()> {
        let (tokens, heads) = (8192, 128);
        let name = format!("repeat a rotary key, {tokens} tokens x {heads} heads");
        if !self.skips(&name, tokens) {
            let from = self.numbers(DType::BF16, tokens * ROPE)?;
            let mut to = self.timer.device.allocate(tokens * heads * 2 * ROPE)?;
            self.time(&name, tokens * 2 * ROPE * (heads + 1), |device| {
                let from = tensor::<D>(&from, bf16([tokens, 1, ROPE]))?.broadcast(1, heads)?;
                device.copy(from, output_of::<D>(&mut to, bf16([tokens, heads, ROPE]))?)
            })?;
        }
        let tokens = 16384;
        let name = format!("natural log-sum-exp, {tokens} tokens x {heads} heads");
        if self.skips(&name, tokens) {
            return Ok(());
        }
        let from = self.numbers(DType::F32, tokens * heads)?;
        let mut to = self.timer.device.allocate(tokens * heads * 4)?;
        let states = LseLayout::heads_first(heads, tokens);
        let tokens_first = LseLayout {
            row_stride: heads,
            ..states
        };
        self.time(&name, tokens * heads * 8, |device| {
            let from = LseRef::<D, Base2TokensFirst>::new(D::bytes(&from), tokens_first)?;
            device.convert_lse(from, LseMut::new(D::bytes_mut(&mut to), states)?)
        })
    }

    /// Times q_nope · W_UK and o · W_UV, alone and together. The weights have the layout of
    /// checkpoints, `[H · (P + V), L]`, viewed as `[H, P, L]` and `[H, L, V]`.
    fn products(&mut self) -> Result<()> {
        for heads in [16, 128] {
            for tokens in [1, 8, 32, 64, 128] {
                let name = |of: &str| format!("{of}, {heads} heads, {tokens} tokens");
                let of = [
                    ("W_UK", [true, false]),
                    ("W_UV", [false, true]),
                    ("W_UK and W_UV", [true, true]),
                ];
                if of.iter().all(|(of, _)| self.skips(&name(of), tokens)) {
                    continue;
                }
                let weights = self.numbers(DType::BF16, heads * (NOPE + V) * LATENT)?;
                let query = self.numbers(DType::BF16, tokens * heads * (NOPE + ROPE))?;
                let attended = self.numbers(DType::BF16, tokens * heads * LATENT)?;
                let device = self.timer.device;
                device.synchronize()?;
                let mut absorbed = device.allocate(tokens * heads * LATENT * 2)?;
                let mut out = device.allocate(tokens * heads * V * 2)?;
                for (of, [keys, values]) in of {
                    if self.skips(&name(of), tokens) {
                        continue;
                    }
                    let parts = f64::from(u8::from(keys) + u8::from(values));
                    let product = (heads * LATENT * NOPE) as f64 * parts;
                    let moved = (tokens * heads * (NOPE + LATENT)) as f64 * parts;
                    let cost = [2.0 * tokens as f64 * product, 2.0 * (product + moved)];
                    self.timer.time(name(of), cost, &mut |device| {
                        let rows = tensor::<D>(&weights, bf16([heads, NOPE + V, LATENT]))?;
                        // SAFETY: the upload above is complete, and nothing writes the weights
                        // again.
                        let rows = unsafe { rows.assume_constant() };
                        if keys {
                            let query = tensor::<D>(&query, bf16([tokens, heads, NOPE + ROPE]))?;
                            let query = query.narrow(2, 0..NOPE)?.transpose(0, 1);
                            let to = output_of::<D>(&mut absorbed, bf16([tokens, heads, LATENT]))?;
                            let keys = rows.narrow(1, 0..NOPE)?;
                            device.gemm(query, keys, to.transpose(0, 1))?;
                        }
                        if values {
                            let from = tensor::<D>(&attended, bf16([tokens, heads, LATENT]))?;
                            let to = output_of::<D>(&mut out, bf16([tokens, heads, V]))?;
                            let columns = rows.narrow(1, NOPE..NOPE + V)?.transpose(1, 2);
                            device.gemm(from.transpose(0, 1), columns, to.transpose(0, 1))?;
                        }
                        Ok(())
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Times the driver's copy of the same number of bytes, without slots, pages and arithmetic.
    /// Half of them are read, and half are written.
    #[cfg(feature = "gpu")]
    fn driver_copies(&mut self) -> Result<()> {
        use mla_kernels::Cuda;
        use mla_kernels::device::cudarc::driver::result::memcpy_dtod_async;
        use mla_runtime::tensor::Memory as _;

        let Some(gpu) = (self.timer.device as &dyn std::any::Any).downcast_ref::<Cuda>() else {
            return Ok(());
        };
        let (samples, warm_up) = (self.args.samples, self.args.warm_up);
        let mut timer = Timer::new(gpu, [samples, warm_up], self.timer.progress)?;
        for tokens in [8192 * 4, 65536 * 3, 65536 * 4] {
            let bytes = tokens * ROW;
            let name = format!("the driver's copy, {:.1} MB", bytes as f64 / 1e6);
            if self.skips(&name, tokens / 4) {
                continue;
            }
            let (from, to) = (gpu.allocate(bytes / 2)?, gpu.allocate(bytes / 2)?);
            timer.time(name, [0.0, bytes as f64], &mut |gpu| {
                let (to, from, stream) = (to.address(), from.address(), gpu.stream().cu_stream());
                // SAFETY: both buffers hold half of the bytes, and only this stream uses them.
                unsafe { memcpy_dtod_async(to, from, bytes / 2, stream) }.map_err(|error| {
                    mla_runtime::Error::Device {
                        device: "cuda",
                        operation: "copy",
                        message: error.to_string(),
                    }
                })
            })?;
        }
        self.timer.rows.append(&mut timer.rows);
        Ok(())
    }
}
