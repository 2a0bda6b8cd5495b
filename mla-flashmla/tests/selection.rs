//! Selection without a GPU: the backend is found by name, fits where it should, and otherwise gives
//! reasons.

use mla_flashmla as _;
use mla_runtime::model::{DType, MlaDims};
use mla_runtime::select::{Registry, SelectionRequest, known};
use mla_runtime::spec::{Capability, Phase, Problem, QueryLen, Target};

const HOPPER: Target = Target::dry_run(Capability::new(9, 0));
const R1: Problem = Problem::new(MlaDims::R1, 16, DType::BF16).with_page_size(64);

/// Returns the reasons against the backend, if it is asked for by name.
fn reasons(target: Target, problem: Problem) -> Vec<String> {
    let request = SelectionRequest::new(target, problem).with_decode("FLASHMLA");
    let explanation = Registry::linked().unwrap().explain(&request).unwrap();
    let candidate = explanation.preferred(Phase::Decode).unwrap();
    let reasons = candidate.reasons.iter();
    reasons.map(|reason| reason.to_string()).collect()
}

#[cfg(not(feature = "sm90"))]
#[test]
fn without_its_feature_it_is_known_and_says_what_to_turn_on() {
    assert_eq!(
        reasons(HOPPER, R1),
        ["feature `sm90` of mla-flashmla is off; build with `--features sm90`"]
    );
}

#[cfg(feature = "sm90")]
#[test]
fn named_it_fits_on_a_hopper_for_each_number_of_heads_and_of_query_tokens() {
    for heads in [1, 16, 128, 200] {
        let problem = R1.with_heads(heads).with_query_len(QueryLen::Uniform);
        assert_eq!(reasons(HOPPER, problem), [""; 0], "{heads}");
    }
}

/// The backend has not run on a GPU yet.
#[cfg(feature = "sm90")]
#[test]
fn it_is_chosen_by_its_name_alone() {
    use mla_runtime::backend::DecodeBackend as _;
    let facts = mla_flashmla::FlashMla::KERNELS;
    assert!(!facts.has_run_for(Capability::new(9, 0)));
}

#[test]
fn what_it_does_not_take_is_refused_by_field() {
    for (problem, field) in [
        (R1.with_page_size(128), "page_size: given 128, accepted 64"),
        (R1.with_query_len(QueryLen::Ragged), "query_len"),
        (
            R1.with_kv_format(mla_runtime::model::KvFormat::Fp8),
            "kv_format",
        ),
        (R1.with_sparse(true), "sparse"),
    ] {
        let reasons = reasons(HOPPER, problem);
        assert!(
            reasons.iter().any(|reason| reason.starts_with(field)),
            "{field}: {reasons:?}"
        );
    }
    let ampere = reasons(Target::dry_run(Capability::new(8, 0)), R1);
    assert!(
        ampere[0].starts_with("capability: given 8.0, accepted 9.0"),
        "{ampere:?}"
    );
}

/// Its kernels do not wait for preceding ones, so it must not declare `dependent_launch`.
#[test]
fn fences_stand_around_its_calls() {
    let linked = Registry::linked().unwrap();
    let spec = linked.get(Phase::Decode, "FLASHMLA").unwrap().spec;
    assert!(!spec.dependent_launch);
}

/// mla-runtime knows the same constraints for programs that do not link this crate.
#[test]
fn the_known_spec_is_that_of_the_attribute() {
    let linked = Registry::linked().unwrap();
    let spec = linked.get(Phase::Decode, "FLASHMLA").unwrap().spec;
    assert_eq!(spec, known::FLASHMLA);
}
