//! Checks that a backend does what its spec says: every correctness case, against the f64
//! [`reference`](mod@reference).
//!
//! One line in a test file makes a test of each case, for any backend on any device:
//!
//! ```
//! mod conformance {
//!     use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
//!
//!     mla_conformance::decode_conformance!(CpuDecode, Cpu::new());
//!     // A second one stands in a module of its own, and what stands before the type goes on every
//!     // test: `#[ignore = "needs a GPU: cargo test -- --include-ignored"]`, for example.
//!     mod prefill {
//!         use super::*;
//!         mla_conformance::prefill_conformance!(#[cfg(not(miri))] CpuPrefill, Cpu::new());
//!     }
//! }
//! # fn main() {}
//! ```
//!
//! A case tries what the [spec](mla_runtime::spec::BackendSpec) accepts and nothing else: its
//! dtypes, cache formats, dimensions, numbers of heads, page sizes and query lengths. A spec that
//! promises more than the implementation keeps is therefore found, and the [`Failure`] says which
//! key to narrow. Memory that no result may depend on is hostile: NaN in every slot without a token
//! and between rows, nonsense in unused entries of the block table, and outputs that begin as NaN
//! and may not be touched beside their rows. A NaN in what a row attends to is NaN in its output,
//! and in no other row's.
//!
//! Promises of a spec beside numbers are tried by a [`Trial`], as far as the device has the means:
//! kernels that overlap, graphs that are replayed with other inputs, guards around workspaces, and
//! tensors that are no better aligned than is asked for. `docs/new-backend.md` says of each key and
//! each feature which topic fails if it is not kept.
//!
//! [`refusals()`] is for a device: its operations refuse what does not fit, by the operand's name.
//!
//! [`DecodeCase`] and [`PrefillCase`] are the cases' building blocks, for tests of one's own.

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

/// Defines one test of the macros of topics.
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
