//! Reads a template on the first line and a range on each further line. Checks that they are
//! refused or expanded correctly.

#![no_main]

use libfuzzer_sys::fuzz_target;
use range::{MAX_SPECS, read_range};
use template::Template;

#[path = "../../mla-cli/src/batch.rs"]
mod batch;
#[path = "../../mla-cli/src/bench/settings/range.rs"]
mod range;
#[path = "../../mla-cli/src/bench/settings/template.rs"]
mod template;

fuzz_target!(|text: &str| {
    let mut lines = text.lines();
    let template = lines.next().unwrap_or_default().parse::<Template>();
    let ranges: Result<Vec<_>, _> = lines.map(read_range).collect();
    if let Ok(ranges) = &ranges {
        for range in ranges {
            assert!((1..=MAX_SPECS).contains(&range.len()));
        }
    }
    let (Ok(template), Ok(ranges)) = (template, ranges) else {
        return;
    };
    let combinations = ranges
        .iter()
        .try_fold(1usize, |n, range| n.checked_mul(range.len()));
    // Expanding many specs of many requests takes longer than a run should.
    if combinations.is_none_or(|count| count > 64) {
        return;
    }
    if let Ok(specs) = template.expand(&ranges) {
        assert_eq!(Some(specs.len()), combinations);
        for spec in specs {
            assert!(!spec.requests().is_empty());
        }
    }
});
