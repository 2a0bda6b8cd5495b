//! A machine's maximal throughput: as stated for known GPUs, or measured by `mla bench ceilings`.

use std::fmt;
use std::path::{Path, PathBuf};

use mla_runtime::model::DType;
use mla_runtime::tensor::{Layout, TensorMut, TensorRef};
use serde::{Deserialize, Serialize};

use super::files::{Until, check_files, json, save};
use super::random::Normal;
use super::statistics::Summary;
use crate::args::{named, positive, samples};
use crate::cost::Cost;
use crate::device::{About, DeviceName, Job};
use crate::error::CliError;
use crate::figures::number;
use crate::input::read_text;
use crate::stopwatch::{Protocol, Stopwatch};

/// The maximal arithmetic and traffic of a machine, and the source of the figures.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the limits of a machine")]
pub(super) struct Ceilings {
    pub(super) device: String,
    /// The dtype of the products.
    pub(super) dtype: String,
    pub(super) flop_per_second: f64,
    pub(super) bytes_per_second: f64,
    pub(super) source: String,
}

/// Known GPUs: a part of the name, FLOP/s of products in bf16 and f16, and bytes/s of streaming
/// reads.
const STATED: [(&str, f64, f64, &str); 1] = [(
    "H200",
    794e12,
    4.26e12,
    "as mla bench ceilings measured them on another one",
)];

impl Ceilings {
    /// The ceilings of a file, or those stated for a device.
    pub(super) fn find(file: Option<&Path>, device: &str) -> Result<Option<Self>, CliError> {
        let Some(path) = file else {
            let known = STATED.iter().find(|(name, ..)| device.contains(name));
            return Ok(known.map(|(_, flop, bytes, source)| Self {
                device: device.to_owned(),
                dtype: DType::BF16.to_string(),
                flop_per_second: *flop,
                bytes_per_second: *bytes,
                source: (*source).to_owned(),
            }));
        };
        let refused = |message: String| CliError::File {
            argument: "--ceilings",
            path: path.to_owned(),
            message,
        };
        let accepted = "what `mla bench ceilings --json` writes";
        let text = read_text(path, accepted).map_err(refused)?;
        let ceilings: Self = serde_json::from_str(&text).map_err(|error| {
            refused(format!(
                "given what is no such file ({error}), accepted {accepted}"
            ))
        })?;
        for (field, given) in [
            ("flop_per_second", ceilings.flop_per_second),
            ("bytes_per_second", ceilings.bytes_per_second),
        ] {
            if !(given.is_finite() && given > 0.0) {
                return Err(refused(format!(
                    "{field}: given {given}, accepted a number above 0"
                )));
            }
        }
        if ceilings.device != device {
            return Err(refused(format!(
                "device: given {:?}, accepted {device:?}",
                ceilings.device
            )));
        }
        Ok(Some(ceilings))
    }

    /// True if products in this dtype are as fast: all dtypes of 16 bits have the same ceiling.
    pub(super) fn hold_for(&self, dtype: DType) -> bool {
        let wide = |name: &str| name == DType::F32.name();
        wide(&self.dtype) == wide(dtype.name())
    }

    /// Seconds that something takes at least: of arithmetic and traffic, the slower one.
    pub(super) fn seconds(&self, cost: Cost) -> f64 {
        (cost.flop / self.flop_per_second).max(cost.bytes / self.bytes_per_second)
    }
}

impl fmt::Display for Ceilings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "limits: {} TFLOP/s in {}, {} GB/s ({})",
            number(self.flop_per_second / 1e12),
            self.dtype,
            number(self.bytes_per_second / 1e9),
            self.source
        )
    }
}

/// Measure what this machine does at most.
#[derive(clap::Args)]
pub(super) struct Args {
    /// The device to measure.
    #[arg(long, default_value = "cpu")]
    device: DeviceName,
    /// The dtype of the products.
    #[arg(long, default_value = "bf16", value_parser = named(DType::ALL, DType::name))]
    dtype: DType,
    /// The edge of the square matrices that are multiplied [default: 8192 on a GPU, 2048 else].
    #[arg(long, value_name = "N", value_parser = positive)]
    edge: Option<u32>,
    /// MiB that are read and copied [default: 2048 on a GPU, 512 else].
    #[arg(long, value_name = "MIB", value_parser = positive)]
    mib: Option<u32>,
    /// Timed runs, of which the fastest counts.
    #[arg(long, value_name = "N", default_value = "20", value_parser = samples)]
    samples: u32,
    /// File for the result, which --ceilings takes.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub(super) fn output(args: &Args) -> Result<String, CliError> {
    check_files([&args.json])?;
    let ceilings = args.device.run(Measurement(args))?;
    let text = format!("{}\n{ceilings}\n", ceilings.device);
    let saved = match &args.json {
        Some(path) => save(path, Until::End, &json(&ceilings)),
        None => Ok(()),
    };
    match saved {
        Ok(()) => Ok(text),
        Err(error) => Err(error.behind(text)),
    }
}

struct Measurement<'a>(&'a Args);

impl Job for Measurement<'_> {
    type Output = Ceilings;

    fn run<D: Stopwatch>(self, device: &D, about: &About) -> Result<Ceilings, CliError> {
        let args = self.0;
        let on_gpu = D::PLATFORM == mla_runtime::spec::Platform::Cuda;
        let edge = args.edge.unwrap_or(if on_gpu { 8192 } else { 2048 }) as usize;
        let mib = args.mib.unwrap_or(if on_gpu { 2048 } else { 512 }) as usize;
        let (dtype, size) = (args.dtype, args.dtype.bytes());
        let matrices = 3.0 * (edge as f64).powi(2) * size as f64;
        about.check_memory("--edge", edge, matrices)?;
        // The copy has a source and a target.
        about.check_memory("--mib", mib, 2.0 * mib as f64 * f64::from(1 << 20))?;
        let protocol = Protocol {
            samples: args.samples as usize,
            warm_up: 3,
            cold_cache: true,
            graphs: on_gpu,
        };
        let mut fastest = Fastest {
            device,
            protocol,
            flush: device.allocate(device.flush_bytes())?,
            dtype,
        };
        let product = fastest.product(edge)?;
        let [read, copy] = fastest.traffic(mib << 20)?;
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

/// Times work and takes its fastest run: a ceiling is what can be reached.
struct Fastest<'a, D: Stopwatch> {
    device: &'a D,
    protocol: Protocol,
    flush: D::Buffer,
    dtype: DType,
}

impl<D: Stopwatch> Fastest<'_, D> {
    fn run(
        &mut self,
        work: &mut dyn FnMut(&D) -> mla_runtime::Result<()>,
    ) -> Result<f64, CliError> {
        let (samples, _) = self.device.time(&self.protocol, &mut self.flush, work)?;
        Ok(Summary::of(&samples).min)
    }

    /// Seconds of a product of two square matrices.
    fn product(&mut self, edge: usize) -> Result<f64, CliError> {
        let (device, dtype) = (self.device, self.dtype);
        let square = Layout::contiguous(dtype, [1, edge, edge]);
        let [a, b] =
            [1, 2].map(|seed| Normal::new(seed, dtype, 1.0).buffer(device, 0, square.elements()));
        let (a, b) = (a?, b?);
        let mut c = device.allocate(square.elements() * dtype.bytes())?;
        self.run(&mut |device| {
            device.gemm(
                TensorRef::new(D::bytes(&a), square)?,
                TensorRef::new(D::bytes(&b), square)?,
                TensorMut::new(D::bytes_mut(&mut c), square)?,
            )
        })
    }

    /// Bytes a second of reading `bytes` bytes, and of copying them.
    fn traffic(&mut self, bytes: usize) -> Result<[f64; 2], CliError> {
        let (device, dtype) = (self.device, self.dtype);
        // Reading is fastest without writing; a product with a vector reads a matrix once.
        let columns = 4096;
        let rows = (bytes / dtype.bytes() / columns).max(1);
        let matrix = Layout::contiguous(dtype, [1, rows, columns]);
        let vector = Layout::contiguous(dtype, [1, columns, 1]);
        let result = Layout::contiguous(dtype, [1, rows, 1]);
        let numbers = Normal::new(3, dtype, 1.0);
        let from = numbers.buffer(device, 0, matrix.elements())?;
        let by = numbers.buffer(device, 7, columns)?;
        let mut to = device.allocate(matrix.elements() * dtype.bytes())?;
        let read = self.run(&mut |device| {
            device.gemm(
                TensorRef::new(D::bytes(&from), matrix)?,
                TensorRef::new(D::bytes(&by), vector)?,
                TensorMut::new(D::bytes_mut(&mut to), result)?,
            )
        })?;
        let copy = self.run(&mut |device| {
            device.copy(
                TensorRef::new(D::bytes(&from), matrix)?,
                TensorMut::new(D::bytes_mut(&mut to), matrix)?,
            )
        })?;
        let bytes = (matrix.elements() * dtype.bytes()) as f64;
        Ok([bytes / read, 2.0 * bytes / copy])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stated_ceilings_are_found_by_name() {
        let known = Ceilings::find(None, "GPU 0: NVIDIA H200, sm 9.0")
            .unwrap()
            .unwrap();
        // The balance that kernels for it are designed by: about 190 FLOP per byte.
        assert!((known.flop_per_second / known.bytes_per_second - 190.0).abs() < 5.0);
        assert!(known.hold_for(DType::F16) && !known.hold_for(DType::F32));
        let cost = Cost {
            flop: 794e12,
            bytes: 4.26e12 * 2.0,
        };
        assert_eq!(known.seconds(cost), 2.0);
        assert_eq!(Ceilings::find(None, "cpu (2 threads)").unwrap(), None);
    }
}
