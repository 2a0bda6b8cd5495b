//! The hardware of this machine.

use mla_kernels::{Gpu, present_gpu};
use mla_runtime::capability::Target;

/// What a selection is made for where no other hardware is named: the first GPU, or the processor where
/// there is none that can be used.
pub(crate) fn present_target() -> Target {
    present_gpu().map_or(Target::CPU, |gpu| gpu.target())
}

/// The first GPU in words, or why there is none.
pub(crate) fn describe_gpu() -> String {
    match present_gpu() {
        Ok(gpu) => name_gpu(&gpu),
        Err(cause) => format!("no GPU: {cause}; {}", cause.remedy()),
    }
}

/// A GPU in words.
pub(crate) fn name_gpu(gpu: &Gpu) -> String {
    format!("GPU {}: {}, sm {}", gpu.ordinal, gpu.name, gpu.capability)
}
