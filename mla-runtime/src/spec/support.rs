//! The terms in which a spec declares what a backend supports.

use crate::model::{DType, HeadDims, KvFormat, MAX_DIM, MlaDims};
use crate::spec::{CapabilityMatch, Target};
use crate::text::{self, Text, any, list, names};

names! {
    /// The computation that a backend does.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
    pub enum Phase {
        /// Expanded multi-head attention over keys and values.
        Prefill = "prefill",
        /// Absorbed multi-query attention over the paged cache.
        Decode = "decode",
    }
}

/// The latent (L) and rotary (R) widths of a cache row.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CacheDims {
    /// L.
    pub latent: u32,
    /// R.
    pub rope: u32,
}

impl CacheDims {
    /// The rows of DeepSeek's models: 512 + 64.
    pub const R1: Self = Self::new(512, 64);

    /// Dims with the widths (L, R), in this order.
    pub const fn new(latent: u32, rope: u32) -> Self {
        Self { latent, rope }
    }

    /// Returns true if a cache of this format can have such rows.
    pub(super) const fn fits(self, format: KvFormat) -> bool {
        let head = HeadDims {
            rope: self.rope,
            ..HeadDims::R1
        };
        format.holds(MlaDims::new(self.latent, head))
    }

    /// Returns true if a problem can have such rows.
    pub(super) const fn are_possible(self) -> bool {
        0 < self.latent && self.latent <= MAX_DIM && self.rope <= MAX_DIM
    }

    pub(crate) const fn write(self, text: &mut Text<'_>) {
        text.push("(");
        text.number(self.latent);
        text.push(",");
        text.number(self.rope);
        text.push(")");
    }
}

text::display!(CacheDims, HeadCounts, PageSizes);

/// The numbers of query heads that a backend takes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum HeadCounts {
    /// Any number from 1 up.
    Any,
    /// All numbers from the first to the second, both included.
    Range(u32, u32),
    /// Only the numbers of the list.
    List(&'static [u32]),
}

impl HeadCounts {
    /// Returns true if `heads` is one of the numbers.
    pub const fn accepts(self, heads: u32) -> bool {
        match self {
            Self::Any => heads > 0,
            Self::Range(min, max) => min <= heads && heads <= max,
            Self::List(counts) => any!(counts, |count| count == heads),
        }
    }

    pub(crate) const fn write(self, text: &mut Text<'_>) {
        match self {
            Self::Any => text.push("any"),
            Self::Range(min, max) => {
                text.number(min);
                text.push(" to ");
                text.number(max);
            }
            Self::List(counts) => list!(counts, text, |count| text.number(count)),
        }
    }
}

/// The page sizes that a backend takes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PageSizes {
    /// Any size from 1 up.
    Any,
    /// Every multiple of this number.
    MultipleOf(u32),
    /// Only the sizes of the list.
    List(&'static [u32]),
}

impl PageSizes {
    /// Returns true if a page of `size` tokens is supported.
    pub const fn accepts(self, size: u32) -> bool {
        match self {
            Self::Any => size > 0,
            Self::MultipleOf(unit) => size > 0 && size.is_multiple_of(unit),
            Self::List(sizes) => any!(sizes, |accepted| accepted == size),
        }
    }

    pub(crate) const fn write(self, text: &mut Text<'_>) {
        match self {
            Self::Any => text.push("any"),
            Self::MultipleOf(unit) => {
                text.push("multiples of ");
                text.number(unit);
            }
            Self::List(sizes) => list!(sizes, text, |size| text.number(size)),
        }
    }
}

names! {
    /// The variation of query lengths that is allowed within a decode batch. Each level includes
    /// the levels before it.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
    pub enum QueryLen {
        /// One token per request.
        Single = "single",
        /// The same number for every request.
        Uniform = "uniform",
        /// Any number for each request.
        Ragged = "ragged",
    }
}

names! {
    /// The batches that can be captured into a CUDA graph and replayed with other lengths. Each
    /// level includes the levels before it.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
    pub enum GraphSupport {
        /// No batch.
        Never = "never",
        /// Batches of one token per request.
        SingleToken = "single_token",
        /// Batches of equal query lengths.
        UniformBatch = "uniform_batch",
        /// Every batch.
        Always = "always",
    }
}

names! {
    /// The base of the log-sum-exp that a backend's kernel writes. A backend converts it itself, so
    /// the layer always gets the natural logarithm.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub enum LseOutput {
        /// The kernel writes no log-sum-exp.
        None = "none",
        /// Natural logarithm.
        Ln = "ln",
        /// Logarithm to the base 2.
        Log2 = "log2",
    }
}

names! {
    /// The precision of a backend's log-sum-exp.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub enum LsePrecision {
        /// The kernel sums its weights in f32.
        F32 = "f32",
        /// The kernel sums weights that it rounded to the dtype of queries and outputs.
        DType = "dtype",
    }
}

impl LsePrecision {
    /// Returns the maximum error that the rounding of weights adds to the log-sum-exp, besides the
    /// error of f32 itself. If each weight is wrong by a factor of 1 ± u, their sum is wrong by the
    /// same factor, and its logarithm is off by u. Here u is half the distance from 1 to the next
    /// number of `dtype`.
    pub const fn error(self, dtype: DType) -> f64 {
        match (self, dtype) {
            (Self::F32, _) | (Self::DType, DType::F32) => 0.0,
            (Self::DType, DType::F16) => 1.0 / 2048.0,
            (Self::DType, DType::BF16) => 1.0 / 256.0,
        }
    }
}

names! {
    /// The support of lists of slots by a decode backend.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub enum SparseSupport {
        /// The backend attends only to the whole context.
        Never = "never",
        /// The backend attends to the whole context or to lists of slots.
        Optional = "optional",
        /// The backend attends only to lists of slots.
        Required = "required",
    }
}

names! {
    /// The format in which a decode backend takes its queries.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub enum QueryFormat {
        /// The latent and the rotary part in separate tensors: `[T, H, L]` and `[T, H, R]`.
        Split = "split",
        /// One tensor `[T, H, L+R]`.
        Concatenated = "concatenated",
    }
}

names! {
    /// The layout in which a prefill backend takes its keys.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub enum KeyLayout {
        /// One tensor `[T, H, P+R]`. The layer repeats the rotary part for every head.
        Packed = "packed",
        /// Two tensors: each head's part `[T, H, P]`, and the rotary part `[T, 1, R]` that all
        /// heads share. Nothing needs to be packed.
        Split = "split",
    }
}

/// The order in which backends are tried: higher numbers first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Priority {
    /// The first entry whose set contains the capability decides.
    pub by_capability: &'static [(CapabilityMatch, i32)],
    /// The priority if no entry matches.
    pub otherwise: i32,
}

impl Priority {
    /// The same priority on all hardware.
    pub const fn everywhere(priority: i32) -> Self {
        Self {
            by_capability: &[],
            otherwise: priority,
        }
    }

    /// The priority on the target's hardware.
    pub const fn on(&self, target: Target) -> i32 {
        if let Some(capability) = target.capability {
            let mut i = 0;
            while i < self.by_capability.len() {
                let (set, priority) = self.by_capability[i];
                if set.accepts(capability) {
                    return priority;
                }
                i += 1;
            }
        }
        self.otherwise
    }
}
