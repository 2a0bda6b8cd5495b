//! The reasons why a backend does not fit. Each consists of a field, the given value, and the
//! accepted values.
//!
//! Reasons are plain data that constants can hold, so a selection works at compile time. Their
//! sentences come from `Display` at run time, and from the same functions at compile time.

use std::fmt;

use super::support::{CacheDims, GraphSupport, HeadCounts, PageSizes, QueryLen};
use crate::Error;
use crate::model::{DType, HeadDims, KvFormat};
use crate::spec::{Capability, CapabilityMatch, Cause, Feature, FeatureSet, Platform};
use crate::text::{self, Text};

/// The subject of a reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Field {
    /// The kind of device.
    Platform,
    /// The compute capability.
    Capability,
    /// The dtype of queries and outputs.
    DType,
    /// The per-head dimensions (P, R, V).
    Dims,
    /// The latent and rotary widths of a cache row.
    CacheDims,
    /// The number of query heads.
    Heads,
    /// The format of the cache.
    KvFormat,
    /// The page size of the cache.
    PageSize,
    /// The variation of query lengths within a batch.
    QueryLen,
    /// CUDA graph capture.
    Graphs,
    /// The log-sum-exp output.
    Lse,
    /// Writing a quantised output.
    QuantOutput,
    /// Attention to a list of slots.
    Sparse,
    /// A feature beyond plain causal attention.
    Features,
    /// The availability of the backend, if it cannot run at all.
    Availability,
}

impl Field {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Platform => "platform",
            Self::Capability => "capability",
            Self::DType => "dtype",
            Self::Dims => "dims",
            Self::CacheDims => "cache_dims",
            Self::Heads => "heads",
            Self::KvFormat => "kv_format",
            Self::PageSize => "page_size",
            Self::QueryLen => "query_len",
            Self::Graphs => "graphs",
            Self::Lse => "lse",
            Self::QuantOutput => "quant_output",
            Self::Sparse => "sparse",
            Self::Features => "features",
            Self::Availability => "availability",
        }
    }
}

/// The value that the problem has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Given {
    /// A kind of device.
    Platform(Platform),
    /// A compute capability, or none if it is unknown.
    Capability(Option<Capability>),
    /// A dtype.
    DType(DType),
    /// Per-head dimensions.
    Dims(HeadDims),
    /// The widths of a cache row.
    CacheDims(CacheDims),
    /// A number of heads or of tokens in a page.
    Count(u32),
    /// A cache format.
    KvFormat(KvFormat),
    /// A cache format, and the width of the latent that its rows would have to hold.
    RowFormat(KvFormat, u32),
    /// A kind of query lengths.
    QueryLen(QueryLen),
    /// A level of graph support.
    Graphs(GraphSupport),
    /// A feature.
    Feature(Feature),
    /// A description of something that is wanted or not.
    Text(&'static str),
    /// The reason why the backend cannot run.
    Cause(Cause),
}

impl Given {
    const fn write(self, text: &mut Text<'_>) {
        match self {
            Self::Platform(x) => text.push(x.name()),
            Self::Capability(Some(x)) => x.write(text),
            Self::Capability(None) => text.push("unknown"),
            Self::DType(x) => text.push(x.name()),
            Self::Dims(x) => x.write(text),
            Self::CacheDims(x) => x.write(text),
            Self::Count(x) => text.number(x),
            Self::KvFormat(x) => text.push(x.name()),
            Self::RowFormat(format, latent) => {
                text.push(format.name());
                text.push(" for a latent of ");
                text.number(latent);
            }
            Self::QueryLen(x) => text.push(x.name()),
            Self::Graphs(x) => text.push(x.name()),
            Self::Feature(x) => text.push(x.name()),
            Self::Text(x) => text.push(x),
            Self::Cause(x) => x.write(text),
        }
    }
}

text::display!(Given, Accepted, Reason, Reasons);

/// The values that the backend would have accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Accepted {
    /// A kind of device.
    Platform(Platform),
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
    /// The maximum variation of query lengths.
    QueryLen(QueryLen),
    /// The maximum support of graphs.
    Graphs(GraphSupport),
    /// Features.
    Features(FeatureSet),
    /// A description of something that is supported or not.
    Text(&'static str),
    /// The step that would make the backend run.
    Remedy(Cause),
}

// Writes the items of a slice with commas between them; an expression writes one item. This is a
// macro because constants cannot yet call a function that is a parameter.
macro_rules! write_list {
    ($list:ident, $text:ident, |$item:ident| $write:expr) => {{
        let mut i = 0;
        while i < $list.len() {
            let $item = $list[i];
            $text.comma(i);
            $write;
            i += 1;
        }
        if $list.is_empty() {
            $text.push("none");
        }
    }};
}

impl Accepted {
    const fn write(self, text: &mut Text<'_>) {
        match self {
            Self::Platform(x) => text.push(x.name()),
            Self::Capabilities(list) => write_list!(list, text, |x| x.write(text)),
            Self::DTypes(list) => write_list!(list, text, |x| text.push(x.name())),
            Self::Dims(list) => write_list!(list, text, |x| x.write(text)),
            Self::CacheDims(list) => write_list!(list, text, |x| x.write(text)),
            // A backend that takes any number refuses only 0.
            Self::Heads(HeadCounts::Any) | Self::PageSizes(PageSizes::Any) => text.push("1 and up"),
            Self::Heads(x) => x.write(text),
            Self::KvFormats(list) => write_list!(list, text, |x| text.push(x.name())),
            Self::KvFormat(x) => {
                text.push(x.name());
                text.push(" (the dtype's own), or a quantised format");
            }
            Self::PageSizes(x) => x.write(text),
            Self::QueryLen(x) => text.push(x.name()),
            Self::Graphs(x) => text.push(x.name()),
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
        text.push(self.field.name());
        text.push(": given ");
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
    const CAPACITY: usize = Field::Availability as usize + Feature::ALL.len();

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
}

impl fmt::Debug for Reasons {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl Reasons {
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
