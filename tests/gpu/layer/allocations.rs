//! Measures the cost of a layer call on the host: no allocation, and little time.

#[path = "../../../mla-runtime/tests/common/allocations.rs"]
mod counted;

use std::time::{Duration, Instant};

use mla_runtime::tensor::Memory;

use super::batch::Case;
use super::prepared;
use crate::common::gpu;

pub(crate) use counted::count;

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn a_call_allocates_nothing_and_takes_microseconds() {
    let gpu = &*gpu();
    for (name, heads, requests) in [
        ("32 decodes, 16 heads", 16, vec![(1, 1000); 32]),
        ("2 decodes, 128 heads", 128, vec![(1, 1000); 2]),
        (
            "decodes, a prefill and its context",
            16,
            vec![(1, 500), (1, 90), (100, 300)],
        ),
    ] {
        let case = Case::new(heads, &requests);
        let (batch, layer, mut workspace, mut engine) = prepared(gpu, &case);
        let mut call = || {
            engine
                .forward(&layer, &mut workspace, batch.tokens())
                .unwrap();
        };
        // The first call loads parts of cuBLAS and of the driver.
        call();
        gpu.synchronize().unwrap();
        let allocations = count(|| {
            for _ in 0..8 {
                call();
            }
        });
        assert_eq!(allocations, 0, "{name}");

        // The stream is emptied between runs, so that the time is that of enqueuing and not of
        // waiting. The best of many runs excludes the effects of other work on this machine, and of
        // a core that is slow to wake.
        let mut best = Duration::MAX;
        for _ in 0..400 {
            gpu.synchronize().unwrap();
            let start = Instant::now();
            for _ in 0..16 {
                call();
            }
            best = best.min(start.elapsed() / 16);
        }
        println!("{name}: {best:?} of host time per call");
        if workspace.absorbed_tokens() == workspace.tokens() {
            // On one machine, it varied from 12 to 18 µs.
            assert!(best <= Duration::from_micros(25), "{name}: {best:?}");
        }
    }
}
