//! `cargo lab ceilings`: the maximum throughput of a machine, for `mla bench --ceilings`.

use std::path::PathBuf;

use mla_cli::parts::{
    About, Ceilings, CliError, DeviceName, Job, Normal, Progress, Stopwatch, check_files, named,
    number, positive, samples,
};
use mla_runtime::model::DType;
use mla_runtime::spec::Platform;
use mla_runtime::tensor::{Layout, TensorMut, TensorRef};

use crate::timing::{Timer, saved};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Device to measure.
    #[arg(long, default_value = "cpu")]
    device: DeviceName,
    /// Dtype of the GEMMs.
    #[arg(long, default_value = "bf16", value_parser = named(DType::ALL, DType::name))]
    dtype: DType,
    /// Edge of the square matrices to multiply [default: 8192 on a GPU, 2048 otherwise].
    #[arg(long, value_name = "N", value_parser = positive)]
    edge: Option<u32>,
    /// MiB to read and to copy [default: 2048 on a GPU, 512 otherwise].
    #[arg(long, value_name = "MIB", value_parser = positive)]
    mib: Option<u32>,
    /// Number of timed runs. The fastest one counts.
    #[arg(long, value_name = "N", default_value = "20", value_parser = samples)]
    samples: u32,
    /// File for the result, for use with --ceilings.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Returns the figures.
pub(crate) fn output(args: &Args) -> Result<(String, bool), CliError> {
    check_files([&args.json])?;
    let ceilings = args.device.run(Measurement(args))?;
    let text = format!("{}\n{ceilings}\n", ceilings.device);
    saved(args.json.as_deref(), &ceilings, text, true)
}

struct Measurement<'a>(&'a Args);

impl Job for Measurement<'_> {
    type Output = Ceilings;

    fn run<D: Stopwatch>(self, device: &D, about: &About) -> Result<Ceilings, CliError> {
        let args = self.0;
        let on_gpu = D::PLATFORM == Platform::Cuda;
        let edge = args.edge.unwrap_or(if on_gpu { 8192 } else { 2048 }) as usize;
        let mib = args.mib.unwrap_or(if on_gpu { 2048 } else { 512 }) as usize;
        let (dtype, size) = (args.dtype, args.dtype.bytes());
        let matrices = 3.0 * (edge as f64).powi(2) * size as f64;
        about.check_memory("--edge", edge, matrices)?;
        // The copy needs a source and a destination.
        about.check_memory("--mib", mib, 2.0 * mib as f64 * f64::from(1 << 20))?;
        let progress = Progress::spinner();
        let mut timer = Timer::new(device, [args.samples, 3], &progress)?;
        let product = product(&mut timer, dtype, edge)?;
        let [read, copy] = traffic(&mut timer, dtype, mib << 20)?;
        Ok(Ceilings {
            device: about.description.clone(),
            dtype: dtype.to_string(),
            flop_per_second: 2.0 * (edge as f64).powi(3) / product,
            bytes_per_second: read.max(copy),
            source: format!(
                "measured: a product of {edge}³; reads at {} and copies at {} GB/s, of which the \
                 faster counts",
                number(read / 1e9),
                number(copy / 1e9)
            ),
        })
    }
}

/// Returns the seconds of a product of two square matrices. The fastest run counts, since a ceiling
/// is a rate that can be reached.
fn product<D: Stopwatch>(
    timer: &mut Timer<'_, D>,
    dtype: DType,
    edge: usize,
) -> Result<f64, CliError> {
    let device = timer.device;
    let square = Layout::contiguous(dtype, [1, edge, edge]);
    let [a, b] =
        [1, 2].map(|seed| Normal::new(seed, dtype, 1.0).buffer(device, 0, square.elements()));
    let (a, b) = (a?, b?);
    let mut c = device.allocate(square.elements() * dtype.bytes())?;
    let product = timer.time("a product", [0.0; 2], &mut |device| {
        device.gemm(
            TensorRef::new(D::bytes(&a), square)?,
            TensorRef::new(D::bytes(&b), square)?,
            TensorMut::new(D::bytes_mut(&mut c), square)?,
        )
    })?;
    Ok(product.min)
}

/// Returns the bytes per second for reading `bytes` bytes, and for copying them.
fn traffic<D: Stopwatch>(
    timer: &mut Timer<'_, D>,
    dtype: DType,
    bytes: usize,
) -> Result<[f64; 2], CliError> {
    let device = timer.device;
    // Reading is fastest without writing. A product with a vector reads a matrix once.
    let columns = 4096;
    let rows = (bytes / dtype.bytes() / columns).max(1);
    let matrix = Layout::contiguous(dtype, [1, rows, columns]);
    let vector = Layout::contiguous(dtype, [1, columns, 1]);
    let result = Layout::contiguous(dtype, [1, rows, 1]);
    let numbers = Normal::new(3, dtype, 1.0);
    let from = numbers.buffer(device, 0, matrix.elements())?;
    let by = numbers.buffer(device, 7, columns)?;
    let mut to = device.allocate(matrix.elements() * dtype.bytes())?;
    let read = timer.time("reads", [0.0; 2], &mut |device| {
        device.gemm(
            TensorRef::new(D::bytes(&from), matrix)?,
            TensorRef::new(D::bytes(&by), vector)?,
            TensorMut::new(D::bytes_mut(&mut to), result)?,
        )
    })?;
    let copy = timer.time("copies", [0.0; 2], &mut |device| {
        device.copy(
            TensorRef::new(D::bytes(&from), matrix)?,
            TensorMut::new(D::bytes_mut(&mut to), matrix)?,
        )
    })?;
    let bytes = (matrix.elements() * dtype.bytes()) as f64;
    Ok([bytes / read.min, 2.0 * bytes / copy.min])
}
