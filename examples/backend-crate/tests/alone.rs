//! Tests of the crate with only the device beside it: its backend is found, and is selected on GPUs
//! that its kernels are compiled for.

use backend_crate::Naive;
use mla_runtime::backend::DecodeBackend;
use mla_runtime::model::{DType, MlaDims};
use mla_runtime::select::{Registry, SelectionRequest};
use mla_runtime::spec::{Capability, Phase, Problem, Target};

fn why(target: Target) -> String {
    let registry = Registry::linked().unwrap();
    let explanation = registry
        .explain(&SelectionRequest::new(
            target,
            Problem::new(MlaDims::R1, 256, DType::BF16),
        ))
        .unwrap();
    let candidates = explanation.candidates(Phase::Decode).iter();
    let mut found = candidates.filter(|candidate| candidate.spec == Naive::SPEC);
    found.next().unwrap().reasons.iter().map(|reason| reason.to_string()).collect()
}

#[test]
fn it_is_selected_where_it_is_compiled_for() {
    assert_eq!(Naive::SPEC.provider, "backend-crate");
    assert_eq!(why(Target::dry_run(Capability::new(9, 0))), "");
    let blackwell = why(Target::dry_run(Capability::new(10, 3)));
    if cfg!(feature = "sm100") {
        assert_eq!(blackwell, "");
    } else {
        assert_eq!(blackwell, "compiled for: sm_90a; build with `--features sm100`");
    }
}

#[test]
#[cfg(not(feature = "built-in"))]
fn the_built_in_backends_say_which_feature_they_want() {
    let registry = Registry::linked().unwrap();
    let wgmma_mla = registry.get(Phase::Decode, "WGMMA_MLA").unwrap();
    assert!(!wgmma_mla.is_implemented());
    let missing = wgmma_mla.availability_on(Target::dry_run(Capability::new(9, 0)), true);
    let cause = mla_runtime::spec::Cause::FeatureOff {
        package: "mla-kernels",
        feature: "sm90",
    };
    assert_eq!(missing, Err(cause));
}

#[test]
#[cfg(not(feature = "built-in"))]
fn an_operation_of_the_device_that_needs_a_kernel_says_so() {
    // SAFETY: without kernels the function reads nothing. The status is its own.
    let loaded = unsafe { mla_kernels::raw::check("load", mla_kernels::raw::mla_load_helpers()) };
    let error = loaded.unwrap_err().to_string();
    assert_eq!(
        error,
        "kernels: given none, accepted those of a family: build with its feature, such as `sm90`"
    );
}
