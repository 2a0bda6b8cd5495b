//! The reasons why a backend does not fit. Each consists of a field, the given value, and the
//! accepted values.
//!
//! Reasons are plain data that constants can hold, so a selection works at compile time. Their
//! sentences come from `Display` at run time, and from the same functions at compile time.

use std::fmt;

use super::support::{CacheDims, HeadCounts, PageSizes};
use crate::Error;
use crate::model::{DType, HeadDims, KvFormat};
use crate::spec::{Capability, CapabilityMatch, Cause, Feature, FeatureSet};
use crate::text::{self, Text, list, names};

names! {
    /// The subject of a reason.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) enum Field {
        /// The kind of device.
        Platform = "platform",
        /// The compute capability.
        Capability = "capability",
        /// The dtype of queries and outputs.
        DType = "dtype",
        /// The per-head dimensions (P, R, V).
        Dims = "dims",
        /// The latent and rotary widths of a cache row.
        CacheDims = "cache_dims",
        /// The number of query heads.
        Heads = "heads",
        /// The format of the cache.
        KvFormat = "kv_format",
        /// The page size of the cache.
        PageSize = "page_size",
        /// The variation of query lengths within a batch.
        QueryLen = "query_len",
        /// CUDA graph capture.
        Graphs = "graphs",
        /// The log-sum-exp output.
        Lse = "lse",
        /// Writing a quantised output.
        QuantOutput = "quant_output",
        /// Attention to a list of slots.
        Sparse = "sparse",
        /// A feature beyond plain causal attention.
        Features = "features",
        /// The availability of the backend, if it cannot run at all.
        Availability = "availability",
    }
}

/// The value that the problem has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Given {
    /// A compute capability, or none if it is unknown.
    Capability(Option<Capability>),
    /// Per-head dimensions.
    Dims(HeadDims),
    /// The widths of a cache row.
    CacheDims(CacheDims),
    /// A number of heads or of tokens in a page.
    Count(u32),
    /// A cache format, and the width of the latent that its rows would have to hold.
    RowFormat(KvFormat, u32),
    /// A name, or a description of something that is wanted or not.
    Text(&'static str),
    /// The reason why the backend cannot run.
    Cause(Cause),
}

impl Given {
    const fn write(self, text: &mut Text<'_>) {
        match self {
            Self::Capability(Some(x)) => x.write(text),
            Self::Capability(None) => text.push("unknown"),
            Self::Dims(x) => x.write(text),
            Self::CacheDims(x) => x.write(text),
            Self::Count(x) => text.number(x),
            Self::RowFormat(format, latent) => {
                text.parts(&[format.name(), " for a latent of "]);
                text.number(latent);
            }
            Self::Text(x) => text.push(x),
            Self::Cause(x) => x.write(text),
        }
    }
}

text::display!(Given, Accepted, Reason, Reasons);

/// The values that the backend would have accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Accepted {
    /// Sets of capabilities.
    Capabilities(&'static [CapabilityMatch]),
    /// Dtypes.
    DTypes(&'static [DType]),
    /// Per-head dimensions.
    Dims(&'static [HeadDims]),
    /// Widths of a cache row.
    CacheDims(&'static [CacheDims]),
    /// Numbers of heads.
    Heads(HeadCounts),
    /// Cache formats.
    KvFormats(&'static [KvFormat]),
    /// The cache format of the dtype.
    KvFormat(KvFormat),
    /// Page sizes.
    PageSizes(PageSizes),
    /// Features.
    Features(FeatureSet),
    /// A name, or a description of something that is supported or not.
    Text(&'static str),
    /// The step that would make the backend run.
    Remedy(Cause),
}

impl Accepted {
    const fn write(self, text: &mut Text<'_>) {
        match self {
            Self::Capabilities(list) => list!(list, text, |x| x.write(text)),
            Self::DTypes(list) => list!(list, text, |x| text.push(x.name())),
            Self::Dims(list) => list!(list, text, |x| x.write(text)),
            Self::CacheDims(list) => list!(list, text, |x| x.write(text)),
            // A backend that takes any number refuses only 0.
            Self::Heads(HeadCounts::Any) | Self::PageSizes(PageSizes::Any) => text.push("1 and up"),
            Self::Heads(x) => x.write(text),
            Self::KvFormats(list) => list!(list, text, |x| text.push(x.name())),
            Self::KvFormat(x) => {
                text.parts(&[x.name(), " (the dtype's own), or a quantised format"]);
            }
            Self::PageSizes(x) => x.write(text),
            Self::Features(x) => x.write(text),
            Self::Text(x) => text.push(x),
            Self::Remedy(x) => x.write_remedy(text),
        }
    }
}

/// One reason against a backend: a field, the given value, and the accepted values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reason {
    pub(crate) field: Field,
    pub(crate) given: Given,
    pub(crate) accepted: Accepted,
}

impl Reason {
    /// The subject under its name in JSON: a field of the problem, `platform`, `capability`, or
    /// `availability` if the backend cannot run at all.
    pub const fn field(&self) -> &'static str {
        self.field.name()
    }

    /// The value that the problem has.
    pub fn given(&self) -> impl fmt::Display {
        self.given
    }

    /// The values that the backend would have accepted.
    pub fn accepted(&self) -> impl fmt::Display {
        self.accepted
    }

    /// The cause, if the backend cannot run at all.
    pub const fn cause(&self) -> Option<Cause> {
        match self.given {
            Given::Cause(cause) => Some(cause),
            _ => None,
        }
    }

    pub(crate) const fn write(self, text: &mut Text<'_>) {
        if let Given::Cause(cause) = self.given {
            cause.write(text);
            text.push("; ");
            return cause.write_remedy(text);
        }
        text.parts(&[self.field.name(), ": given "]);
        self.given.write(text);
        text.push(", accepted ");
        self.accepted.write(text);
    }
}

/// Converts the reason into an [`Error::Argument`].
impl From<Reason> for Error {
    fn from(reason: Reason) -> Self {
        Self::argument(reason.field.name(), reason.given, reason.accepted)
    }
}

/// All reasons against a backend; empty if the backend fits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Reasons {
    // Constants cannot grow a vector.
    items: [Option<Reason>; Self::CAPACITY],
    len: usize,
}

impl Reasons {
    /// Validation finds at most one reason for each field, except that each feature can have a
    /// reason.
    const CAPACITY: usize = Field::ALL.len() - 1 + Feature::ALL.len();

    /// No reason: the backend fits.
    pub const NONE: Self = Self {
        items: [None; Self::CAPACITY],
        len: 0,
    };

    /// The list with one more reason at its end.
    ///
    /// # Panics
    ///
    /// If the list already has a reason for every field and for every feature.
    #[must_use]
    pub const fn with(mut self, reason: Reason) -> Self {
        assert!(
            self.len < Self::CAPACITY,
            "reasons: given more than fields and features, accepted one for each"
        );
        self.items[self.len] = Some(reason);
        self.len += 1;
        self
    }

    /// The list with one more reason, unless `holds` is true.
    pub(crate) const fn unless(
        self,
        holds: bool,
        field: Field,
        given: Given,
        accepted: Accepted,
    ) -> Self {
        if holds {
            return self;
        }
        self.with(Reason {
            field,
            given,
            accepted,
        })
    }

    /// Returns true if there is no reason against the backend.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of reasons.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// The reason at `index`. Usable in constants.
    pub const fn get(&self, index: usize) -> Option<Reason> {
        if index < self.len {
            self.items[index]
        } else {
            None
        }
    }

    /// The reasons, in the order in which they were found.
    pub fn iter(&self) -> impl Iterator<Item = Reason> + '_ {
        self.items[..self.len].iter().filter_map(|reason| *reason)
    }

    pub(crate) const fn write(&self, text: &mut Text<'_>) {
        let mut i = 0;
        while let Some(reason) = self.get(i) {
            if i > 0 {
                text.push("; ");
            }
            reason.write(text);
            i += 1;
        }
    }
}

impl fmt::Debug for Reasons {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}
