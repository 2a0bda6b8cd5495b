//! Checks that a backend does what its spec says: it runs every correctness case and compares the
//! results with the f64 [`reference`](mod@reference).
//!
//! One line in a test file makes a test of each case, for any backend on any device:
//!
//! ```
//! mod conformance {
//!     use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
//!
//!     mla_conformance::decode_conformance!(CpuDecode, Cpu::new());
//!     // A second line needs a module of its own. An attribute before the type goes on every test,
//!     // for example `#[ignore = "needs a GPU: cargo test -- --include-ignored"]`.
//!     mod prefill {
//!         use super::*;
//!         mla_conformance::prefill_conformance!(#[cfg(not(miri))] CpuPrefill, Cpu::new());
//!     }
//! }
//! # fn main() {}
//! ```
//!
//! The cases try exactly what the [spec](mla_runtime::spec::BackendSpec) accepts: its dtypes, cache
//! formats, dimensions, numbers of heads, page sizes and query lengths. If a spec promises more
//! than the implementation keeps, a case fails, and the [`Failure`] says which key to narrow.
//! Memory that no result may depend on has misleading contents. Slots without a token and gaps
//! between rows hold NaN, and unused entries of the block table hold invalid pages. Outputs begin
//! as NaN, and the gaps between their rows must not be written. If a row attends to a NaN, its
//! output must be NaN, and the outputs of other rows must not.
//!
//! A [`Trial`] tests promises of a spec that are not about numbers, if the device supports the
//! test. There are trials with overlapping kernels, with graphs that are replayed with other
//! inputs, with guards around workspaces, and with tensors of exactly the required alignment.
//! `docs/new-backend.md` lists, for each key and each feature, the topic that fails if the promise
//! is broken.
//!
//! [`refusals()`] tests a device: its operations must refuse operands that do not fit, in errors
//! that name the operand.
//!
//! [`DecodeCase`] and [`PrefillCase`] are the cases' building blocks, for tests of your own.

mod cases;
mod data;
mod decode;
mod failure;
mod prefill;
pub mod reference;
mod refusals;
mod topic;
mod trial;
mod trials;

pub use cases::{decode, decode_entry, prefill, prefill_entry};
pub use data::{Bits, tolerance};
pub use decode::{DecodeCase, GroupScales};
pub use failure::{Failure, Promise};
pub use prefill::PrefillCase;
pub use refusals::refusals;
pub use topic::{DecodeTopic, PrefillTopic};
pub use trial::Trial;

/// Defines one test for the macros of topics.
#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_test {
    ([$(#[$attribute:meta])*] $test:ident, $outcome:expr) => {
        #[test]
        $(#[$attribute])*
        fn $test() {
            if let ::core::result::Result::Err(failure) = $outcome {
                ::core::panic!("{failure}");
            }
        }
    };
}
