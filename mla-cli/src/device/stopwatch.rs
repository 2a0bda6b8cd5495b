//! Timing on each kind of device, by one interface.

use mla_runtime::Result;
use mla_runtime::device::Device;
use serde::{Deserialize, Serialize};

/// The protocol by which samples are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Protocol {
    pub samples: usize,
    /// The number of untimed runs before the first sample.
    pub warm_up: usize,
    /// True if the hardware caches are filled with other data before every sample.
    pub cold_cache: bool,
    /// True if the work is captured once and replayed.
    pub graphs: bool,
}

/// The state of the device while samples were taken.
#[derive(Clone, Default, PartialEq, Debug, Serialize, Deserialize)]
pub struct Conditions {
    /// The clock of the multiprocessors or cores.
    pub clock_mhz: Option<f64>,
    pub temperature_celsius: Option<f64>,
    pub power_watts: Option<f64>,
    /// The cause that keeps the clock below its maximum, such as a power limit. Empty if there is
    /// none.
    pub throttled: Option<String>,
}

/// A kernel, and the code that the driver loaded for it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Loaded {
    /// Its name in the machine code, as the C++ compiler mangled it. Drivers before CUDA 12.3 do
    /// not report it.
    pub symbol: Option<String>,
    /// The compute capability of the machine code, which nvcc or the driver made.
    pub machine_code: String,
    /// The compute capability of the PTX from which the machine code was made.
    pub ptx: String,
}

/// A device on which work can be timed.
pub trait Stopwatch: Device {
    /// Returns the number of bytes to write so that no hardware cache holds anything else.
    fn flush_bytes(&self) -> usize;

    /// Returns the seconds of `work` for each sample, and the device's state meanwhile.
    fn time(
        &self,
        protocol: &Protocol,
        flush: &mut Self::Buffer,
        work: &mut dyn FnMut(&Self) -> Result<()>,
    ) -> Result<(Vec<f64>, Conditions)>;

    /// Returns the code that was loaded for the kernels of `work`, which is empty on devices
    /// without kernels. A graph must be able to contain the work, and it must have run before.
    fn loaded(&self, _work: &mut dyn FnMut(&Self) -> Result<()>) -> Result<Vec<Loaded>> {
        Ok(Vec::new())
    }

    /// Begins to watch the memory in use.
    fn watch_memory(&self) -> Memory;

    /// Returns the maximum number of bytes in use, minus those at the beginning of the watch.
    fn peak_memory(&self, since: Memory) -> Option<u64>;
}

/// Bytes in use at the beginning of a watch, if known.
#[derive(Clone, Copy)]
pub struct Memory(Option<u64>);

mod cpu {
    use std::fs;
    use std::time::Instant;

    use mla_cpu::Cpu;
    use mla_runtime::model::DType;
    use mla_runtime::tensor::{Layout, TensorMut};

    use super::*;
    use crate::device::memory::field_bytes;

    /// The default, if the system does not report the size of its last cache.
    const FLUSH: usize = 64 << 20;

    impl Stopwatch for Cpu {
        fn flush_bytes(&self) -> usize {
            let path = "/sys/devices/system/cpu/cpu0/cache/index3/size";
            let size = fs::read_to_string(path).ok();
            let kib = size.and_then(|size| size.trim().strip_suffix('K')?.parse::<usize>().ok());
            kib.map_or(FLUSH, |kib| 2 * kib * 1024)
        }

        fn time(
            &self,
            protocol: &Protocol,
            flush: &mut Self::Buffer,
            work: &mut dyn FnMut(&Self) -> Result<()>,
        ) -> Result<(Vec<f64>, Conditions)> {
            let mut times = Vec::with_capacity(protocol.samples);
            for sample in 0..protocol.warm_up + protocol.samples {
                if protocol.cold_cache {
                    clear(self, flush)?;
                }
                let start = Instant::now();
                work(self)?;
                let time = start.elapsed();
                if sample >= protocol.warm_up {
                    times.push(time.as_secs_f64());
                }
            }
            Ok((times, conditions()))
        }

        fn watch_memory(&self) -> Memory {
            // Releases unused memory, so that it does not count as used, and resets the system's
            // peak to the memory in use now.
            //
            // SAFETY: the function may be called at any time, by any thread.
            #[cfg(all(target_os = "linux", target_env = "gnu"))]
            unsafe {
                libc::malloc_trim(0)
            };
            let reset = fs::write("/proc/self/clear_refs", "5").is_ok();
            Memory(status("VmRSS").filter(|_| reset))
        }

        fn peak_memory(&self, since: Memory) -> Option<u64> {
            Some(status("VmHWM")?.saturating_sub(since.0?))
        }
    }

    fn conditions() -> Conditions {
        let number =
            |path: &str| -> Option<f64> { fs::read_to_string(path).ok()?.trim().parse().ok() };
        let khz = number("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq");
        let millidegrees = number("/sys/class/thermal/thermal_zone0/temp");
        Conditions {
            clock_mhz: khz.map(|khz| khz / 1e3),
            temperature_celsius: millidegrees.map(|millidegrees| millidegrees / 1e3),
            power_watts: None,
            throttled: None,
        }
    }

    /// Returns a size that the system reports for this process.
    fn status(name: &str) -> Option<u64> {
        field_bytes("/proc/self/status", name)
    }

    pub(super) fn clear<D: Device>(device: &D, buffer: &mut D::Buffer) -> Result<()> {
        let elements = D::byte_len(D::bytes(buffer)) / DType::F32.bytes();
        let layout = Layout::contiguous(DType::F32, [1, 1, elements]);
        device.clear(TensorMut::new(D::bytes_mut(buffer), layout)?)
    }
}

#[cfg(feature = "gpu")]
mod cuda {
    use std::fmt::Write as _;
    use std::sync::LazyLock;

    use mla_kernels::Cuda;
    use mla_kernels::device::cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
    use mla_kernels::device::cudarc::driver::sys::CUuuid;
    use mla_kernels::device::cudarc::driver::{DriverError, result};
    use mla_runtime::Error;
    use mla_runtime::tensor::Memory as _;
    use nvml_wrapper::Nvml;
    use nvml_wrapper::bitmasks::device::ThrottleReasons;
    use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};

    use super::cpu::clear;
    use super::*;

    fn failed(operation: &'static str) -> impl FnOnce(DriverError) -> Error {
        move |error| Error::Device {
            device: "cuda",
            operation,
            message: error.to_string(),
        }
    }

    impl Stopwatch for Cuda {
        fn flush_bytes(&self) -> usize {
            512 << 20
        }

        fn time(
            &self,
            protocol: &Protocol,
            flush: &mut Self::Buffer,
            work: &mut dyn FnMut(&Self) -> Result<()>,
        ) -> Result<(Vec<f64>, Conditions)> {
            // The first call loads the kernels, which is not possible within a capture.
            work(self)?;
            self.synchronize()?;
            let graph = match protocol.graphs {
                true => Some(self.capture(&mut *work)?),
                false => None,
            };
            if let Some(graph) = &graph {
                graph.upload()?;
            }
            let event = || {
                let recorded = self.stream().record_event(Some(CU_EVENT_DEFAULT));
                recorded.map_err(failed("record event"))
            };
            // Everything is enqueued before the host waits, so the GPU never waits for the host
            // between two events.
            let mut events = Vec::with_capacity(protocol.samples);
            for sample in 0..protocol.warm_up + protocol.samples {
                if protocol.cold_cache {
                    clear(self, flush)?;
                }
                let start = event()?;
                match &graph {
                    // SAFETY: `work` borrows what the work uses, and lives longer than the wait
                    // below. Only this stream uses it.
                    Some(graph) => unsafe { graph.replay() }?,
                    None => work(self)?,
                }
                let end = event()?;
                if sample >= protocol.warm_up {
                    events.push((start, end));
                }
            }
            // The GPU usually is still working at this point, unless the work is short.
            let conditions = conditions(self);
            self.synchronize()?;
            let seconds = events.iter().map(|(start, end)| {
                let milliseconds = start.elapsed_ms(end).map_err(failed("read event"))?;
                Ok(f64::from(milliseconds) / 1e3)
            });
            let seconds: Result<Vec<f64>> = seconds.collect();
            Ok((seconds?, conditions))
        }

        fn loaded(&self, work: &mut dyn FnMut(&Self) -> Result<()>) -> Result<Vec<Loaded>> {
            let graph = self.capture(work)?;
            let kernels = self.loaded_kernels(&graph)?.into_iter();
            let loaded = kernels.map(|(symbol, [machine_code, ptx])| Loaded {
                symbol,
                machine_code: machine_code.to_string(),
                ptx: ptx.to_string(),
            });
            Ok(loaded.collect())
        }

        fn watch_memory(&self) -> Memory {
            Memory(used())
        }

        fn peak_memory(&self, since: Memory) -> Option<u64> {
            Some(used()?.saturating_sub(since.0?))
        }
    }

    fn conditions(gpu: &Cuda) -> Conditions {
        // Opening the library takes longer than most benchmarks, so this happens once.
        static LIBRARY: LazyLock<Option<Nvml>> = LazyLock::new(|| Nvml::init().ok());
        let read = |library: &Nvml| {
            // The driver and the management library may number GPUs differently.
            let uuid = gpu.stream().context().uuid().map(name_of).ok()?;
            let device = library.device_by_uuid(uuid).ok()?;
            let reasons = device.current_throttle_reasons().ok();
            Some(Conditions {
                clock_mhz: device.clock_info(Clock::SM).ok().map(f64::from),
                temperature_celsius: device
                    .temperature(TemperatureSensor::Gpu)
                    .ok()
                    .map(f64::from),
                power_watts: device
                    .power_usage()
                    .ok()
                    .map(|milliwatts| f64::from(milliwatts) / 1e3),
                throttled: reasons.map(|reasons| {
                    let slow = reasons - ThrottleReasons::GPU_IDLE;
                    slow.iter_names()
                        .map(|(name, _)| name)
                        .collect::<Vec<_>>()
                        .join(", ")
                }),
            })
        };
        LIBRARY.as_ref().and_then(read).unwrap_or_default()
    }

    /// Returns a GPU's identity in the form of the management library.
    fn name_of(uuid: CUuuid) -> String {
        let hex = uuid.bytes.iter().fold(String::new(), |mut hex, byte| {
            // The bytes are C characters, and their sign depends on the platform.
            let _ = write!(hex, "{:02x}", *byte as u8);
            hex
        });
        let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|range| &hex[range]);
        format!("GPU-{}", parts.join("-"))
    }

    /// Returns the bytes of the current GPU that are in use. Everything is allocated before it is
    /// timed and freed afterwards, so the bytes in use at the end are the peak.
    fn used() -> Option<u64> {
        let (free, total) = result::mem_get_info().ok()?;
        Some((total - free) as u64)
    }
}
