//! Calls whose tensors have rows in the engine's own order, or padding.

use std::ops::Range;

use super::packed::{Packed, PackedTensors};
use super::rotation::Unrotated;
use super::{LayerCall, MlaLayer, Workspace};
use crate::backend::{DecodeStage, PrefillStage, SlotLists};
use crate::device::Device;
use crate::model::DType;
use crate::tensor::{ArrayRef, Layout, LseLayout, LseRef, Memory, Rotary, TensorMut, TensorRef};
use crate::{Error, Result};

impl<P: PrefillStage, D: DecodeStage<Device = P::Device>> MlaLayer<P, D> {
    /// Copies the rows of the prepared step's tokens into `[tokens, …]`, in the order of the step.
    /// The source has the rows of a call, in the engine's own order or padded. The indexer of a
    /// sparse layer takes its tensors in the order of the step. The call only enqueues.
    ///
    /// # Errors
    ///
    /// If the workspace belongs to another layer or is not prepared, if a tensor has other rows, if
    /// heads, width or dtype of the tensors differ, or if the device fails.
    pub fn pack_rows(
        &self,
        workspace: &Workspace<P, D>,
        from: TensorRef<'_, P::Device>,
        to: TensorMut<'_, P::Device>,
    ) -> Result<()> {
        workspace.check(self)?;
        let step = &workspace.step;
        step.check_prepared()?;
        let [_, heads, width] = from.shape();
        let (dtype, rows) = (from.dtype(), step.call_rows());
        from.layout().require("from", dtype, [rows, heads, width])?;
        to.layout()
            .require("to", dtype, [step.tokens, heads, width])?;
        match step.rows_in_order() {
            Some(rows) => self.device.copy(from.narrow(0, rows)?, to),
            None => {
                let [tokens, _] = step.row_index(P::Device::bytes(&workspace.arrays))?;
                self.device.scatter_rows(from, tokens, to)
            }
        }
    }

    /// Runs [`forward`](Self::forward) for a step whose tensors have other rows than those of its
    /// tokens in order.
    pub(super) fn forward_rows(
        &self,
        workspace: &mut Workspace<P, D>,
        call: LayerCall<'_, P::Device>,
    ) -> Result<()> {
        self.check_call_rows(workspace, &call)?;
        if let Some(rows) = workspace.step.rows_in_order() {
            let mut call = call.rows_in_order(rows, |it, axis, rows| it.narrow(axis, rows))?;
            self.check(workspace, &call)?;
            return self.enqueue(workspace, &mut call);
        }
        self.forward_packed(workspace, call, false)
    }

    /// Runs [`forward_unrotated`](Self::forward_unrotated) for such a step.
    pub(super) fn forward_rows_unrotated(
        &self,
        workspace: &mut Workspace<P, D>,
        mut call: Unrotated<'_, P::Device>,
    ) -> Result<()> {
        self.check_call_rows(workspace, &call.reading(TensorMut::as_ref))?;
        if let Some(rows) = workspace.step.rows_in_order() {
            let mut call = call.rows_in_order(rows, TensorMut::narrow)?;
            self.check_unrotated(workspace, &mut call)?;
            return self.enqueue_unrotated(workspace, call);
        }
        self.forward_packed(workspace, call.reading(TensorMut::as_ref), true)
    }

    /// Runs a call on copies of its rows in the order of the step, and copies the results back.
    fn forward_packed(
        &self,
        workspace: &mut Workspace<P, D>,
        call: LayerCall<'_, P::Device>,
        unrotated: bool,
    ) -> Result<()> {
        let Some(mut packed) = workspace.packed.take() else {
            let accepted = "one whose last call did not end in a panic";
            let given = "one without memory for rows";
            return Err(Error::argument("workspace", given, accepted));
        };
        let done = self.forward_in(workspace, &mut packed, call, unrotated);
        workspace.packed = Some(packed);
        done
    }

    fn forward_in(
        &self,
        workspace: &mut Workspace<P, D>,
        packed: &mut Packed<P::Device>,
        mut own: LayerCall<'_, P::Device>,
        unrotated: bool,
    ) -> Result<()> {
        let tokens = workspace.step.tokens;
        let mut packed = packed.tensors(&workspace.plan, &self.config.problem, tokens)?;
        // All checks come first, so that nothing is enqueued if one fails.
        {
            let mut call = packed.call(&mut own);
            match unrotated {
                true => self.check_unrotated(workspace, &mut call)?,
                false => self.check(workspace, &call.reading(TensorMut::as_ref))?,
            }
        }
        self.device
            .profile_range(c"mla: bring rows into order", || {
                self.gather_rows(workspace, &own, &mut packed)
            })?;
        {
            let mut call = packed.call(&mut own);
            match unrotated {
                true => self.enqueue_unrotated(workspace, call)?,
                false => self.enqueue(workspace, &mut call.reading(TensorMut::as_ref))?,
            }
        }
        self.device.profile_range(c"mla: bring results back", || {
            self.scatter_results(workspace, own, &packed)
        })
    }

    fn gather_rows(
        &self,
        workspace: &Workspace<P, D>,
        own: &LayerCall<'_, P::Device>,
        packed: &mut PackedTensors<'_, P::Device>,
    ) -> Result<()> {
        let arrays = P::Device::bytes(&workspace.arrays);
        let [tokens, _] = workspace.step.row_index(arrays)?;
        for (from, to) in [
            (&own.query, &mut packed.query),
            (&own.latent, &mut packed.latent),
            (&own.rope, &mut packed.rope),
        ] {
            self.device
                .scatter_rows(from.shorten(), tokens, to.reborrow())?;
        }
        Ok(())
    }

    fn scatter_results(
        &self,
        workspace: &Workspace<P, D>,
        own: LayerCall<'_, P::Device>,
        packed: &PackedTensors<'_, P::Device>,
    ) -> Result<()> {
        let arrays = P::Device::bytes(&workspace.arrays);
        let [_, rows] = workspace.step.row_index(arrays)?;
        self.device
            .scatter_rows(packed.out.as_ref(), rows, own.out)?;
        let Some(lse) = own.lse else { return Ok(()) };
        let from = packed.lse.as_ref();
        let layout = lse_rows(from.layout());
        let from = TensorRef::<P::Device>::new(LseRef::bytes(&from), layout)?;
        let layout = lse_rows(lse.layout());
        let to = TensorMut::new(lse.into_bytes(), layout)?;
        self.device.scatter_rows(from, rows, to)
    }

    /// Refuses a call whose tensors do not have the rows that the step declares, and positions
    /// whose order is not known.
    fn check_call_rows(
        &self,
        workspace: &Workspace<P, D>,
        call: &LayerCall<'_, P::Device>,
    ) -> Result<()> {
        workspace.check(self)?;
        let step = &workspace.step;
        step.check_prepared()?;
        self.check_memory(call)?;
        self.check_shapes(step.call_rows(), call)?;
        let rotary = call.rotary.as_ref();
        if rotary.is_some_and(|rotary| rotary.positions.is_some()) {
            let given = "of the caller's own, for rows in an order of the engine's own";
            let accepted = "none: each token then has its position in its request";
            return Err(Error::argument("rotary.positions", given, accepted));
        }
        Ok(())
    }
}

impl<D: Device> PackedTensors<'_, D> {
    /// The engine's `own` call on these tensors.
    fn call<'a>(&'a mut self, own: &'a mut LayerCall<'_, D>) -> Unrotated<'a, D> {
        LayerCall {
            weights: own.weights.shorten(),
            query: self.query.reborrow(),
            latent: self.latent.as_ref(),
            rope: self.rope.reborrow(),
            cache: own.cache.reborrow(),
            out: self.out.reborrow(),
            lse: own.lse.as_ref().map(|_| self.lse.reborrow()),
            slot_lists: own.slot_lists.as_ref().map(SlotLists::shorten),
            sinks: own.sinks.as_ref().map(ArrayRef::shorten),
            gate: own.gate.as_ref().map(TensorRef::shorten),
            rotary: own.rotary.as_ref().map(Rotary::shorten),
        }
    }
}

/// Views a log-sum-exp `[H, T]` as a tensor `[T, H, 1]`.
fn lse_rows(layout: LseLayout) -> Layout {
    Layout {
        dtype: DType::F32,
        shape: [layout.tokens, layout.heads, 1],
        strides: [1, layout.row_stride, 1],
    }
}

impl<'a, D: Device, V> LayerCall<'a, D, V> {
    /// The call on these rows of its tensors. `narrow` cuts queries and rotary keys.
    fn rows_in_order(
        self,
        rows: Range<usize>,
        narrow: impl Fn(V, usize, Range<usize>) -> Result<V>,
    ) -> Result<Self> {
        Ok(Self {
            query: narrow(self.query, 0, rows.clone())?,
            latent: self.latent.narrow(0, rows.clone())?,
            rope: narrow(self.rope, 0, rows.clone())?,
            out: self.out.narrow(0, rows.clone())?,
            lse: self.lse.map(|lse| lse.tokens(rows)).transpose()?,
            ..self
        })
    }
}
