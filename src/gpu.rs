//! The GPU of this machine, if there is one.

use mla_runtime::availability::Cause;
use mla_runtime::capability::{Capability, Target};

/// A GPU of this machine.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Gpu {
    /// The number that the driver gives it, from 0.
    pub ordinal: usize,
    /// The name that the driver gives it.
    pub name: String,
    /// The compute capability.
    pub capability: Capability,
    /// The size of its memory in bytes.
    pub memory: usize,
}

impl Gpu {
    /// Returns the target of a selection for this GPU.
    pub fn target(&self) -> Target {
        Target::present_gpu(self.capability)
    }
}

/// Returns the first GPU of this machine, or the reason why none can be used: no feature that
/// compiles kernels, no driver, or no device. Asking creates no context on the GPU.
///
/// # Errors
///
/// The cause, if there is none.
pub fn present_gpu() -> Result<Gpu, Cause> {
    imp::gpu(0)
}

#[cfg(feature = "gpu")]
pub(crate) use imp::gpu;

/// The cause if a driver of this version, as the driver tells it, does not run what a major release
/// of CUDA compiled. The machine code of a release runs from the first driver of its major on.
#[cfg(any(feature = "gpu", test))]
fn too_old(version: i32, major: u32) -> Option<Cause> {
    let version = u32::try_from(version).unwrap_or(0);
    let given = [version / 1000, version % 1000 / 10];
    (given[0] < major).then_some(Cause::DriverVersion {
        given,
        accepted: [major, 0],
        driver: match major {
            12 => Some("R525"),
            13 => Some("R580"),
            _ => None,
        },
    })
}

#[cfg(not(feature = "gpu"))]
mod imp {
    use super::{Cause, Gpu};

    pub(super) fn gpu(_ordinal: usize) -> Result<Gpu, Cause> {
        Err(Cause::FeaturesOff {
            package: env!("CARGO_PKG_NAME"),
            features: crate::FAMILY_FEATURES,
        })
    }
}

#[cfg(feature = "gpu")]
mod imp {
    use cudarc::driver::result::{self, DriverError};
    use cudarc::driver::sys::{
        self, CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
        CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };

    use super::{Capability, Cause, Gpu};
    use crate::library;

    include!(concat!(env!("OUT_DIR"), "/cuda.rs"));

    fn driver() -> Result<(), Cause> {
        if !library::has_driver() {
            return Err(Cause::NoDriver);
        }
        result::init().map_err(cause)?;
        let mut version = 0;
        // SAFETY: the address is that of a number on this stack.
        unsafe { sys::cuDriverGetVersion(&raw mut version) }
            .result()
            .map_err(cause)?;
        match CUDA_OF_KERNELS.and_then(|major| super::too_old(version, major)) {
            Some(cause) => Err(cause),
            None => Ok(()),
        }
    }

    pub(crate) fn gpu(ordinal: usize) -> Result<Gpu, Cause> {
        driver()?;
        let count = usize::try_from(result::device::get_count().map_err(cause)?).unwrap_or(0);
        if ordinal >= count {
            return Err(Cause::NoDevice);
        }
        describe(ordinal).map_err(cause)
    }

    fn describe(ordinal: usize) -> Result<Gpu, DriverError> {
        let device = result::device::get(i32::try_from(ordinal).unwrap_or(i32::MAX))?;
        // SAFETY: `device` was just returned by the driver, which is initialised.
        let (major, minor, memory) = unsafe {
            (
                result::device::get_attribute(device, MAJOR)?,
                result::device::get_attribute(device, MINOR)?,
                result::device::total_mem(device)?,
            )
        };
        let part = |number: i32| u8::try_from(number).unwrap_or(0);
        Ok(Gpu {
            ordinal,
            name: result::device::get_name(device)?,
            capability: Capability::new(part(major), part(minor)),
            memory,
        })
    }

    // Returns the cause of an error. A driver that cannot be initialised (a stub, or one that does
    // not match its kernel module) counts as missing.
    fn cause(error: DriverError) -> Cause {
        match error.0 {
            sys::CUresult::CUDA_ERROR_NO_DEVICE | sys::CUresult::CUDA_ERROR_INVALID_DEVICE => {
                Cause::NoDevice
            }
            _ => Cause::NoDriver,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_of_an_earlier_major_release_is_too_old() {
        for (version, major) in [(13000, 13), (13010, 13), (14000, 13), (12000, 12)] {
            assert_eq!(too_old(version, major), None, "{version} for {major}");
        }
        let said = |version, major| too_old(version, major).map(|cause| cause.to_string());
        assert_eq!(
            said(12090, 13).as_deref(),
            Some(
                "driver: given one of CUDA 12.9, accepted one of CUDA 13.0 or later (R580 or later)"
            )
        );
        assert_eq!(
            said(13020, 14).as_deref(),
            Some("driver: given one of CUDA 13.2, accepted one of CUDA 14.0 or later")
        );
    }

    // Checks that the answer is data on any machine and with any features.
    #[test]
    fn a_gpu_is_described_or_its_absence_explained() {
        match present_gpu() {
            Ok(gpu) => {
                assert!(!gpu.name.is_empty());
                assert!(gpu.capability.major > 0);
                assert_eq!(gpu.target().capability, Some(gpu.capability));
            }
            Err(cause) if cfg!(feature = "gpu") => {
                assert!(
                    matches!(
                        cause,
                        Cause::NoDriver | Cause::NoDevice | Cause::DriverVersion { .. }
                    ),
                    "{cause}"
                );
            }
            Err(cause) => {
                assert_eq!(
                    cause.to_string(),
                    "none of the features `sm80`, `sm90`, `sm100` of mla-kernels is on"
                );
            }
        }
    }
}
