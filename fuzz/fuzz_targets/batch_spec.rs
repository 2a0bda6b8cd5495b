//! Checks that a text is refused as a batch spec with a place in it, or is read correctly.

#![no_main]

use batch::{BatchSpec, MAX_REQUESTS, RequestKind};
use libfuzzer_sys::fuzz_target;

#[path = "../../mla-cli/src/batch.rs"]
mod batch;

fuzz_target!(|text: &str| {
    match text.parse::<BatchSpec>() {
        Ok(spec) => {
            let requests = spec.requests();
            assert!((1..=MAX_REQUESTS).contains(&requests.len()));
            assert!(requests.iter().all(|r| 1 <= r.q && r.q <= r.kv));
            // A few words can stand for a million requests. Most runs should not take that long.
            if requests.len() > 4096 {
                return;
            }
            assert_eq!(spec.to_string().parse(), Ok(spec.clone()));
            let kinds = RequestKind::ALL.map(|kind| spec.count(kind));
            assert_eq!(kinds.iter().sum::<usize>(), requests.len());
            assert!(!spec.label().is_empty());
        }
        Err(error) => {
            assert!(error.offset <= text.len());
            assert!(text.is_char_boundary(error.offset));
            assert!(error.to_string().len() < 500);
        }
    }
});
