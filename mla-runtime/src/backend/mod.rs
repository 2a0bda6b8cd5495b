//! Traits that a kernel author implements: [`PrefillBackend`] and [`DecodeBackend`].
//!
//! A backend is a type per phase. Its static part is a [`BackendSpec`],
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
//!
//! # The contract of a call
//!
//! [`DecodeBackend::decode`] and [`PrefillBackend::prefill`] are `unsafe`, because they believe
//! what stands in arrays on the device: to check it, a backend would have to wait and read it back.
//! [`DecodeCall::check`] and [`PrefillCall::check`] compare what the host sees; the caller owes the
//! rest. The kernels' C interface (`cuda/include/mla.h`) asks for the same in the same words.
//!
//! 1. **Starts.** `query_starts` and `key_starts` begin at 0, never fall, and end at the rows of
//!    their tensors. No two neighbours differ by more than `max_query_len` or `max_key_len`, and
//!    `max_query_len` of a decode is within the limits that the state was made for.
//! 2. **Lengths.** Each of `seq_lens` is 0 or above, at most `max_seq_len`, and at most what a row
//!    of the block table has room for: `max_pages · page_size`.
//! 3. **Pages.** Entries of the block table that a request's length uses are pages of the cache: 0
//!    or above, and below its `pages`. Others may hold anything. In a sparse call this holds for
//!    the requests within `dense_within`; lists of slots and their counts may hold anything.
//! 4. **The host's numbers** are the device's: [`HostLens`], of a batch or a chunk, and the batch
//!    that was prepared. If a captured call is replayed, all of this holds at each replay.
//! 5. **State and metadata** were made by this instance, or by one of the same type, device and
//!    problem, and the metadata's last successful `prepare` was for this batch. (The backends here
//!    compare the problem all the same, by [`Problem::check_same`].)
//! 6. **Memory.** All views are of memory of `device`, and nothing accesses it in conflict until
//!    the device has done the call; outputs are borrowed mutably, and so are apart from all else.
//!
//! [`MlaLayer`](crate::layer::MlaLayer) is the safe way:
//! [`Workspace::prepare`](crate::layer::Workspace::prepare) checks a step on the host and writes
//! the arrays itself, into memory that no other code can reach.
//!
//! # Dependent launches
//!
//! With programmatic dependent launch a kernel may begin while the one before it in the stream is
//! still running: as soon as every CTA of that one has executed `griddepcontrol.launch_dependents`
//! or ended. Kernels of a device do so at their start, which says nothing about their results. The
//! kernels that `prepare`, [`decode`](DecodeBackend::decode) and
//! [`prefill`](PrefillBackend::prefill) enqueue owe, if they are launched with the attribute
//! (`cudaLaunchAttributeProgrammaticStreamSerialization`):
//!
//! 1. **Before the first access**: every thread executes `griddepcontrol.wait`, or is ordered
//!    behind a thread that has, before it reads or writes memory that others access: the call's
//!    tensors and arrays, outputs included, the state, and the metadata. Shared memory, barriers,
//!    parameters and constants may be touched ahead of it.
//! 2. **Behind the last write**: no kernel ends before its wait is over, not even one that has
//!    nothing to do, since `griddepcontrol.wait` of the next kernel waits for this one alone.
//!    `griddepcontrol.launch_dependents` may stand anywhere: it orders nothing.
//! 3. **At the end of the call**: when the last kernel has ended, all others of the call have.
//!
//! A kernel that is launched without the attribute begins when all before it have ended, and keeps
//! the contract by that. A backend all of whose kernels keep it declares `dependent_launch = true`.
//! Around the calls of any other the stages put a [fence](Device::fence), so that nothing overlaps
//! them; a caller of [`DecodeBackend`] or [`PrefillBackend`] without a stage does the same.

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
pub use decode_call::{DecodeBatch, DecodeCall, HostLens, Query};
pub use entry::{Entry, LINKED};
pub(crate) use entry::{not_built, not_registered};
pub use opaque::Opaque;
pub use prefill::{PrefillBackend, PrefillStage, SelectedPrefill};
pub use prefill_call::{Keys, PrefillBatch, PrefillCall};
pub use slot_lists::{ListedCache, SlotLists};

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
    /// The model, its cache and the features it wants.
    pub problem: Problem,
    /// The factor of scores before the softmax: 1/√(P+R), times the square of the model's yarn
    /// factor if it has one.
    pub softmax_scale: f32,
    /// The factor of queries by their positions, which the layer gives to backends: present if the
    /// problem has [`QueryScales`](crate::spec::Feature::QueryScales), and only there.
    pub query_scaling: Option<QueryScaling>,
}

impl LayerConfig {
    /// A problem, and what scores are multiplied by.
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

    /// The first field in which another configuration differs: its name, and both values.
    pub(crate) fn difference(&self, other: &Self) -> Option<(&'static str, [String; 2])> {
        let scales = [self.softmax_scale, other.softmax_scale];
        let scales = (scales[0] != scales[1])
            .then(|| ("softmax_scale", scales.map(|scale| scale.to_string())));
        let scalings = [self.query_scaling, other.query_scaling];
        let scalings = (scalings[0] != scalings[1]).then(|| {
            (
                "query_scaling",
                scalings.map(|scaling| format!("{scaling:?}")),
            )
        });
        self.problem
            .difference(&other.problem)
            .or(scales)
            .or(scalings)
    }
}

/// Destination of an attention's result.
pub enum Output<'a, D: Device> {
    /// In the problem's dtype.
    Plain(TensorMut<'a, D>),
    /// The e4m3 bytes `[tokens, heads, width]` without gaps: stored = value / scale. Only for a
    /// backend whose spec has `quant_output`.
    Fp8 {
        /// The bytes.
        bytes: D::BytesMut<'a>,
        /// The scale of the whole tensor.
        scale: f32,
    },
}

/// Enqueues a [fence](Device::fence), before and behind the calls of a backend, unless its spec
/// declares that its kernels keep the contract of programmatic dependent launch.
pub(crate) fn keep_apart<D: Device>(device: &D, spec: &BackendSpec) -> Result<()> {
    match spec.dependent_launch {
        true => Ok(()),
        false => device.fence(),
    }
}
