//! Selection without a GPU: the backend is found by name, fits where it should, and gives an absent
//! library as a reason.

use mla_cudnn::library;
use mla_runtime::model::{DType, MlaDims};
use mla_runtime::select::{Registry, SelectionRequest, known};
use mla_runtime::spec::{Capability, Cause, Phase, Problem, Target};

fn reasons(target: Target) -> Vec<String> {
    let problem = Problem::new(MlaDims::R1, 16, DType::BF16);
    let request = SelectionRequest::new(target, problem).with_prefill("CUDNN");
    let explanation = Registry::linked().unwrap().explain(&request).unwrap();
    let reasons = explanation
        .preferred(Phase::Prefill)
        .unwrap()
        .reasons
        .iter();
    reasons.map(|reason| reason.to_string()).collect()
}

#[test]
fn it_is_found_and_its_declaration_is_what_decides_for_another_machine() {
    for (major, minor) in [(8, 0), (9, 0), (10, 0), (12, 0)] {
        let reasons = reasons(Target::dry_run(Capability::new(major, minor)));
        if cfg!(feature = "cudnn") {
            assert_eq!(reasons, [""; 0], "sm {major}.{minor}");
        } else {
            assert!(reasons.join("; ").contains("`cudnn`"), "{reasons:?}");
        }
    }
}

#[test]
fn a_library_that_is_not_there_is_a_cause() {
    match library() {
        Ok(version) => assert_eq!(version[0], 9),
        Err(Cause::LibraryMissing(name)) => assert_eq!(name, "libcudnn.so.9"),
        Err(cause @ Cause::FeatureOff { .. }) if cfg!(not(feature = "cudnn")) => {
            assert_eq!(cause.to_string(), "feature `cudnn` of mla-cudnn is off");
        }
        Err(other) => assert!(matches!(other, Cause::LibraryVersion { .. }), "{other}"),
    }
}

/// mla-runtime knows the same constraints for programs that do not link this crate.
#[test]
fn the_known_specs_are_those_of_the_attributes() {
    let registry = Registry::linked().unwrap();
    let linked = registry.get(Phase::Prefill, "CUDNN").unwrap();
    assert_eq!(linked.spec, known::CUDNN);
}
