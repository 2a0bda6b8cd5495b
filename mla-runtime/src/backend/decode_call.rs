//! The arguments of a call of a decode backend.

use super::Output;
use super::slot_lists::SlotLists;
use crate::device::Device;
use crate::setters::{copies, options, setters};
use crate::tensor::{ArrayRef, BlockTable, CacheRef, LseMut, TensorRef};

/// The queries of a call, in the [format](crate::spec::BackendSpec::query_format) that the backend
/// declares.
pub enum Query<'a, D: Device> {
    /// `[T, H, L+R]`.
    Concatenated(TensorRef<'a, D>),
    /// The latent and the rotary part in separate tensors.
    Split {
        /// `[T, H, L]`.
        latent: TensorRef<'a, D>,
        /// `[T, H, R]`.
        rope: TensorRef<'a, D>,
    },
}

/// The requests of a step that take the decode path. Their lengths are on the device, so a captured
/// graph can be replayed with other lengths in the same arrays.
#[non_exhaustive]
pub struct DecodeBatch<'a, D: Device> {
    /// The pages of each request: `[requests, max_pages]`.
    pub block_table: BlockTable<'a, D>,
    /// The number of tokens of each request in the cache, its query tokens included: `[requests]`.
    /// A request of length 0 attends to nothing.
    pub seq_lens: ArrayRef<'a, D, i32>,
    /// The start of each request's query tokens, and the end of the last: `[requests + 1]`. If a
    /// request has `len` tokens and `n` query tokens, its query token `i` sees the rows
    /// `0 .. len − n + i + 1`.
    pub query_starts: ArrayRef<'a, D, i32>,
    /// The maximum number of query tokens of one request.
    pub max_query_len: usize,
    /// An upper bound on the number of tokens of one request. Backends may choose a kernel by it,
    /// so a bound close to the actual maximum is better.
    pub max_seq_len: usize,
    /// True if query tokens see only the tokens up to themselves, as above. If it is false, each
    /// sees all tokens of its request. This takes a backend with
    /// [`NonCausal`](crate::spec::Feature::NonCausal).
    pub causal: bool,
    /// The host's copy of the lengths, for backends that plan on the host: the numbers of query
    /// tokens of the requests, and their numbers of tokens in the cache. `None` if the lengths are
    /// only on the device. Before a step is replayed from a graph, it must be prepared again with
    /// its own lengths.
    pub host: Option<[&'a [u32]; 2]>,
}

impl<'a, D: Device> DecodeBatch<'a, D> {
    /// A batch from the requests' pages, lengths and query tokens on the device. The host has no
    /// copy of the lengths.
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

    setters! {
        with_causal(causal: bool);
    }

    /// Adds the host's copy of the lengths: of query tokens, and of tokens in the cache.
    #[must_use]
    pub fn with_host(mut self, query_lens: &'a [u32], seq_lens: &'a [u32]) -> Self {
        self.host = Some([query_lens, seq_lens]);
        self
    }
}

copies!([D: Device] DecodeBatch<'_, D>);

/// One attention of a prepared batch to the cache.
#[non_exhaustive]
pub struct DecodeCall<'a, D: Device> {
    /// The queries, in the format that the spec declares.
    pub query: Query<'a, D>,
    /// The cache.
    pub cache: CacheRef<'a, D>,
    /// The requests.
    pub batch: DecodeBatch<'a, D>,
    /// `[T, H, L]`.
    pub out: Output<'a, D>,
    /// `[H, T]`; absent if the caller does not need it.
    pub lse: Option<LseMut<'a, D>>,
    /// The lists of slots. They must be present if the problem is sparse, and absent otherwise.
    pub slots: Option<SlotLists<'a, D>>,
    /// A score for each head, `[H]`, that takes part in the softmax without a value. It multiplies
    /// the head's output by `1 / (1 + e^(sink − lse))`, as FlashMLA's `attn_sink` does. The score
    /// is compared with scores after their multiplication by the softmax scale: −∞ changes nothing,
    /// and +∞ makes the output 0. The log-sum-exp does not include it. Sinks take a backend with
    /// [`Sinks`](crate::spec::Feature::Sinks).
    pub sinks: Option<ArrayRef<'a, D, f32>>,
    /// A factor on the softmax scale for each query token, `[T]`, finite and above 0. It must be
    /// present if the problem has [`QueryScales`](crate::spec::Feature::QueryScales), and absent
    /// otherwise.
    pub query_scales: Option<ArrayRef<'a, D, f32>>,
}

impl<'a, D: Device> DecodeCall<'a, D> {
    /// A call that attends to whole contexts and returns no log-sum-exp.
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
