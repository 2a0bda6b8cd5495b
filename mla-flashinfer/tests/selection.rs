//! Selection without a GPU: the backends are found by name, fit where they should, and otherwise
//! give reasons.

use mla_flashinfer as _;
#[cfg(feature = "gpu")]
use mla_runtime::model::KvFormat;
use mla_runtime::model::{DType, MlaDims};
use mla_runtime::select::{Registry, SelectionRequest, known};
use mla_runtime::spec::{Capability, Phase, Problem, Target};

#[cfg(feature = "gpu")]
const HOPPER: Target = Target::dry_run(Capability::new(9, 0));
const R1: Problem = Problem::new(MlaDims::R1, 16, DType::BF16);
#[cfg(any(not(feature = "gpu"), feature = "fa"))]
const BOTH: [(Phase, &str); 2] = [
    (Phase::Prefill, "FLASHINFER"),
    (Phase::Decode, "FLASHINFER_MLA"),
];

/// Returns the reasons against a backend that is asked for by name.
fn reasons(phase: Phase, name: &str, target: Target, problem: Problem) -> Vec<String> {
    let request = SelectionRequest::new(target, problem);
    let request = match phase {
        Phase::Prefill => request.with_prefill(name),
        Phase::Decode => request.with_decode(name),
    };
    let explanation = Registry::linked().unwrap().explain(&request).unwrap();
    let reasons = explanation.preferred(phase).unwrap().reasons.iter();
    reasons.map(|reason| reason.to_string()).collect()
}

/// Checks that both backends fit a GPU, or otherwise give a reason that names `missing`.
#[cfg(any(not(feature = "gpu"), feature = "fa"))]
fn check_both((major, minor): (u8, u8), missing: Option<&str>) {
    for (phase, name) in BOTH {
        let target = Target::dry_run(Capability::new(major, minor));
        let reasons = reasons(phase, name, target, R1).join("; ");
        let fits = missing.map_or(reasons.is_empty(), |feature| reasons.contains(feature));
        assert!(fits, "{name} on {major}.{minor}: {reasons}");
    }
}

/// Without a family, both backends are known, and say which feature to turn on.
#[cfg(not(feature = "gpu"))]
#[test]
fn without_a_family_both_are_known_and_say_what_to_turn_on() {
    check_both((9, 0), Some("sm80"));
}

#[cfg(feature = "sm90")]
#[test]
fn named_both_fit_on_a_hopper() {
    check_both((9, 0), None);
}

#[cfg(feature = "sm80")]
#[test]
fn fa2_runs_on_every_gpu_since_ampere() {
    // A build may be told to compile the family for fewer GPUs.
    let whole = mla_flashinfer::compiled::SM80.contains(&"compute_80");
    let others: &[_] = if whole { &[(10, 0), (12, 0)] } else { &[] };
    for capability in [(8, 0), (8, 6), (8, 9)].iter().chain(others) {
        check_both(*capability, None);
    }
}

#[cfg(all(feature = "sm90", not(feature = "sm80")))]
#[test]
fn a_family_that_is_left_out_is_a_reason() {
    check_both((8, 0), Some("--features sm80"));
}

#[cfg(feature = "gpu")]
#[test]
fn what_it_does_not_take_is_refused_by_field() {
    let narrow = MlaDims::new(256, MlaDims::R1.head);
    for (field, problem) in [
        ("kv_format", R1.with_kv_format(KvFormat::Fp8DsMla)),
        ("dtype", Problem::new(MlaDims::R1, 16, DType::F32)),
        ("cache_dims", Problem::new(narrow, 16, DType::BF16)),
    ] {
        let reasons = reasons(Phase::Decode, "FLASHINFER_MLA", HOPPER, problem);
        assert!(
            reasons.iter().any(|reason| reason.starts_with(field)),
            "{field}: {reasons:?}"
        );
    }
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
