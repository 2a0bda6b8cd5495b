//! Ways in which a case is run.

use mla_runtime::model::DType;
use mla_runtime::spec::BackendSpec;

/// A way in which a case is run. If the device does not support a trial, such as graphs on a CPU,
/// the trial is skipped and gives no bits.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum Trial {
    /// One run without further conditions.
    #[default]
    Once,
    /// Two runs with one state, which must give the same bits.
    Repeated,
    /// A run between two overlapping kernels. The preceding kernel lets its dependents begin at its
    /// start and writes the queries late. The following kernel begins as early as it can, waits for
    /// the preceding kernel, and copies the results.
    LateQueries,
    /// The same, but with other late inputs: the rows of the cache, or the values.
    LateRows,
    /// A captured graph, which is replayed with the numbers of another seed. In decode, the
    /// requests' lengths are also in another order.
    Replayed,
    /// A run with guards around state and metadata. They must not allocate more than
    /// `workspace_bytes` says.
    Guarded,
    /// A run with a state and metadata for fewer requests, tokens and pages. It must be refused or
    /// be right, and must not write beyond them.
    BeyondLimits,
    /// All requests run together, then each one alone, then in this number of random batches of
    /// some of them. The batches are also captured and replayed. Each request must always have the
    /// bits that it has alone. The requests of a batch are random, and so are their order, padding,
    /// pages, the width of the block table and the maximum lengths that the call states. Each
    /// request has its own numbers.
    AmongOthers(u32),
    /// A run in which tensors' addresses and the distances between tokens and between cache rows
    /// are odd multiples of the spec's alignment.
    ExactlyAligned,
}

/// The placement of a case's tensors in memory.
#[derive(Clone, Copy, Default)]
pub(crate) struct Placement {
    /// Elements between one token's rows and the next.
    gap: usize,
    /// True if any distance between rows is allowed.
    is_apart: bool,
    /// Addresses and distances are odd multiples of this number of bytes. 0 means no such rule.
    alignment: usize,
    /// Cache rows lie at multiples of this number of bytes. 0 means no such rule.
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

    /// Returns the same placement without distances between rows.
    pub(crate) fn contiguous(self) -> Self {
        Self {
            is_apart: false,
            ..self
        }
    }

    /// Returns the bytes in front of a tensor with elements of `element` bytes.
    pub(crate) fn start(self, element: usize) -> usize {
        match self.alignment {
            0 => 0,
            alignment => alignment.max(element),
        }
    }

    /// Returns the elements from one token to the next, which have `row` elements each.
    pub(crate) fn stride(self, dtype: DType, row: usize) -> usize {
        match self.is_apart {
            true => self.row_bytes(dtype.bytes(), row * dtype.bytes()) / dtype.bytes() + self.gap,
            false => row,
        }
    }

    /// Returns the bytes from one row of `bytes` bytes to the next.
    pub(crate) fn row_bytes(self, element: usize, bytes: usize) -> usize {
        match self.start(element) {
            0 => bytes,
            unit => (bytes.div_ceil(unit) | 1) * unit,
        }
    }

    /// Returns the bytes from one cache row of `bytes` bytes to the next.
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
