//! Features that a problem may ask for beyond plain causal attention.

use std::fmt;

use crate::text::{self, Text};

/// Something that not every backend can do, and that none does unless its spec says so.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Feature {
    /// A linear bias per head on the logits.
    AlibiSlopes,
    /// Attention to a number of last tokens only.
    SlidingWindow,
    /// Attention to a sparse set of blocks.
    BlockSparsity,
    /// Logits squashed by a tanh.
    LogitsSoftCap,
    /// Bidirectional attention among a request's own tokens.
    EncoderAttention,
    /// Attention of a decoder to an encoder's output.
    CrossAttention,
    /// Learned logits that take part in the softmax without a value.
    Sinks,
    /// Repeatable: a launch that is repeated, on the same GPU with the same shapes and inputs,
    /// gives the same bits. A request's bits may well depend on the others in the batch.
    Deterministic,
    /// A request's bits follow from the request alone, on one GPU model, for one problem and one
    /// set of limits. They are the same among any other requests, at any place, in any pages and
    /// any width of the block table, padded, and replayed from a graph of a larger batch. It says
    /// nothing of the same tokens in other steps: a prompt in other parts, or a token that came as
    /// a draft.
    BatchInvariant,
    /// A NaN in an input is in the output of every row that sees it, and of no other. Without this
    /// it may be lost, and may reach rows that are computed beside it: earlier ones of the request,
    /// and in prefill a neighbour's.
    NanPropagation,
    /// Outputs with gaps between tokens, and heads in any order.
    StridedOutputs,
    /// In a sparse call, requests that attend to all of their tokens, by their block tables.
    DenseRequests,
    /// In a sparse call, a second cache with lists of its own.
    SecondCache,
    /// A cache of two tensors: of latents and of rotary keys, each with strides of its own.
    SplitCache,
    /// Query tokens that see all of their request, those behind them too: drafts that see each
    /// other.
    NonCausal,
    /// A factor on the softmax scale for each query token.
    QueryScales,
}

impl Feature {
    /// Every feature, in declaration order.
    pub const ALL: &'static [Self] = &[
        Self::AlibiSlopes,
        Self::SlidingWindow,
        Self::BlockSparsity,
        Self::LogitsSoftCap,
        Self::EncoderAttention,
        Self::CrossAttention,
        Self::Sinks,
        Self::Deterministic,
        Self::BatchInvariant,
        Self::NanPropagation,
        Self::StridedOutputs,
        Self::DenseRequests,
        Self::SecondCache,
        Self::SplitCache,
        Self::NonCausal,
        Self::QueryScales,
    ];

    /// The name used in attributes, on the command line and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AlibiSlopes => "alibi_slopes",
            Self::SlidingWindow => "sliding_window",
            Self::BlockSparsity => "block_sparsity",
            Self::LogitsSoftCap => "logits_soft_cap",
            Self::EncoderAttention => "encoder_attention",
            Self::CrossAttention => "cross_attention",
            Self::Sinks => "sinks",
            Self::Deterministic => "deterministic",
            Self::BatchInvariant => "batch_invariant",
            Self::NanPropagation => "nan_propagation",
            Self::StridedOutputs => "strided_outputs",
            Self::DenseRequests => "dense_requests",
            Self::SecondCache => "second_cache",
            Self::SplitCache => "split_cache",
            Self::NonCausal => "non_causal",
            Self::QueryScales => "query_scales",
        }
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of [`Feature`]s.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct FeatureSet(u16);

impl FeatureSet {
    /// Nothing beyond plain causal attention.
    pub const NONE: Self = Self(0);

    /// The features of a list.
    pub const fn of(features: &[Feature]) -> Self {
        let (mut bits, mut i) = (0, 0);
        while i < features.len() {
            bits |= 1 << features[i] as u16;
            i += 1;
        }
        Self(bits)
    }

    /// Returns true if `feature` is in the set.
    pub const fn contains(self, feature: Feature) -> bool {
        self.0 & (1 << feature as u16) != 0
    }

    /// The set with `feature` added.
    #[must_use]
    pub const fn with(self, feature: Feature) -> Self {
        Self(self.0 | 1 << feature as u16)
    }

    /// The features in declaration order.
    pub fn iter(self) -> impl Iterator<Item = Feature> {
        Feature::ALL
            .iter()
            .copied()
            .filter(move |feature| self.contains(*feature))
    }
}

impl FeatureSet {
    pub(crate) const fn write(self, text: &mut Text<'_>) {
        let (mut i, mut written) = (0, 0);
        while i < Feature::ALL.len() {
            if self.contains(Feature::ALL[i]) {
                text.comma(written);
                text.push(Feature::ALL[i].name());
                written += 1;
            }
            i += 1;
        }
        if written == 0 {
            text.push("none");
        }
    }
}

text::display!(FeatureSet);
