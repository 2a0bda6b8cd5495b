//! Checks that the guide's table of promises has every key and feature of the attribute. Each row
//! names the topics that fail if the promise is broken. Each topic has to find a wrong backend.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use mla_conformance::{DecodeTopic, PrefillTopic};
use mla_runtime::spec::Feature;

use crate::backend::Wrong;
use crate::{decode, prefill};

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)).unwrap()
}

/// A phase with its topics, its wrong backends, and the rows that it cannot break, with the
/// reasons.
struct Phase {
    topics: Vec<&'static str>,
    wrong: &'static [Wrong],
    none: &'static [(&'static str, &'static [&'static str])],
}

/// Rows about the cache.
const OF_CACHE: &[&str] = &[
    "cache_dims",
    "kv",
    "page_sizes",
    "sparse",
    "max_list_width",
    "feature dense_requests",
    "feature second_cache",
    "feature split_cache",
];

fn phases() -> [Phase; 2] {
    let decode = Phase {
        topics: DecodeTopic::ALL.iter().map(|topic| topic.name()).collect(),
        wrong: decode::WRONG,
        none: &[("it reads rows of a cache", &["key_layout"])],
    };
    let prefill = Phase {
        topics: PrefillTopic::ALL.iter().map(|topic| topic.name()).collect(),
        wrong: prefill::WRONG,
        none: &[
            ("it reads no cache", OF_CACHE),
            ("its queries have no latent part", &["query_format"]),
            (
                "it takes requests of all lengths",
                &["query_len", "max_query_len"],
            ),
            ("it is always given the host's lengths", &["plans_on_host"]),
            ("sinks come when its results are merged", &["feature sinks"]),
        ],
    };
    [decode, prefill]
}

/// Checks that each topic of a row finds a wrong backend of the phase, if it can break the row.
fn assert_found(phase: &Phase, row: &str, topics: &[String]) {
    let breaks: Vec<&str> = phase
        .wrong
        .iter()
        .filter(|wrong| wrong.rows.contains(&row))
        .flat_map(|wrong| wrong.topics.iter().map(|tried| tried.topic))
        .collect();
    let cannot = phase.none.iter().any(|(_, rows)| rows.contains(&row));
    assert_eq!(
        breaks.is_empty(),
        cannot,
        "{row}: a wrong backend, or why there is none"
    );
    for topic in topics {
        let is_tried = phase.topics.contains(&topic.as_str()) && !cannot;
        assert!(
            !is_tried || breaks.contains(&topic.as_str()),
            "{row}: none found by {topic}"
        );
    }
}

/// Returns the cells of a table's rows, without its header.
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

#[test]
fn promises_have_topics_and_breakers() {
    let guide = read("docs/new-backend.md");
    let (_, promises) = guide.split_once("### Promises\n").unwrap();
    let (promises, _) = promises.split_once("\n## ").unwrap();
    let phases = phases();
    let topics = phases.iter().flat_map(|phase| phase.topics.clone());
    let topics: BTreeSet<String> = topics.map(str::to_owned).collect();
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
                for topic in &of_row {
                    assert!(topics.contains(topic), "{subject}: no topic {topic}");
                }
                if !of_row.is_empty() {
                    let row = subject.replace('`', "");
                    phases
                        .iter()
                        .for_each(|phase| assert_found(phase, &row, &of_row));
                }
                named.extend(of_row);
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
    assert_eq!(named, topics, "every topic holds somebody to something");
}
