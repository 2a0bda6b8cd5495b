//! What a kernel author implements: [`PrefillBackend`] and [`DecodeBackend`].
//!
//! A backend is a type per phase. Its static part is a [`BackendSpec`](crate::spec::BackendSpec),
//! written by `#[mla_backend]`. Its dynamic part comes in three lifetimes, each of a type of its
//! own:
//!
//! | what | made | holds |
//! |---|---|---|
//! | the implementation (`Self`) | once per layer | what depends on the layer |
//! | the state | once per engine, shared by its layers | workspaces |
//! | the metadata | once per engine, prepared per step | schedules, in buffers that never move |
//!
//! The layer is written once, for two other traits: [`PrefillStage`] and [`DecodeStage`]. Every
//! type with the traits above has them, and so has a backend that is selected at run time
//! ([`SelectedPrefill`], [`SelectedDecode`]).

mod check;
mod decode;
mod decode_call;
mod entry;
pub(crate) mod list;
mod opaque;
mod prefill;
mod prefill_call;
mod slot_lists;

pub use crate::plan::limits::StepLimits;
pub(crate) use check::{check_cache, check_gaps, check_lists, check_rows, check_sinks};
pub use decode::{DecodeBackend, DecodeStage, SelectedDecode};
pub use decode_call::{DecodeBatch, DecodeCall, HostLens, Query};
pub use entry::{Entry, LINKED};
pub(crate) use entry::{not_built, not_linked, not_registered};
pub use opaque::Opaque;
pub use prefill::{PrefillBackend, PrefillStage, SelectedPrefill};
pub use prefill_call::{Chunk, Keys, PrefillBatch, PrefillCall};
pub use slot_lists::{ListedCache, SlotLists};

use crate::device::Device;
use crate::problem::Problem;
use crate::setters::setters;
use crate::tensor::TensorMut;

/// What an implementation is made for: one layer of one model on one cache.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct LayerConfig {
    /// The model, its cache and the features it wants.
    pub problem: Problem,
    /// What scores are multiplied by before the softmax: 1/√(P+R), times the square of the model's
    /// yarn factor if it has one.
    pub softmax_scale: f32,
}

impl LayerConfig {
    /// A problem, and what scores are multiplied by.
    pub const fn new(problem: Problem, softmax_scale: f32) -> Self {
        Self {
            problem,
            softmax_scale,
        }
    }

    setters! {
        with_problem(problem: Problem);
        with_softmax_scale(softmax_scale: f32);
    }

    /// The first field in which another configuration differs: its name, and both values.
    pub(crate) fn difference(&self, other: &Self) -> Option<(&'static str, [String; 2])> {
        let scales = [self.softmax_scale, other.softmax_scale];
        let scales = (scales[0] != scales[1])
            .then(|| ("softmax_scale", scales.map(|scale| scale.to_string())));
        self.problem.difference(&other.problem).or(scales)
    }
}

/// Where attention writes its result.
pub enum Output<'a, D: Device> {
    /// In the problem's dtype.
    Plain(TensorMut<'a, D>),
    /// As e4m3 bytes `[tokens, heads, width]` without gaps: stored = value / scale. Only for a
    /// backend whose spec has `quant_output`.
    Fp8 {
        /// The bytes.
        bytes: D::BytesMut<'a>,
        /// The scale of the whole tensor.
        scale: f32,
    },
}
