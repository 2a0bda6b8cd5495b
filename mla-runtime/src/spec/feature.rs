//! Features that a problem may ask for beyond plain causal attention.

use crate::text::{self, Text, names};

names! {
    /// An ability that some backends have. A backend has it only if its spec says so.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
    pub enum Feature {
        /// Learned logits that take part in the softmax without a value.
        Sinks = "sinks",
        /// Repeatable results: a second launch on the same GPU with the same shapes and inputs
        /// gives the same bits. The bits of a request may depend on the other requests in the
        /// batch.
        Deterministic = "deterministic",
        /// The bits of a request depend on nothing but the request, for one GPU model, one problem
        /// and one set of limits. They do not depend on other requests, on the request's place in
        /// the batch, on its pages, on the width of the block table, or on padding. A replay from a
        /// graph of a larger batch gives the same bits, too. The feature promises nothing about the
        /// same tokens in other steps: if a prompt is divided differently, or if a token came as a
        /// draft.
        BatchInvariant = "batch_invariant",
        /// A NaN in an input reaches the output of every row that sees it, and of no other row.
        /// Without this feature the NaN may be lost. It may also reach rows that are computed
        /// together with it: earlier rows of the request, and in prefill rows of a neighbouring
        /// request.
        NanPropagation = "nan_propagation",
        /// Outputs with gaps between tokens, and with heads in any order.
        StridedOutputs = "strided_outputs",
        /// Requests in a sparse call that attend to all of their tokens by their block tables.
        DenseRequests = "dense_requests",
        /// A second cache in a sparse call, with lists of its own.
        SecondCache = "second_cache",
        /// A cache of two tensors: one of latents and one of rotary keys, each with strides of its
        /// own.
        SplitCache = "split_cache",
        /// Query tokens that see all tokens of their request, even later ones. Draft tokens can
        /// thus see each other.
        NonCausal = "non_causal",
        /// A factor on the softmax scale for each query token.
        QueryScales = "query_scales",
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
