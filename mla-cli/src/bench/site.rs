//! The place that rows are planned for.

use mla_runtime::select::Registry;

use crate::device::About;

/// The backends, the device, and what is known of it.
pub struct Site<'a, D> {
    pub registry: &'a Registry,
    pub device: &'a D,
    pub about: &'a About,
    pub graphs: bool,
}
