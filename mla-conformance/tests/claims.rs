//! Every key and feature of the attribute is in the guide's table of promises, with the topics that
//! fail if it is not kept.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use mla_conformance::{DecodeTopic, PrefillTopic};
use mla_runtime::spec::Feature;

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)).unwrap()
}

/// Returns the cells of a table's rows, below its head.
fn rows(text: &str) -> impl Iterator<Item = Vec<String>> {
    let rows = text.lines().filter(|line| line.starts_with("| "));
    rows.skip(1).map(|row| {
        let row = row.replace("\\|", "");
        let cells = row.trim_matches('|').split('|');
        cells.map(|cell| cell.trim().to_owned()).collect()
    })
}

/// Returns the names between backticks.
fn quoted(text: &str) -> impl Iterator<Item = String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned)
}

fn topics() -> BTreeSet<String> {
    let decode = DecodeTopic::ALL.iter().map(|topic| topic.name());
    let prefill = PrefillTopic::ALL.iter().map(|topic| topic.name());
    decode.chain(prefill).map(str::to_owned).collect()
}

#[test]
fn every_promise_has_a_topic_or_says_why_not() {
    let guide = read("docs/new-backend.md");
    let (_, promises) = guide.split_once("### Promises\n").unwrap();
    let (promises, _) = promises.split_once("\n## ").unwrap();
    let (mut keys, mut features, mut named) = (Vec::new(), Vec::new(), BTreeSet::new());
    for row in rows(promises) {
        let [subject, promise, held] = &row[..] else {
            panic!("{row:?} has not three cells");
        };
        assert!(!promise.is_empty(), "{subject}");
        match subject.strip_prefix("feature ") {
            Some(feature) => features.extend(quoted(feature)),
            None => keys.extend(quoted(subject)),
        }
        let of_row: Vec<String> = quoted(held).collect();
        match held.strip_prefix("none: ") {
            Some(why) => assert!(!why.is_empty(), "{subject}"),
            None => {
                assert!(!of_row.is_empty() || held.starts_with("all"), "{subject}");
                for topic in of_row {
                    assert!(topics().contains(&topic), "{subject}: no topic {topic}");
                    named.insert(topic);
                }
            }
        }
    }
    let table = read("mla-macros/keys.md");
    let known: Vec<String> = rows(&table)
        .flat_map(|row| quoted(&row[0]).next())
        .collect();
    assert_eq!(keys, known, "the keys of mla-macros/keys.md, in its order");
    let mut known: Vec<&str> = Feature::ALL.iter().map(|feature| feature.name()).collect();
    known.sort_unstable();
    features.sort_unstable();
    assert_eq!(features, known, "every feature once");
    assert_eq!(named, topics(), "every topic holds somebody to something");
}
