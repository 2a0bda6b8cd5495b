//! A request of a batch, by its lengths.

use serde::Serialize;

/// One request of a batch: its new tokens, and all tokens it attends to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[non_exhaustive]
pub struct Request {
    /// The query length: how many tokens are new.
    pub q: u32,
    /// The kv length: the cached context and the new tokens.
    pub kv: u32,
}

impl Request {
    /// A request of `q` new tokens, the last of `kv` tokens in all. A kv of 0 makes padding of it.
    pub const fn new(q: u32, kv: u32) -> Self {
        Self { q, kv }
    }

    /// Returns true if it only fills a batch up: it has no tokens in the cache, and its new ones,
    /// if there are any, attend to nothing.
    pub const fn is_padding(self) -> bool {
        self.kv == 0
    }

    /// The cached tokens: kv − q.
    pub const fn context_len(self) -> u32 {
        self.kv.saturating_sub(self.q)
    }
}
