//! The machine that a benchmark ran on, and the sources that the program was built from.

use std::fs;
use std::time::SystemTime;

use mla_kernels::{FAMILIES, present_gpu};
use serde::{Deserialize, Serialize};

use crate::device::memory::{field, field_bytes};

/// The machine, the versions and the state of the sources.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Environment {
    /// The arguments of the program.
    pub command: Vec<String>,
    /// The time at which the benchmark began, in UTC.
    pub time: String,
    pub versions: Versions,
    pub machine: Machine,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Versions {
    pub mla: String,
    /// The commit of the build, and a note if files differed from it.
    pub git_commit: String,
    pub git_dirty: String,
    pub rustc: String,
    pub features: Vec<String>,
    pub optimised: bool,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Machine {
    pub cpu: Option<String>,
    pub threads: usize,
    pub memory_bytes: Option<u64>,
    pub kernel: Option<String>,
    pub gpu: Option<String>,
    pub gpu_memory_bytes: Option<u64>,
    pub gpu_driver: Option<String>,
}

impl Environment {
    pub fn here() -> Self {
        let gpu = present_gpu().ok();
        Self {
            command: std::env::args().collect(),
            time: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            versions: Versions {
                mla: env!("CARGO_PKG_VERSION").to_owned(),
                git_commit: or_unknown(option_env!("VERGEN_GIT_SHA")),
                git_dirty: or_unknown(option_env!("VERGEN_GIT_DIRTY")),
                rustc: or_unknown(option_env!("VERGEN_RUSTC_SEMVER")),
                features: FAMILIES
                    .iter()
                    .map(|family| family.name.to_owned())
                    .collect(),
                optimised: !cfg!(debug_assertions),
            },
            machine: Machine {
                cpu: field("/proc/cpuinfo", "model name"),
                threads: std::thread::available_parallelism().map_or(1, usize::from),
                memory_bytes: field_bytes("/proc/meminfo", "MemTotal"),
                kernel: fs::read_to_string("/proc/sys/kernel/osrelease")
                    .ok()
                    .map(|release| release.trim().to_owned()),
                gpu: gpu.as_ref().map(|gpu| gpu.name.clone()),
                gpu_memory_bytes: gpu.as_ref().map(|gpu| gpu.memory as u64),
                gpu_driver: fs::read_to_string("/sys/module/nvidia/version")
                    .ok()
                    .map(|version| version.trim().to_owned()),
            },
        }
    }
}

/// Returns a value that the build script found out. The package of a crate has no repository, and a
/// machine may not have git.
fn or_unknown(value: Option<&str>) -> String {
    value.unwrap_or("unknown").to_owned()
}
