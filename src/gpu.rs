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

    fn driver() -> Result<(), Cause> {
        if !library::has_driver() {
            return Err(Cause::NoDriver);
        }
        result::init().map_err(cause)
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
                    matches!(cause, Cause::NoDriver | Cause::NoDevice),
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
