//! Selection without a GPU: the backends are found by name, fit where they should, and otherwise
//! give reasons.

use mla_flashinfer as _;
use mla_runtime::model::{DType, MlaDims};
use mla_runtime::select::{Registry, SelectionRequest, known};
use mla_runtime::spec::{Capability, Phase, Problem, Target};

const HOPPER: Target = Target::dry_run(Capability::new(9, 0));

/// Returns the reasons against a backend that is asked for by name.
fn reasons(
    phase: Phase,
    name: &str,
    target: Target,
    change: impl Fn(&mut SelectionRequest),
) -> Vec<String> {
    let mut request = SelectionRequest::new(target, Problem::new(MlaDims::R1, 16, DType::BF16));
    match phase {
        Phase::Prefill => request.prefill = Some(name.to_owned()),
        Phase::Decode => request.decode = Some(name.to_owned()),
    }
    change(&mut request);
    let explanation = Registry::linked().unwrap().explain(&request).unwrap();
    let mut candidates = explanation.candidates(phase).iter();
    let candidate = candidates
        .find(|candidate| candidate.spec.name == name)
        .unwrap();
    candidate
        .reasons
        .iter()
        .map(|reason| reason.to_string())
        .collect()
}

/// Without a family, both backends are known, and say which feature to turn on.
#[cfg(not(feature = "gpu"))]
#[test]
fn without_a_family_both_are_known_and_say_what_to_turn_on() {
    for (phase, name) in [
        (Phase::Prefill, "FLASHINFER"),
        (Phase::Decode, "FLASHINFER_MLA"),
    ] {
        let reasons = reasons(phase, name, HOPPER, |_| {}).join("; ");
        assert!(reasons.contains("sm80"), "{name}: {reasons}");
    }
}

#[cfg(feature = "sm90")]
#[test]
fn named_both_fit_on_a_hopper() {
    for (phase, name) in [
        (Phase::Prefill, "FLASHINFER"),
        (Phase::Decode, "FLASHINFER_MLA"),
    ] {
        assert_eq!(reasons(phase, name, HOPPER, |_| {}), [""; 0], "{name}");
    }
}

#[cfg(feature = "sm80")]
#[test]
fn fa2_runs_on_every_gpu_since_ampere() {
    // A build may be told to compile the family for fewer GPUs.
    let whole = mla_flashinfer::compiled::SM80.contains(&"compute_80");
    let others: &[_] = if whole { &[(10, 0), (12, 0)] } else { &[] };
    for capability in [(8, 0), (8, 6), (8, 9)].iter().chain(others) {
        let target = Target::dry_run(Capability::new(capability.0, capability.1));
        for (phase, name) in [
            (Phase::Prefill, "FLASHINFER"),
            (Phase::Decode, "FLASHINFER_MLA"),
        ] {
            assert_eq!(
                reasons(phase, name, target, |_| {}),
                [""; 0],
                "{name} on {capability:?}"
            );
        }
    }
}

#[cfg(all(feature = "sm90", not(feature = "sm80")))]
#[test]
fn a_family_that_is_left_out_is_a_reason() {
    let ampere = Target::dry_run(Capability::new(8, 0));
    for (phase, name) in [
        (Phase::Prefill, "FLASHINFER"),
        (Phase::Decode, "FLASHINFER_MLA"),
    ] {
        let reasons = reasons(phase, name, ampere, |_| {}).join("; ");
        assert!(reasons.contains("--features sm80"), "{name}: {reasons}");
    }
}

#[cfg(feature = "gpu")]
#[test]
fn what_it_does_not_take_is_refused_by_field() {
    let refused = |field: &str, change: &dyn Fn(&mut SelectionRequest)| {
        let reasons = reasons(Phase::Decode, "FLASHINFER_MLA", HOPPER, change);
        assert!(
            reasons.iter().any(|reason| reason.starts_with(field)),
            "{field}: {reasons:?}"
        );
    };
    refused("kv_format", &|request| {
        request.problem.kv_format = mla_runtime::model::KvFormat::Fp8DsMla
    });
    refused("dtype", &|request| request.problem.dtype = DType::F32);
    refused("cache_dims", &|request| {
        request.problem.dims = MlaDims::new(256, MlaDims::R1.head);
    });
}

/// fa2 also passed its tests on a Hopper GPU, in a build without fa3.
#[cfg(feature = "fa")]
#[test]
fn a_run_counts_for_the_family_that_ran() {
    use mla_runtime::backend::DecodeBackend as _;
    let has_run = |major, minor| {
        mla_flashinfer::FlashInferMla::KERNELS.has_run_for(Capability::new(major, minor))
    };
    assert!(has_run(9, 0));
    let is_of_fa3 = cfg!(all(feature = "sm80", feature = "sm90"));
    assert_eq!(has_run(8, 0), !is_of_fa3);
}

/// mla-runtime knows the same constraints for programs that do not link this crate.
#[test]
fn the_known_specs_are_those_of_the_attributes() {
    let registry = Registry::linked().unwrap();
    for (phase, known) in [
        (Phase::Prefill, known::FLASHINFER),
        (Phase::Decode, known::FLASHINFER_MLA),
        (Phase::Decode, known::CUTLASS_MLA),
    ] {
        assert_eq!(registry.get(phase, known.name).unwrap().spec, known);
    }
}
