//! Calls whose queries and rotary keys come directly from the projections, unrotated.

use super::staged::StagedStep;
use super::{LayerCall, MlaLayer, Workspace};
use crate::backend::{DecodeStage, PrefillStage};
use crate::device::Device;
use crate::tensor::{Memory, Rotary, TensorMut};
use crate::{Error, Result, check_len};

/// A call on queries and rotary keys that are not rotated yet.
pub(super) type Unrotated<'a, D> = LayerCall<'a, D, TensorMut<'a, D>>;

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
    /// The errors of [`Self::forward`]. Also if the call has no rotation, if the tables are shorter
    /// than the step's longest request, or if the number of the caller's positions is not that of
    /// the tokens.
    pub fn forward_unrotated(
        &self,
        workspace: &mut Workspace<P, D>,
        mut call: Unrotated<'_, P::Device>,
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
        call: &mut Unrotated<'_, P::Device>,
    ) -> Result<()> {
        let rotation = self.rotates(workspace);
        self.check(workspace, &reading(call, rotation))?;
        match (&call.rotary, rotation) {
            (None, _) => Err(Error::argument(
                "rotary",
                "none",
                "the tables of a rotation",
            )),
            (Some(rotary), Rotating::Before) => self.check_rotation(&workspace.step, rotary),
            (Some(_), Rotating::OnTheWay | Rotating::Nothing) => Ok(()),
        }
    }

    /// Enqueues a call that has been checked.
    pub(super) fn enqueue_unrotated(
        &self,
        workspace: &mut Workspace<P, D>,
        mut call: Unrotated<'_, P::Device>,
    ) -> Result<()> {
        let rotation = self.rotates(workspace);
        if rotation == Rotating::Before {
            self.device
                .profile_range(c"mla: rotate", || self.rotate(workspace, &mut call))?;
        }
        self.enqueue(workspace, &mut reading(&mut call, rotation))
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
        call: &mut Unrotated<'_, P::Device>,
    ) -> Result<()> {
        let [_, _, nope, rope, ..] = self.config.problem.extents();
        let positions = workspace
            .step
            .positions(P::Device::bytes(&workspace.arrays))?;
        let Some(rotary) = call.rotary.as_ref().map(|rotary| rotary.at(positions)) else {
            return Ok(());
        };
        let query = call.query.reborrow().narrow(2, nope..nope + rope)?;
        self.device.rotate(&rotary, query)?;
        self.device.rotate(&rotary, call.rope.reborrow())
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
            return check_len("positions", own.len(), step.tokens, "one for each token");
        }
        if step.longest > positions {
            let accepted = format!("at least {}, the step's longest request", step.longest);
            let given = format!("tables of {positions} positions");
            return Err(Error::argument("rotary", given, accepted));
        }
        Ok(())
    }
}

/// The call for tensors that are already rotated, or for a cache write that rotates them.
fn reading<'a, D: Device>(call: &'a mut Unrotated<'_, D>, rotation: Rotating) -> LayerCall<'a, D> {
    let mut call = call.reading(TensorMut::as_ref);
    call.rotary = call.rotary.filter(|_| rotation == Rotating::OnTheWay);
    call
}
