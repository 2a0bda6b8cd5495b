//! Promises of a spec. A backend that breaks one must be found. A backend that keeps the promise,
//! or does not make it, must pass.

#[macro_use]
#[path = "../../../mla-runtime/tests/common/forward.rs"]
mod forward;

#[macro_use]
mod backend;

mod claims;
mod decode;
mod mistakes;
mod prefill;
mod simulated;

use mla_conformance::{DecodeTopic, PrefillTopic};

use backend::Wrong;

/// Checks that its topics find each wrong backend, by type and by name. The topic `plain` must pass
/// unless it is one of them.
fn check(wrong: &[Wrong], plain: &str) {
    let mut failed = Vec::new();
    let mut hold = |holds: bool, said: String| {
        if !holds {
            failed.push(said);
        }
    };
    for wrong in wrong {
        let name = wrong.name;
        let is_plain = wrong.topics.iter().any(|tried| tried.topic == plain);
        let [by_type, by_name] = wrong.plain.map(|run| run());
        hold(by_type.is_err() == is_plain, format!("{name}: {by_type:?}"));
        // No registry returns this one.
        let is_absent = name == "Absent";
        hold(
            by_name.is_err() == (is_plain || is_absent),
            format!("{name}: {by_name:?}"),
        );
        for tried in wrong.topics {
            let topic = tried.topic;
            let [by_type, by_name] = tried.wrong.map(|run| run());
            let said = by_type.err().unwrap_or_default();
            let says = wrong.says.iter().all(|words| said.contains(words));
            hold(says, format!("{name}: {topic}: {said}"));
            hold(by_name.is_err(), format!("{name}: {topic}: right by name"));
            for run in tried.kept {
                let outcome = run();
                hold(outcome.is_ok(), format!("{name}: {topic}: {outcome:?}"));
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn broken_promises_of_decode() {
    check(decode::WRONG, "single_tokens");
}

#[test]
fn broken_promises_of_prefill() {
    check(prefill::WRONG, "new_tokens");
}

/// The CPU does not support these topics, so the simulated device runs them. The CPU itself runs
/// the others.
#[test]
fn kept_promises() {
    for topic in [
        DecodeTopic::SingleTokens,
        DecodeTopic::BatchInvariance,
        DecodeTopic::DependentLaunch,
        DecodeTopic::Graphs,
        DecodeTopic::Workspace,
        DecodeTopic::Alignment,
    ] {
        let outcome = decode::by_type::<decode::Right>(topic);
        assert_eq!(outcome, Ok(()), "{topic:?}");
    }
    for topic in [
        PrefillTopic::NewTokens,
        PrefillTopic::BatchInvariance,
        PrefillTopic::DependentLaunch,
        PrefillTopic::Graphs,
        PrefillTopic::Workspace,
        PrefillTopic::Alignment,
    ] {
        let outcome = prefill::by_type::<prefill::Right>(topic);
        assert_eq!(outcome, Ok(()), "{topic:?}");
    }
}
