//! Ways in which a case is run.

use mla_runtime::model::DType;
use mla_runtime::spec::BackendSpec;

/// A way in which a case is run. A trial for which the device has no means, such as graphs on a
/// processor, is not run there, and gives no bits.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum Trial {
    /// Run once, without conditions.
    #[default]
    Once,
    /// Run twice with one state: with the same bits.
    Repeated,
    /// Run between two kernels: the one before lets its dependents begin at its start and writes
    /// the queries late; the one behind begins as early as it may, waits for the kernel before it,
    /// and copies the results.
    LateQueries,
    /// The same, but the late input is what queries attend to: the rows of the cache, or the
    /// values.
    LateRows,
    /// Run as a captured graph, which is replayed with the numbers of another seed and, of a
    /// decode, the requests' lengths in another order.
    Replayed,
    /// Run with a state and metadata between guards, which allocate no more than is said.
    Guarded,
    /// Run with a state and metadata for fewer requests, tokens and pages: refused, or right, and
    /// nothing written beyond them.
    BeyondLimits,
    /// Run with all requests, then each request alone, then this number of batches of some of them,
    /// and captured and replayed as well: each request has the bits that it has alone. The batches
    /// are random: their requests, the order, padding, pages, the width of the block table and the
    /// maximum lengths that the call states. Requests have numbers of their own.
    AmongOthers(u32),
    /// Run with tensors whose addresses, and distances between tokens and cache rows, are odd
    /// multiples of the spec's alignment.
    ExactlyAligned,
}

/// Placement of a case's tensors in memory.
#[derive(Clone, Copy, Default)]
pub(crate) struct Placement {
    /// Elements between one token's rows and the next.
    gap: usize,
    /// True if there may be any distance between them.
    is_apart: bool,
    /// Addresses and distances are odd multiples of this, in bytes; 0: no such rule.
    alignment: usize,
    /// Cache rows lie at multiples of this, in bytes; 0: no such rule.
    unit: usize,
}

impl Placement {
    pub(crate) fn new(trial: Trial, spec: &BackendSpec, gap: usize) -> Self {
        Self {
            gap,
            is_apart: true,
            alignment: match trial {
                Trial::ExactlyAligned => spec.alignment as usize,
                _ => 0,
            },
            unit: spec.alignment as usize,
        }
    }

    /// The same without distances between rows.
    pub(crate) fn contiguous(self) -> Self {
        Self {
            is_apart: false,
            ..self
        }
    }

    /// Bytes in front of a tensor of elements of `element` bytes.
    pub(crate) fn start(self, element: usize) -> usize {
        match self.alignment {
            0 => 0,
            alignment => alignment.max(element),
        }
    }

    /// The elements from one token to the next, of `row` elements each.
    pub(crate) fn stride(self, dtype: DType, row: usize) -> usize {
        match self.is_apart {
            true => self.row_bytes(dtype.bytes(), row * dtype.bytes()) / dtype.bytes() + self.gap,
            false => row,
        }
    }

    /// The bytes from one row of `bytes` to the next.
    pub(crate) fn row_bytes(self, element: usize, bytes: usize) -> usize {
        match self.start(element) {
            0 => bytes,
            unit => (bytes.div_ceil(unit) | 1) * unit,
        }
    }

    /// The bytes from one cache row of `bytes` to the next.
    pub(crate) fn cache_row_bytes(self, element: usize, bytes: usize) -> usize {
        self.row_bytes(element, bytes.next_multiple_of(self.unit.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_runtime::spec::{Phase, Platform};

    #[test]
    fn rows_exactly_aligned() {
        for (alignment, element, bytes, apart) in [
            (16, 2, 1152, 1168),
            (16, 1, 656, 656),
            (1, 2, 1024, 1026),
            (1, 4, 20, 20),
            (64, 2, 1024, 1088),
        ] {
            let spec =
                BackendSpec::new("ANY", Phase::Decode, Platform::Cpu).with_alignment(alignment);
            let exact = Placement::new(Trial::ExactlyAligned, &spec, 0);
            assert_eq!(exact.row_bytes(element, bytes), apart);
            assert_eq!(exact.start(element), element.max(alignment as usize));
            let plain = Placement::new(Trial::Once, &spec, 0);
            assert_eq!(
                [plain.row_bytes(element, bytes), plain.start(element)],
                [bytes, 0]
            );
        }
    }

    #[test]
    fn cache_rows_lie_as_a_spec_takes_them() {
        for (alignment, trial, apart) in [
            (1, Trial::Once, 644),
            (1, Trial::ExactlyAligned, 645),
            (16, Trial::Once, 656),
            (16, Trial::ExactlyAligned, 656),
        ] {
            let spec =
                BackendSpec::new("ANY", Phase::Decode, Platform::Cpu).with_alignment(alignment);
            let placement = Placement::new(trial, &spec, 0);
            assert_eq!(placement.cache_row_bytes(1, 644), apart);
        }
    }
}
