//! The arguments of a call of a prefill backend.

use super::Output;
use crate::device::Device;
use crate::plan::context::ContextChunk;
use crate::setters::{options, setters};
use crate::tensor::{ArrayRef, LseMut, TensorRef};

/// The keys of a call, in the [layout](crate::spec::BackendSpec::key_layout) that the backend
/// declares.
pub enum Keys<'a, D: Device> {
    /// `[T, H, P+R]`.
    Packed(TensorRef<'a, D>),
    /// The head's part and the rotary part in separate tensors.
    Split {
        /// `[T, H, P]`.
        nope: TensorRef<'a, D>,
        /// `[T, 1, R]`, the same for every head.
        rope: TensorRef<'a, D>,
    },
}

/// The lengths of a step's prefill requests. The host knows them.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct PrefillBatch<'a> {
    /// The number of new tokens of each request.
    pub query_lens: &'a [u32],
    /// The number of keys of each request in the call for its new tokens. In a layer these are the
    /// keys of the new tokens. If there are no chunks, the keys of the context come before them.
    pub key_lens: &'a [u32],
    /// The chunks of the requests' context. Each is attended to in a call of its own.
    pub chunks: &'a [ContextChunk],
    /// True if the call for the new tokens is causal.
    pub causal: bool,
}

impl<'a> PrefillBatch<'a> {
    /// A batch of new tokens and their keys, without chunks of context.
    pub const fn new(query_lens: &'a [u32], key_lens: &'a [u32]) -> Self {
        Self {
            query_lens,
            key_lens,
            chunks: &[],
            causal: true,
        }
    }

    setters! {
        with_causal(causal: bool);
        with_chunks(chunks: &'a [ContextChunk]);
    }
}

/// One attention of the requests in a batch, each to keys of its own.
#[non_exhaustive]
pub struct PrefillCall<'a, D: Device> {
    /// The context chunk whose keys these are, as an index into [`PrefillBatch::chunks`]. With it
    /// come the numbers of query tokens and keys of each request in the chunk; the call has no
    /// other requests. Attention to a chunk is not causal. `None`: the keys are those of the new
    /// tokens. If there are more keys than queries, keys of the context come first. Attention is
    /// then causal if `causal` is true.
    pub chunk: Option<(usize, [&'a [u32]; 2])>,
    /// True if a call without a chunk is causal. If it is false, every new token sees all keys of
    /// its request. This takes a backend with [`NonCausal`](crate::spec::Feature::NonCausal).
    pub causal: bool,
    /// `[Tq, H, P+R]`.
    pub query: TensorRef<'a, D>,
    /// The keys, in the layout that the spec declares.
    pub keys: Keys<'a, D>,
    /// `[Tk, H, V]`.
    pub values: TensorRef<'a, D>,
    /// `[Tq, H, V]`.
    pub out: Output<'a, D>,
    /// `[H, Tq]`; absent if the caller does not need it.
    pub lse: Option<LseMut<'a, D>>,
    /// The start of each request's queries, and the end of the last: `[requests + 1]`.
    pub query_starts: ArrayRef<'a, D, i32>,
    /// The start of each request's keys, and the end of the last: `[requests + 1]`.
    pub key_starts: ArrayRef<'a, D, i32>,
    /// The maximum number of query tokens of one request.
    pub max_query_len: usize,
    /// The maximum number of keys of one request.
    pub max_key_len: usize,
    /// A factor on the softmax scale for each query token, `[Tq]`, as in
    /// [`DecodeCall::query_scales`](super::DecodeCall::query_scales).
    pub query_scales: Option<ArrayRef<'a, D, f32>>,
}

impl<'a, D: Device> PrefillCall<'a, D> {
    setters! {
        with_causal(causal: bool);
    }

    /// Returns true if the keys are attended to causally. Keys of a chunk never are.
    pub fn is_causal(&self) -> bool {
        self.causal && self.chunk.is_none()
    }

    /// A call for new tokens and their own keys, without a log-sum-exp. The batch consists of the
    /// starts of each request's queries and keys, each with the maximum number per request.
    pub fn new(
        query: TensorRef<'a, D>,
        keys: Keys<'a, D>,
        values: TensorRef<'a, D>,
        out: Output<'a, D>,
        (query_starts, max_query_len): (ArrayRef<'a, D, i32>, usize),
        (key_starts, max_key_len): (ArrayRef<'a, D, i32>, usize),
    ) -> Self {
        Self {
            chunk: None,
            causal: true,
            query,
            keys,
            values,
            out,
            lse: None,
            query_starts,
            key_starts,
            max_query_len,
            max_key_len,
            query_scales: None,
        }
    }

    options! {
        with_lse(lse: LseMut<'a, D>);
        with_chunk(chunk: (usize, [&'a [u32]; 2]));
        with_query_scales(query_scales: ArrayRef<'a, D, f32>);
    }
}
