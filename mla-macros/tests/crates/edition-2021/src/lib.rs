//! The tests of this crate are those of mla-runtime, compiled under the 2021 edition.
