//! The hardware of this machine.

use mla_kernels::{FAMILIES, Gpu, present_gpu};
use mla_runtime::spec::{Capability, CompiledFamily, Target};

/// Returns the default target of a selection: the first GPU, or the CPU if no GPU can be used.
pub(crate) fn present_target() -> Target {
    present_gpu().map_or(Target::CPU, |gpu| gpu.target())
}

/// Describes the first GPU, or says why there is none.
pub(crate) fn describe_gpu() -> String {
    match present_gpu() {
        Ok(gpu) => name_gpu(&gpu),
        Err(cause) => format!("no GPU: {cause}; {}", cause.remedy()),
    }
}

/// Names a GPU in words.
pub(crate) fn name_gpu(gpu: &Gpu) -> String {
    format!("GPU {}: {}, sm {}", gpu.ordinal, gpu.name, gpu.capability)
}

/// Lists the families that this build compiled, one per line, and says which of them run on this
/// machine.
pub(crate) fn describe_build() -> String {
    let present = present_gpu().ok().map(|gpu| gpu.capability);
    built(FAMILIES, present)
}

fn built(families: &[CompiledFamily], present: Option<Capability>) -> String {
    let line = |family: &CompiledFamily| {
        let (name, targets) = (family.name, family.targets.join(", "));
        match present {
            Some(capability) if family.runs_on(capability) => {
                format!("built with {name} ({targets}), which runs on this GPU\n")
            }
            Some(capability) => format!(
                "built with {name} ({targets}), which cannot be run here: this GPU is sm \
                 {capability}\n"
            ),
            None => {
                format!("built with {name} ({targets}), which cannot be run here: it needs a GPU\n")
            }
        }
    };
    families.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_built_and_cannot_be_run_here_says_so() {
        let both = [
            CompiledFamily {
                name: "sm90",
                targets: &["sm_90a"],
            },
            CompiledFamily {
                name: "sm100",
                targets: &["sm_100f"],
            },
        ];
        assert_eq!(
            built(&both, Some(Capability::new(9, 0))),
            "built with sm90 (sm_90a), which runs on this GPU\n\
             built with sm100 (sm_100f), which cannot be run here: this GPU is sm 9.0\n"
        );
        assert_eq!(
            built(&both[1..], None),
            "built with sm100 (sm_100f), which cannot be run here: it needs a GPU\n"
        );
        assert_eq!(built(&[], None), "");
    }
}
