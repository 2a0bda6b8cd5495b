//! Calls whose queries and rotary keys come directly from the projections, unrotated.

use super::staged::StagedStep;
use super::{LayerCall, MlaLayer, Weights, Workspace};
use crate::backend::{DecodeStage, PrefillStage, SlotLists};
use crate::device::Device;
use crate::setters::options;
use crate::tensor::{
    ArrayRef, CacheMut, LseMut, Memory, Rotary, RotaryQuery, TensorMut, TensorRef, check_positions,
};
use crate::{Error, Result};

/// One call of a layer on queries and keys that are not rotated yet, for the T tokens of the
/// prepared step.
///
/// Some vectors are rotated in place, and others only in the copy that goes to the cache or the
/// attention. This depends on the step. After the call, `query` and `rope` may be rotated or not.
#[non_exhaustive]
pub struct UnrotatedCall<'a, D: Device> {
    /// The layer's weights.
    pub weights: Weights<'a, D>,
    /// `[T, H, P+R]`.
    pub query: TensorMut<'a, D>,
    /// The new tokens' normalised latents, `[T, 1, L]`.
    pub latent: TensorRef<'a, D>,
    /// The new tokens' rotary keys, `[T, 1, R]`.
    pub rope: TensorMut<'a, D>,
    /// The tables of the rotation. If the positions are not those of the step, it also has the
    /// caller's positions.
    pub rotary: Rotary<'a, D>,
    /// The layer's cache.
    pub cache: CacheMut<'a, D>,
    /// `[T, H, V]`.
    pub out: TensorMut<'a, D>,
    /// `[H, T]`, if the caller needs the log-sum-exp. It is −inf for a token that attends to
    /// nothing.
    pub lse: Option<LseMut<'a, D>>,
    /// The slots that each token attends to. They must be given if the problem is sparse, and
    /// absent otherwise.
    pub slot_lists: Option<SlotLists<'a, D>>,
    /// A score for each head that takes part in the softmax without a value, as in [`LayerCall`].
    pub sinks: Option<ArrayRef<'a, D, f32>>,
    /// The output's gate before its sigmoid, as in [`LayerCall`].
    pub gate: Option<TensorRef<'a, D>>,
}

impl<'a, D: Device> UnrotatedCall<'a, D> {
    /// A call without a log-sum-exp, slot lists, sinks or a gate. The fields describe the shapes.
    pub fn new(
        weights: Weights<'a, D>,
        query: TensorMut<'a, D>,
        latent: TensorRef<'a, D>,
        rope: TensorMut<'a, D>,
        rotary: Rotary<'a, D>,
        cache: CacheMut<'a, D>,
        out: TensorMut<'a, D>,
    ) -> Self {
        Self {
            weights,
            query,
            latent,
            rope,
            rotary,
            cache,
            out,
            lse: None,
            slot_lists: None,
            sinks: None,
            gate: None,
        }
    }

    options! {
        with_lse(lse: LseMut<'a, D>);
        with_slot_lists(slot_lists: SlotLists<'a, D>);
        with_sinks(sinks: ArrayRef<'a, D, f32>);
        with_gate(gate: TensorRef<'a, D>);
    }
}

/// The time at which a step's queries and keys are rotated.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rotating {
    /// In place, before everything else.
    Before,
    /// In the cache write.
    OnTheWay,
    /// The queries and keys have no rotary part.
    Nothing,
}

impl<P: PrefillStage, D: DecodeStage<Device = P::Device>> MlaLayer<P, D> {
    /// [Runs](Self::forward) the layer on queries and keys that are not rotated yet. If every token
    /// is on the absorbed path, the cache write rotates them without a further launch. Otherwise
    /// queries and keys are first rotated in place. The results are the same.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::forward`]. Also if the tables are shorter than the step's longest
    /// request, or if the number of the caller's positions is not that of the tokens.
    pub fn forward_unrotated(
        &self,
        workspace: &mut Workspace<P, D>,
        mut call: UnrotatedCall<'_, P::Device>,
    ) -> Result<()> {
        if !workspace.step.is_packed() {
            return self.forward_rows_unrotated(workspace, call);
        }
        self.check_unrotated(workspace, &mut call)?;
        self.enqueue_unrotated(workspace, call)
    }

    /// Refuses a call that does not fit the prepared step, before anything is enqueued.
    pub(super) fn check_unrotated(
        &self,
        workspace: &Workspace<P, D>,
        call: &mut UnrotatedCall<'_, P::Device>,
    ) -> Result<()> {
        let rotation = self.rotates(workspace);
        self.check(workspace, &call.layer_call(rotation == Rotating::OnTheWay))?;
        match rotation {
            Rotating::Before => self.check_rotation(&workspace.step, &call.rotary),
            Rotating::OnTheWay | Rotating::Nothing => Ok(()),
        }
    }

    /// Enqueues a call that has been checked.
    pub(super) fn enqueue_unrotated(
        &self,
        workspace: &mut Workspace<P, D>,
        mut call: UnrotatedCall<'_, P::Device>,
    ) -> Result<()> {
        let rotation = self.rotates(workspace);
        if rotation == Rotating::Before {
            self.device
                .profile_range(c"mla: rotate", || self.rotate(workspace, &mut call))?;
        }
        let mut call = call.layer_call(rotation == Rotating::OnTheWay);
        self.enqueue(workspace, &mut call)
    }

    fn rotates(&self, workspace: &Workspace<P, D>) -> Rotating {
        match workspace.step.expanded_tokens() {
            _ if self.config.problem.dims.head.rope == 0 => Rotating::Nothing,
            0 => Rotating::OnTheWay,
            _ => Rotating::Before,
        }
    }

    fn rotate(
        &self,
        workspace: &Workspace<P, D>,
        call: &mut UnrotatedCall<'_, P::Device>,
    ) -> Result<()> {
        let head = self.config.problem.dims.head;
        let (nope, qk) = (head.nope as usize, head.qk() as usize);
        let positions = workspace
            .step
            .positions(P::Device::bytes(&workspace.arrays))?;
        let rotary = call.rotary.at(positions);
        let query = call.query.reborrow().narrow(2, nope..qk)?;
        self.device.rotate(&rotary, RotaryQuery::InPlace(query))?;
        let rope = call.rope.reborrow();
        self.device.rotate(&rotary, RotaryQuery::InPlace(rope))
    }

    /// Refuses tables that do not fit the model or end before the step's longest request. Also
    /// refuses a wrong number of positions.
    pub(super) fn check_rotation(
        &self,
        step: &StagedStep,
        rotary: &Rotary<'_, P::Device>,
    ) -> Result<()> {
        let expected = self.config.problem.dims.head.rope as usize / 2;
        let [_, positions, pairs] = rotary.cos.shape();
        if pairs != expected {
            let accepted = format!("{expected} pairs, of qk_rope_head_dim = {}", 2 * expected);
            return Err(Error::argument(
                "rotary",
                format!("{pairs} pairs"),
                accepted,
            ));
        }
        if let Some(own) = &rotary.positions {
            return check_positions(own.len(), step.tokens());
        }
        if step.longest() > positions {
            let accepted = format!("at least {}, the step's longest request", step.longest());
            let given = format!("tables of {positions} positions");
            return Err(Error::argument("rotary", given, accepted));
        }
        Ok(())
    }
}

impl<D: Device> UnrotatedCall<'_, D> {
    /// The call for tensors that are already rotated, or for a cache write that rotates them.
    pub(super) fn layer_call(&mut self, rotates: bool) -> LayerCall<'_, D> {
        LayerCall {
            weights: self.weights.shorten(),
            query: self.query.as_ref(),
            latent: self.latent.shorten(),
            rope: self.rope.as_ref(),
            cache: self.cache.reborrow(),
            out: self.out.reborrow(),
            lse: self.lse.as_mut().map(LseMut::reborrow),
            slot_lists: self.slot_lists.as_ref().map(SlotLists::shorten),
            sinks: self.sinks.as_ref().map(ArrayRef::shorten),
            gate: self.gate.as_ref().map(TensorRef::shorten),
            rotary: rotates.then(|| self.rotary.shorten()),
        }
    }
}
