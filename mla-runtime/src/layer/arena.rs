//! Regions of one buffer, taken in the order of their offsets.

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

    /// Takes the bytes of a region. Regions are taken in ascending order; empty ones can be taken
    /// at any time. A region out of order or outside the buffer panics, as slicing does.
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
