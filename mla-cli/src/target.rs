//! The hardware of this machine.

use mla_kernels::{ARCHITECTURES, Gpu, present_gpu};
use mla_runtime::capability::{Capability, Target};

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

/// What this build compiled, and whether it runs on this machine: a line for each architecture.
pub(crate) fn describe_build() -> String {
    let present = present_gpu().ok().map(|gpu| gpu.capability);
    built(ARCHITECTURES, present)
}

fn built(architectures: &[(&str, Capability)], present: Option<Capability>) -> String {
    let line = |(feature, runs_on): &(&str, Capability)| match present {
        Some(capability) if capability == *runs_on => {
            format!("built with {feature}, which runs on this GPU\n")
        }
        Some(capability) => format!(
            "built with {feature}, which cannot be run here: it needs sm {runs_on}, this GPU is sm {capability}\n"
        ),
        None => format!(
            "built with {feature}, which cannot be run here: it needs a GPU of sm {runs_on}\n"
        ),
    };
    architectures.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_built_and_cannot_be_run_here_says_so() {
        let both = [
            ("sm90", Capability::new(9, 0)),
            ("sm100", Capability::new(10, 0)),
        ];
        assert_eq!(
            built(&both, Some(Capability::new(9, 0))),
            "built with sm90, which runs on this GPU\n\
             built with sm100, which cannot be run here: it needs sm 10.0, this GPU is sm 9.0\n"
        );
        assert_eq!(
            built(&both[1..], None),
            "built with sm100, which cannot be run here: it needs a GPU of sm 10.0\n"
        );
        assert_eq!(built(&[], None), "");
    }
}
