//! The keys that have an effect on some rows alone.

use std::fmt;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Key {
    Kv,
    Page,
    Prefill,
    Decode,
    Path,
    Threshold,
    QueryChunk,
    Rows,
    NumSplits,
}

impl Key {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kv => "kv",
            Self::Page => "page",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Path => "path",
            Self::Threshold => "threshold",
            Self::QueryChunk => "query_chunk",
            Self::Rows => "rows",
            Self::NumSplits => "num_splits",
        }
    }

    /// The condition under which it has an effect.
    pub const fn effective(self) -> &'static str {
        match self {
            Self::Kv | Self::Page => {
                "where something is read from the cache, which a fresh prefill does not"
            }
            Self::Prefill => "where a batch has requests on the expanded path",
            Self::Decode | Self::NumSplits => "where a batch has requests on the absorbed path",
            Self::Path | Self::Threshold => "where the layer is timed",
            Self::QueryChunk => {
                "where the layer is timed and a request on the absorbed path is longer"
            }
            Self::Rows => "where the layer is timed and a request on the expanded path has context",
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
