//! Timing of this folder's benchmarks: the L2 cache filled with something else (512 MiB are
//! written) before every sample, CUDA events around one replay of a graph of the whole case, the
//! median of the samples.

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use clap::Parser;
use mla_kernels::Cuda;
use mla_kernels::device::Buffer;
use mla_kernels::device::cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use mla_runtime::device::Device as _;
use mla_runtime::model::DType;
use mla_runtime::tensor::{Layout, Memory as _, TensorMut};
use serde::Serialize;

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error>>;

const FLUSH_BYTES: usize = 512 << 20;

// The first few replays move code and tables to the device.
const UNCOUNTED: usize = 3;

#[derive(Parser)]
pub(crate) struct Arguments {
    /// The folder that the figures go to, as JSON; nowhere by default.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Samples of each case.
    #[arg(long, default_value_t = 41)]
    pub(crate) samples: usize,
    /// Only cases whose name contains this.
    #[arg(long, default_value = "")]
    filter: String,
    /// Given by cargo, without meaning here.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Arguments {
    pub(crate) fn skips(&self, name: &str) -> bool {
        !name.contains(&self.filter)
    }

    /// Writes the figures to a file of this name, if a folder was given.
    pub(crate) fn save(&self, name: &str, figures: &impl Serialize) -> Result<()> {
        if let Some(out) = &self.out {
            fs::create_dir_all(out)?;
            fs::write(out.join(name), serde_json::to_string_pretty(figures)?)?;
        }
        Ok(())
    }
}

/// Times of a case, in microseconds.
pub(crate) struct Times {
    pub(crate) median: f64,
    pub(crate) least: f64,
}

pub(crate) struct Stopwatch {
    flush: Buffer,
    samples: usize,
}

impl Stopwatch {
    pub(crate) fn new(gpu: &Cuda, samples: usize) -> Result<Self> {
        if samples == 0 {
            return Err("--samples: given 0, accepted at least 1".into());
        }
        Ok(Self {
            flush: gpu.allocate(FLUSH_BYTES)?,
            samples,
        })
    }

    /// Times what `work` enqueues. It is run once before it is captured, so that libraries load
    /// what they need.
    pub(crate) fn time(
        &mut self,
        gpu: &Cuda,
        mut work: impl FnMut(&Cuda) -> mla_runtime::Result<()>,
    ) -> Result<Times> {
        work(gpu)?;
        let graph = gpu.capture(work)?;
        graph.upload()?;
        let event = || gpu.stream().record_event(Some(CU_EVENT_DEFAULT));
        let mut times = Vec::new();
        for sample in 0..self.samples + UNCOUNTED {
            let flush = Layout::contiguous(DType::F32, [1, 1, FLUSH_BYTES / 4]);
            gpu.clear(TensorMut::new(self.flush.bytes_mut(), flush)?)?;
            let start = event()?;
            // SAFETY: what `work` borrows outlives this function, and only this stream uses it.
            unsafe { graph.replay() }?;
            let end = event()?;
            gpu.synchronize()?;
            if sample >= UNCOUNTED {
                times.push(f64::from(start.elapsed_ms(&end)?) * 1e3);
            }
        }
        times.sort_by(f64::total_cmp);
        Ok(Times {
            median: times[times.len() / 2],
            least: times[0],
        })
    }
}

/// Uploads values to a new buffer of the GPU.
pub(crate) fn upload<T: bytemuck::NoUninit>(gpu: &Cuda, values: &[T]) -> Result<Buffer> {
    let bytes = bytemuck::cast_slice(values);
    let mut buffer = gpu.allocate(bytes.len())?;
    gpu.upload(bytes, buffer.bytes_mut())?;
    Ok(buffer)
}
