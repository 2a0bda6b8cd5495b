//! Regions of one buffer, handed out in the order in which they lie.

use std::ops::Range;

use crate::device::Device;

/// The rest of a buffer.
pub(crate) struct Arena<'a, D: Device> {
    rest: Option<D::BytesMut<'a>>,
    /// The start of `rest` in the buffer.
    at: usize,
}

impl<'a, D: Device> Arena<'a, D> {
    pub(crate) fn new(bytes: D::BytesMut<'a>) -> Self {
        Self {
            rest: Some(bytes),
            at: 0,
        }
    }

    /// The bytes of a region. Regions are taken in ascending order, empty ones at any time; one
    /// that breaks this order, or lies outside the buffer, fails as slicing does.
    pub(crate) fn take(&mut self, region: &Range<usize>) -> D::BytesMut<'a> {
        let rest = self
            .rest
            .take()
            .expect("put back by every call that took it");
        let start = if region.is_empty() {
            self.at
        } else {
            region.start
        };
        let (_, rest) = D::split_mut(rest, start - self.at);
        let (taken, rest) = D::split_mut(rest, region.len());
        self.at = start + region.len();
        self.rest = Some(rest);
        taken
    }
}
