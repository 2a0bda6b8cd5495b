//! Traits that a kernel author implements: [`PrefillBackend`] and [`DecodeBackend`].
//!
//! A backend is one type per phase. Its static part is a [`BackendSpec`], which `#[mla_backend]`
//! writes. Its dynamic part has three lifetimes, each with a type of its own:
//!
//! | what | made | holds |
//! |---|---|---|
//! | the implementation (`Self`) | once per layer | what depends on the layer |
//! | the state | once per engine, shared by its layers | workspaces |
//! | the metadata | once per engine, prepared per step | schedules, in buffers that never move |
//!
//! The layer uses two other traits: [`PrefillStage`] and [`DecodeStage`]. Every type with one of
//! the traits above implements the matching stage. So does a backend that is selected at run time
//! ([`SelectedPrefill`], [`SelectedDecode`]).
//!
//! # The contract of a call
//!
//! [`DecodeBackend::decode`] and [`PrefillBackend::prefill`] are `unsafe` because they trust the
//! contents of arrays on the device. To check these, a backend would have to read them back and
//! wait. [`DecodeCall::check`] and [`PrefillCall::check`] check what the host sees. The caller is
//! responsible for the rest. The kernels' C interface (`cuda/include/mla.h`) has the same contract.
//!
//! 1. **Starts.** `query_starts` and `key_starts` begin at 0, never fall, and end at the number of
//!    rows of their tensors. No two neighbours differ by more than `max_query_len` or
//!    `max_key_len`. In a decode, `max_query_len` is within the limits that the state was made for.
//! 2. **Lengths.** Each of `seq_lens` is 0 or above. It is at most `max_seq_len`, and at most the
//!    capacity of a row of the block table, `max_pages · page_size`.
//! 3. **Pages.** Entries of the block table that a request's length uses are pages of the cache: 0
//!    or above, and below its `pages`. Other entries may hold anything. In a sparse call this holds
//!    for the requests within `dense_within`. Lists of slots and their counts may hold anything.
//! 4. **The host's numbers** agree with the device's: the host's lengths of a batch or a chunk, and
//!    those of the batch that was prepared. If a captured call is replayed, all of these rules hold
//!    at each replay.
//! 5. **State and metadata** were made by this instance, or by one of the same type, device and
//!    problem. The metadata's last successful `prepare` was for this batch. (The backends of this
//!    project nevertheless compare the problem, by [`Problem::check_same`].)
//! 6. **Memory.** All views are of memory of `device`, and nothing accesses it in conflict until
//!    the device has finished the call. Outputs are borrowed mutably, so they overlap nothing else.
//!
//! [`MlaLayer`](crate::layer::MlaLayer) is the safe interface:
//! [`Workspace::prepare`](crate::layer::Workspace::prepare) checks a step on the host and writes
//! the arrays itself, into memory that no other code can reach.
//!
//! # Dependent launches
//!
//! With programmatic dependent launch a kernel may begin while the kernel before it in the stream
//! is still running. It may begin as soon as every CTA of the earlier kernel has ended or executed
//! `griddepcontrol.launch_dependents`. A device's kernels execute that instruction at their start,
//! so it says nothing about their results. Kernels that are launched with the attribute
//! `cudaLaunchAttributeProgrammaticStreamSerialization` must keep the following rules. They apply
//! to all kernels that `prepare`, [`decode`](DecodeBackend::decode) and
//! [`prefill`](PrefillBackend::prefill) enqueue:
//!
//! 1. **Before the first access**: before a thread reads or writes memory that others access, it
//!    executes `griddepcontrol.wait`, or it is ordered after a thread that has executed it. Such
//!    memory is the call's tensors and arrays, outputs included, the state, and the metadata.
//!    Shared memory, barriers, parameters and constants may be accessed earlier.
//! 2. **After the last write**: no kernel ends before its wait is over, not even a kernel that has
//!    nothing to do. The reason is that `griddepcontrol.wait` of the next kernel waits for this
//!    kernel alone. `griddepcontrol.launch_dependents` may be executed anywhere: it orders nothing.
//! 3. **At the end of the call**: when the last kernel has ended, all other kernels of the call
//!    have ended, too.
//!
//! A kernel that is launched without the attribute begins when all earlier kernels have ended, and
//! thereby keeps the contract. A backend declares `dependent_launch = true` if all of its kernels
//! keep the contract. Around the calls of any other backend, the stages put a
//! [fence](Device::fence), so that nothing overlaps them. A caller of [`DecodeBackend`] or
//! [`PrefillBackend`] without a stage must do the same.

mod check;
mod decode;
mod decode_call;
mod entry;
pub(crate) mod list;
mod opaque;
mod prefill;
mod prefill_call;
mod slot_lists;
mod stage;

pub use crate::plan::limits::StepLimits;
pub(crate) use check::{
    check_cache, check_causal, check_gaps, check_lists, check_rows, check_sinks,
};
pub use decode::{DecodeBackend, DecodeStage, SelectedDecode};
pub use decode_call::{DecodeBatch, DecodeCall, Query};
pub use entry::{Entry, LINKED};
pub use prefill::{PrefillBackend, PrefillStage, SelectedPrefill};
pub use prefill_call::{Keys, PrefillBatch, PrefillCall};
pub use slot_lists::SlotLists;

use crate::Result;
use crate::device::Device;
use crate::model::QueryScaling;
use crate::setters::setters;
use crate::spec::{BackendSpec, Problem};
use crate::tensor::TensorMut;

/// The configuration of an implementation: one layer of one model on one cache.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct LayerConfig {
    /// The model, its cache and the required features.
    pub problem: Problem,
    /// The factor of scores before the softmax. It is 1/√(P+R), times the square of the model's
    /// yarn factor if there is one.
    pub softmax_scale: f32,
    /// The scale factor of queries by their positions, which the layer passes to backends. It must
    /// be present if the problem has [`QueryScales`](crate::spec::Feature::QueryScales), and absent
    /// otherwise.
    pub query_scaling: Option<QueryScaling>,
}

impl LayerConfig {
    /// A configuration of a problem and a softmax scale.
    pub const fn new(problem: Problem, softmax_scale: f32) -> Self {
        Self {
            problem,
            softmax_scale,
            query_scaling: None,
        }
    }

    setters! {
        with_problem(problem: Problem);
        with_softmax_scale(softmax_scale: f32);
        with_query_scaling(query_scaling: Option<QueryScaling>);
    }

    /// The first field in which another configuration differs: its name and both values.
    pub(crate) fn difference(&self, other: &Self) -> Option<(&'static str, [String; 2])> {
        let scales = [self, other].map(|it| it.softmax_scale.to_string());
        let scalings = [self, other].map(|it| format!("{:?}", it.query_scaling));
        let other_scale = self.softmax_scale != other.softmax_scale;
        let other_scaling = self.query_scaling != other.query_scaling;
        let problems = self.problem.difference(&other.problem);
        problems
            .or_else(|| other_scale.then_some(("softmax_scale", scales)))
            .or_else(|| other_scaling.then_some(("query_scaling", scalings)))
    }
}

/// The destination of an attention's result.
pub enum Output<'a, D: Device> {
    /// A tensor in the problem's dtype.
    Plain(TensorMut<'a, D>),
    /// The e4m3 bytes `[tokens, heads, width]` without gaps; stored = value / scale. This takes a
    /// backend whose spec has `quant_output`.
    Fp8 {
        /// The bytes.
        bytes: D::BytesMut<'a>,
        /// The scale of the whole tensor.
        scale: f32,
    },
}

/// Enqueues a [fence](Device::fence), unless the spec declares that the kernels keep the contract
/// of dependent launches. Called before and after each call of a backend.
pub(crate) fn keep_apart<D: Device>(device: &D, spec: &BackendSpec) -> Result<()> {
    match spec.dependent_launch {
        true => Ok(()),
        false => device.fence(),
    }
}
