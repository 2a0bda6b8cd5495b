//! The arguments of a call of a decode backend.

use super::Output;
use super::slot_lists::SlotLists;
use crate::device::Device;
use crate::setters::options;
use crate::tensor::{ArrayRef, BlockTable, CacheRef, LseMut, TensorRef};

/// The queries of a call, in the [format](crate::spec::BackendSpec::query_format) that the backend
/// asks for.
pub enum Query<'a, D: Device> {
    /// `[T, H, L+R]`.
    Concatenated(TensorRef<'a, D>),
    /// The two parts.
    Split {
        /// `[T, H, L]`.
        latent: TensorRef<'a, D>,
        /// `[T, H, R]`.
        rope: TensorRef<'a, D>,
    },
}

/// The requests of a step that decode, whose lengths live on the device: what was captured into a
/// graph is replayed with other lengths in the same arrays.
#[non_exhaustive]
pub struct DecodeBatch<'a, D: Device> {
    /// The pages of each request: `[requests, max_pages]`.
    pub block_table: BlockTable<'a, D>,
    /// Tokens of each request in the cache, its query tokens included: `[requests]`. A length of 0
    /// is a request that attends to nothing.
    pub seq_lens: ArrayRef<'a, D, i32>,
    /// The start of each request's query tokens, and the end of the last: `[requests + 1]`. Query
    /// token `i` of `n` of a request with `len` tokens sees rows `0 .. len − n + i + 1`.
    pub query_starts: ArrayRef<'a, D, i32>,
    /// The max number of query tokens of one request.
    pub max_query_len: usize,
    /// The max number of tokens of one request that the step may hold. Backends may choose a kernel
    /// by it: the nearer it is to what the requests have, the better.
    pub max_seq_len: usize,
    /// True if query tokens see their request up to themselves, as above. If not, each sees all of
    /// it, which takes a backend with [`NonCausal`](crate::spec::Feature::NonCausal).
    pub causal: bool,
    /// The lengths as the host knows them, for backends that plan there. `None`: they are on the
    /// device alone. A step that is replayed from a graph is prepared anew with its own.
    pub host: Option<HostLens<'a>>,
}

/// The lengths of a batch's requests, or of a chunk's, in the host's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HostLens<'a> {
    /// The query tokens of each request.
    pub query_lens: &'a [u32],
    /// The tokens of each request that are attended to: in a decode all that it has in the cache,
    /// its query tokens included, in a chunk those of the chunk.
    pub seq_lens: &'a [u32],
}

impl<'a> HostLens<'a> {
    /// The query tokens of each request, and the tokens that they attend to.
    pub const fn new(query_lens: &'a [u32], seq_lens: &'a [u32]) -> Self {
        Self {
            query_lens,
            seq_lens,
        }
    }
}

impl<'a, D: Device> DecodeBatch<'a, D> {
    /// Requests by their pages, lengths and query tokens on the device; the host's lengths are not
    /// known.
    pub fn new(
        block_table: BlockTable<'a, D>,
        (seq_lens, max_seq_len): (ArrayRef<'a, D, i32>, usize),
        (query_starts, max_query_len): (ArrayRef<'a, D, i32>, usize),
    ) -> Self {
        Self {
            block_table,
            seq_lens,
            query_starts,
            max_query_len,
            max_seq_len,
            causal: true,
            host: None,
        }
    }

    /// Sets whether query tokens see their request only up to themselves, or all of it.
    #[must_use]
    pub fn with_causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Adds the host's copy of the lengths.
    #[must_use]
    pub fn with_host(mut self, host: HostLens<'a>) -> Self {
        self.host = Some(host);
        self
    }
}

impl<D: Device> Clone for DecodeBatch<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Device> Copy for DecodeBatch<'_, D> {}

/// One attention of a prepared batch to the cache.
#[non_exhaustive]
pub struct DecodeCall<'a, D: Device> {
    /// The queries, in the format that the spec asks for.
    pub query: Query<'a, D>,
    /// The cache.
    pub cache: CacheRef<'a, D>,
    /// The requests.
    pub batch: DecodeBatch<'a, D>,
    /// `[T, H, L]`.
    pub out: Output<'a, D>,
    /// `[H, T]`; absent if the caller does not need it.
    pub lse: Option<LseMut<'a, D>>,
    /// Present if the problem is sparse, and only there.
    pub slots: Option<SlotLists<'a, D>>,
    /// A score for each head, `[H]`, that takes part in the softmax without a value: a head's
    /// output is multiplied by `1 / (1 + e^(sink − lse))`, as in FlashMLA's `attn_sink`. It is in
    /// the scores' own units, behind the softmax scale: −∞ changes nothing, +∞ makes the output 0.
    /// The log-sum-exp leaves it out. It takes a backend with
    /// [`Sinks`](crate::spec::Feature::Sinks).
    pub sinks: Option<ArrayRef<'a, D, f32>>,
    /// A factor on the softmax scale for each query token, `[T]`, finite and above 0: present if
    /// the problem has [`QueryScales`](crate::spec::Feature::QueryScales), and only there.
    pub query_scales: Option<ArrayRef<'a, D, f32>>,
}

impl<'a, D: Device> DecodeCall<'a, D> {
    /// Attention to whole contexts, without a log-sum-exp.
    pub fn new(
        query: Query<'a, D>,
        cache: CacheRef<'a, D>,
        batch: DecodeBatch<'a, D>,
        out: Output<'a, D>,
    ) -> Self {
        Self {
            query,
            cache,
            batch,
            out,
            lse: None,
            slots: None,
            sinks: None,
            query_scales: None,
        }
    }

    options! {
        with_lse(lse: LseMut<'a, D>);
        with_slots(slots: SlotLists<'a, D>);
        with_sinks(sinks: ArrayRef<'a, D, f32>);
        with_query_scales(query_scales: ArrayRef<'a, D, f32>);
    }
}
