//! Features that a problem may ask for beyond plain causal attention.

use std::fmt;

use crate::text::{self, Text};

/// An ability that some backends have. A backend has it only if its spec says so.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Feature {
    /// A linear bias per head on the logits.
    AlibiSlopes,
    /// Attention to only a number of last tokens.
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
    /// Repeatable results: a second launch on the same GPU with the same shapes and inputs gives
    /// the same bits. The bits of a request may depend on the other requests in the batch.
    Deterministic,
    /// The bits of a request depend on nothing but the request, for one GPU model, one problem and
    /// one set of limits. They do not depend on other requests, on the request's place in the
    /// batch, on its pages, on the width of the block table, or on padding. A replay from a graph
    /// of a larger batch gives the same bits, too. The feature promises nothing about the same
    /// tokens in other steps: if a prompt is divided differently, or if a token came as a draft.
    BatchInvariant,
    /// A NaN in an input reaches the output of every row that sees it, and of no other row. Without
    /// this feature the NaN may be lost. It may also reach rows that are computed together with it:
    /// earlier rows of the request, and in prefill rows of a neighbouring request.
    NanPropagation,
    /// Outputs with gaps between tokens, and with heads in any order.
    StridedOutputs,
    /// Requests in a sparse call that attend to all of their tokens by their block tables.
    DenseRequests,
    /// A second cache in a sparse call, with lists of its own.
    SecondCache,
    /// A cache of two tensors: one of latents and one of rotary keys, each with strides of its own.
    SplitCache,
    /// Query tokens that see all tokens of their request, even later ones. Draft tokens can thus
    /// see each other.
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
