//! The place that rows are planned for.

use mla_runtime::select::Registry;

use crate::device::About;

/// The backends, the device, and what is known of it.
pub(super) struct Site<'a, D> {
    pub(super) registry: &'a Registry,
    pub(super) device: &'a D,
    pub(super) about: &'a About,
    pub(super) graphs: bool,
}
