//! The lengths of one request in a batch.

use serde::Serialize;

/// One request of a batch: the number of its new tokens, and of all tokens that they attend to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[non_exhaustive]
pub struct Request {
    /// The query length: the number of new tokens.
    pub q: u32,
    /// The kv length: the cached context and the new tokens.
    pub kv: u32,
}

impl Request {
    /// A request of `kv` tokens, the last `q` of them new. A `kv` of 0 makes it padding.
    pub const fn new(q: u32, kv: u32) -> Self {
        Self { q, kv }
    }

    /// Returns true if the request only pads the batch: it has no tokens in the cache. Its new
    /// tokens, if it has any, attend to nothing.
    pub const fn is_padding(self) -> bool {
        self.kv == 0
    }

    /// The cached tokens: kv − q.
    pub const fn context_len(self) -> u32 {
        self.kv.saturating_sub(self.q)
    }
}
