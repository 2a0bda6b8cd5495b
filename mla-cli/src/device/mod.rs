//! The devices that a subcommand can run on: `--device cpu` or `--device cuda`.

pub(crate) mod memory;
pub(crate) mod progress;
pub(crate) mod random;
pub(crate) mod statistics;
pub(crate) mod stopwatch;
pub(crate) mod tensor;

use std::fmt::Display;

use clap::ValueEnum;
use mla_cpu::Cpu;
use mla_runtime::backend::StepLimits;
use mla_runtime::indexer::IndexDevice;
use mla_runtime::plan::memory::MemoryPlan;
use mla_runtime::spec::Cause;
use serde::{Deserialize, Serialize};

use self::memory::field_bytes;
use self::stopwatch::Stopwatch;
use crate::batch::BatchSpec;
#[cfg(feature = "gpu")]
use crate::device::progress::Progress;
use crate::error::CliError;
use crate::table::size;

/// The name of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceName {
    /// This machine's CPU.
    Cpu,
    /// This machine's first GPU.
    Cuda,
}

/// Work that runs on any device.
pub trait Job {
    /// The result of the job.
    type Output;

    /// Runs the job on `device`, which `about` describes.
    fn run<D: Stopwatch>(self, device: &D, about: &About) -> Result<Self::Output, CliError>;
}

/// Work that runs on a device that can select slots.
pub trait IndexedJob {
    /// The result of the job.
    type Output;

    /// Runs the job on `device`, which `about` describes.
    fn run<D: IndexDevice + Stopwatch>(
        self,
        device: &D,
        about: &About,
    ) -> Result<Self::Output, CliError>;
}

/// The description of a device, in addition to its capabilities.
pub struct About {
    /// The device in words, for a report.
    pub description: String,
    /// The bytes of memory for tensors on the device, or `None` if this is not known.
    pub memory: Option<u64>,
}

impl About {
    /// Refuses a run that takes more memory than the device has, before any of it is allocated. A
    /// machine may grant more memory than it has, as long as the memory is not used.
    pub fn check_memory(
        &self,
        argument: &'static str,
        given: impl Display,
        bytes: f64,
    ) -> Result<(), CliError> {
        match self.memory {
            Some(available) if bytes > available as f64 => Err(CliError::Argument {
                argument,
                // A size above the 64-bit maximum is shown as that maximum.
                given: format!(
                    "{given}, which takes {} of memory at least",
                    size(bytes as u64)
                ),
                accepted: format!("what fits into the {} that are available", size(available)),
            }),
            _ => Ok(()),
        }
    }

    /// Refuses a batch whose plan takes more memory than is available.
    pub fn check_plan(
        &self,
        argument: &'static str,
        batch: &BatchSpec,
        limits: &StepLimits,
        plan: &MemoryPlan,
    ) -> Result<(), CliError> {
        let given = format!("{batch} with {} context rows", limits.context_rows);
        self.check_memory(argument, given, plan.total_bytes as f64)
    }
}

impl DeviceName {
    /// Opens the device and runs `job` on it.
    pub fn run<J: Job>(self, job: J) -> Result<J::Output, CliError> {
        match self {
            Self::Cpu => {
                let (device, about) = cpu();
                job.run(&device, &about)
            }
            Self::Cuda => run_on_gpu(job),
        }
    }

    /// Opens the device and runs a job that selects slots on it.
    pub fn run_indexed<J: IndexedJob>(self, job: J) -> Result<J::Output, CliError> {
        match self {
            Self::Cpu => {
                let (device, about) = cpu();
                job.run(&device, &about)
            }
            Self::Cuda => run_indexed_on_gpu(job),
        }
    }
}

#[cfg(feature = "sm90")]
fn run_indexed_on_gpu<J: IndexedJob>(job: J) -> Result<J::Output, CliError> {
    let (device, about) = cuda()?;
    job.run(&device, &about)
}

#[cfg(not(feature = "sm90"))]
fn run_indexed_on_gpu<J: IndexedJob>(_: J) -> Result<J::Output, CliError> {
    let cause = Cause::FeatureOff {
        package: env!("CARGO_PKG_NAME"),
        feature: "sm90",
    };
    Err(CliError::argument(
        "--device",
        format!("cuda for a model with an indexer, but {cause}"),
        format!("cpu, or --dense; for cuda, {}", cause.remedy()),
    ))
}

fn cpu() -> (Cpu, About) {
    let device = Cpu::new();
    let about = About {
        description: format!("cpu ({} threads)", device.threads()),
        // This memory can be used without swapping, if the system reports it.
        memory: field_bytes("/proc/meminfo", "MemAvailable"),
    };
    (device, about)
}

#[cfg(feature = "gpu")]
fn run_on_gpu<J: Job>(job: J) -> Result<J::Output, CliError> {
    let (device, about) = cuda()?;
    job.run(&device, &about)
}

#[cfg(feature = "gpu")]
fn cuda() -> Result<(mla_kernels::Cuda, About), CliError> {
    // A driver may need seconds for its first context.
    let progress = Progress::spinner();
    progress.step("opening the GPU");
    let gpu = mla_kernels::present_gpu().map_err(refused)?;
    let device = mla_kernels::Cuda::new(gpu.ordinal)?;
    let about = About {
        description: crate::target::name_gpu(&gpu),
        memory: Some(gpu.memory as u64),
    };
    Ok((device, about))
}

#[cfg(not(feature = "gpu"))]
fn run_on_gpu<J: Job>(_: J) -> Result<J::Output, CliError> {
    Err(refused(Cause::FeaturesOff {
        package: env!("CARGO_PKG_NAME"),
        features: mla_kernels::FAMILY_FEATURES,
    }))
}

fn refused(cause: Cause) -> CliError {
    CliError::argument(
        "--device",
        format!("cuda, but {cause}"),
        format!("cpu; for cuda, {}", cause.remedy()),
    )
}
