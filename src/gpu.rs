//! The GPU of this machine, if there is one.

#[cfg(any(feature = "gpu", test))]
use mla_runtime::spec::CompiledFamily;
use mla_runtime::spec::{Capability, Cause, Target};

/// A GPU of this machine.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Gpu {
    /// The number that the driver gives the GPU, from 0.
    pub ordinal: usize,
    /// The name that the driver gives the GPU.
    pub name: String,
    /// The compute capability.
    pub capability: Capability,
    /// The size of the GPU's memory in bytes.
    pub memory: usize,
    /// The number of multiprocessors (SMs).
    pub multiprocessors: usize,
}

impl Gpu {
    /// Returns this GPU as the target of a selection.
    pub fn target(&self) -> Target {
        Target::present_gpu(self.capability)
    }
}

/// Returns the first GPU of this machine. This creates no context on the GPU.
///
/// # Errors
///
/// Returns the reason if no GPU can be used: no feature that compiles kernels is on, there is no
/// driver or no device, or the driver is too old for the kernels.
pub fn present_gpu() -> Result<Gpu, Cause> {
    imp::gpu(0)
}

#[cfg(feature = "gpu")]
pub(crate) use imp::gpu;

/// Returns the cause if a driver cannot run the code of a release of CUDA.
///
/// `version` is in the driver's own numbering. Machine code runs from the first driver of its major
/// release on, PTX only from the first driver of its own release on.
#[cfg(any(feature = "gpu", test))]
fn too_old(version: i32, [major, minor]: [u32; 2], is_ptx: bool) -> Option<Cause> {
    let version = u32::try_from(version).unwrap_or(0);
    let given = [version / 1000, version % 1000 / 10];
    let accepted = [major, if is_ptx { minor } else { 0 }];
    (given < accepted).then_some(Cause::DriverVersion {
        given,
        accepted,
        driver: crate::drivers::first(accepted),
    })
}

/// True if the driver has to compile PTX for a GPU of this capability, since no target has machine
/// code for it.
#[cfg(any(feature = "gpu", test))]
fn takes_ptx(targets: &'static [&'static str], capability: Capability) -> bool {
    let name = "all";
    let family = CompiledFamily { name, targets };
    family.machine_code_on(capability).is_none() && family.ptx_on(capability).is_some()
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
        CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as SMS,
    };

    use super::{Capability, Cause, Gpu};
    use crate::{library, raw};

    include!(concat!(env!("OUT_DIR"), "/cuda.rs"));

    /// Returns the driver's version.
    fn driver() -> Result<i32, Cause> {
        if !library::has_driver() {
            return Err(Cause::NoDriver);
        }
        result::init().map_err(cause)?;
        let mut version = 0;
        // SAFETY: the address is that of a number on this stack.
        unsafe { sys::cuDriverGetVersion(&raw mut version) }
            .result()
            .map_err(cause)?;
        Ok(version)
    }

    pub(crate) fn gpu(ordinal: usize) -> Result<Gpu, Cause> {
        let version = driver()?;
        let count = usize::try_from(result::device::get_count().map_err(cause)?).unwrap_or(0);
        if ordinal >= count {
            return Err(Cause::NoDevice);
        }
        let gpu = describe(ordinal).map_err(cause)?;
        let is_ptx = super::takes_ptx(raw::compiled::ALL, gpu.capability);
        match CUDA_OF_KERNELS.and_then(|release| super::too_old(version, release, is_ptx)) {
            Some(cause) => Err(cause),
            None => Ok(gpu),
        }
    }

    fn describe(ordinal: usize) -> Result<Gpu, DriverError> {
        let device = result::device::get(i32::try_from(ordinal).unwrap_or(i32::MAX))?;
        // SAFETY: `device` was just returned by the driver, which is initialised.
        let attribute = |name| unsafe { result::device::get_attribute(device, name) };
        let (major, minor, multiprocessors) =
            (attribute(MAJOR)?, attribute(MINOR)?, attribute(SMS)?);
        let part = |number: i32| u8::try_from(number).unwrap_or(0);
        Ok(Gpu {
            ordinal,
            name: result::device::get_name(device)?,
            capability: Capability::new(part(major), part(minor)),
            // SAFETY: as for the attributes.
            memory: unsafe { result::device::total_mem(device) }?,
            multiprocessors: usize::try_from(multiprocessors).unwrap_or(0),
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
    fn a_driver_of_an_earlier_release_is_too_old() {
        for (version, release, is_ptx) in [
            (13000, [13, 0], false),
            (13010, [13, 0], true),
            (14000, [13, 2], true),
            (12000, [12, 9], false),
            (12090, [12, 9], true),
        ] {
            let cause = too_old(version, release, is_ptx);
            assert_eq!(cause, None, "{version} for {release:?}");
        }
        for (version, release, is_ptx, said) in [
            (
                12090,
                [13, 2],
                false,
                "12.9, accepted one of CUDA 13.0 or later (R580 or later)",
            ),
            (
                12080,
                [12, 9],
                true,
                "12.8, accepted one of CUDA 12.9 or later (R575 or later)",
            ),
            (
                13020,
                [14, 1],
                false,
                "13.2, accepted one of CUDA 14.0 or later",
            ),
        ] {
            let cause = too_old(version, release, is_ptx).map(|cause| cause.to_string());
            assert_eq!(cause, Some(format!("driver: given one of CUDA {said}")));
        }
    }

    #[test]
    fn a_gpu_without_machine_code_takes_ptx() {
        for (targets, capability, expected) in [
            (&["sm_80", "sm_90a", "compute_80"][..], (9, 0), false),
            (&["sm_80", "sm_90a", "compute_80"], (12, 0), true),
            (&["compute_80"], (9, 0), true),
            // Nothing runs there, but another refusal says so.
            (&["sm_90a"], (8, 0), false),
            (&[], (9, 0), false),
        ] {
            let (major, minor) = capability;
            let given = takes_ptx(targets, Capability::new(major, minor));
            assert_eq!(given, expected, "{targets:?} on {capability:?}");
        }
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
