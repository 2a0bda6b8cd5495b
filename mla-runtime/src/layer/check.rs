//! Checks that refuse a call before anything is enqueued.

use super::staged::StagedStep;
use super::{LayerCall, MlaLayer, Weights, Workspace};
use crate::backend::{
    DecodeStage, PrefillStage, SlotLists, check_cache, check_gaps, check_lists, check_rows,
    check_sinks,
};
use crate::device::Device;
use crate::spec::{KeyLayout, QueryFormat};
use crate::tensor::{ArrayRef, CacheLayout, Memory, TensorRef};
use crate::{Error, Result};

impl<P: PrefillStage, D: DecodeStage<Device = P::Device>> MlaLayer<P, D> {
    /// Refuses a call that does not fit the prepared step.
    pub(super) fn check(
        &self,
        workspace: &Workspace<P, D>,
        call: &LayerCall<'_, P::Device>,
    ) -> Result<()> {
        self.check_tensors(workspace, call)?;
        self.check_lists(workspace, call.slot_lists.as_ref(), call.cache.layout())
    }

    /// Refuses a call of a part of the layer that does not fit the prepared step. Such a call takes
    /// only the rows of the step's tokens, in order.
    pub(super) fn check_packed(
        &self,
        workspace: &Workspace<P, D>,
        call: &LayerCall<'_, P::Device>,
    ) -> Result<()> {
        self.check(workspace, call)?;
        self.check_order(workspace)
    }

    /// Refuses a step whose tensors have other rows than those of its tokens in order.
    pub(crate) fn check_order(&self, workspace: &Workspace<P, D>) -> Result<()> {
        if workspace.step.is_packed() {
            return Ok(());
        }
        let given = "a step with padding or an order of the engine's own";
        let accepted = "rows in the order of the requests, without padding: `forward` takes others";
        Err(Error::argument("rows", given, accepted))
    }

    fn check_sinks(
        &self,
        workspace: &Workspace<P, D>,
        sinks: Option<&ArrayRef<'_, P::Device, f32>>,
    ) -> Result<()> {
        check_sinks(
            sinks,
            self.config.problem.heads as usize,
            self.decode.spec(),
        )?;
        if sinks.is_none() || self.device.scales_outputs() {
            return Ok(());
        }
        let why = "the device scales no outputs, as the expanded path needs it for sinks";
        self.check_absorbed_only(workspace, "sinks", why)
    }

    fn check_gate(&self, tokens: usize, gate: Option<&TensorRef<'_, P::Device>>) -> Result<()> {
        let Some(gate) = gate.map(TensorRef::layout) else {
            return Ok(());
        };
        if !self.device.scales_outputs() {
            let accepted = "absent: the device scales no outputs";
            return Err(Error::argument("gate", "present", accepted));
        }
        let problem = &self.config.problem;
        let [heads, _, _, _, v] = problem.extents();
        let width = if gate.shape[2] == 1 { 1 } else { v };
        gate.require("gate", problem.dtype, [tokens, heads, width])?;
        self.device.check_tensor("gate", gate)
    }

    /// Refuses a use of `field` in a step with tokens on the expanded path, which does not support
    /// it.
    fn check_absorbed_only(
        &self,
        workspace: &Workspace<P, D>,
        field: &'static str,
        why: &str,
    ) -> Result<()> {
        let expanded = workspace.step.expanded_tokens();
        if expanded == 0 {
            return Ok(());
        }
        let given = format!("present, with {expanded} tokens on the expanded path");
        let accepted = format!(
            "absent: {why}. A threshold of u32::MAX keeps all requests on the absorbed path"
        );
        Err(Error::argument(field, given, accepted))
    }

    pub(crate) fn check_lists(
        &self,
        workspace: &Workspace<P, D>,
        lists: Option<&SlotLists<'_, P::Device>>,
        cache: &CacheLayout,
    ) -> Result<()> {
        let step = &workspace.step;
        // Tokens on the expanded path attend to all that they see.
        let tokens = [step.absorbed_tokens, step.tokens];
        if let Some(lists) = lists {
            self.check_lists_memory(lists)?;
        }
        check_lists("slot_lists", lists, tokens, &self.config.problem)?;
        let Some(lists) = lists else {
            return Ok(());
        };
        if ![0, step.dense_within()].contains(&lists.dense_within) {
            let accepted = format!("{}, as the step has it, or 0", step.dense_within());
            let given = lists.dense_within;
            return Err(Error::argument("slot_lists.dense_within", given, accepted));
        }
        let lists = lists.shorten().with_dense_within(step.dense_within());
        lists.check(self.decode.spec(), cache)?;
        if lists.second.is_none() {
            return Ok(());
        }
        let why = "the expanded path attends to one cache";
        self.check_absorbed_only(workspace, "slot_lists.second", why)
    }

    /// Refuses tensors that do not fit the prepared step. Lists of slots are not checked, because
    /// an indexer has yet to make them.
    pub(crate) fn check_tensors(
        &self,
        workspace: &Workspace<P, D>,
        call: &LayerCall<'_, P::Device>,
    ) -> Result<()> {
        workspace.check(self)?;
        let step = &workspace.step;
        step.check_prepared()?;
        self.check_memory(call)?;
        self.check_shapes(step.tokens, call)?;
        let cache = call.cache.layout();
        check_cache(cache, &self.config.problem, self.decode.spec())?;
        if step.pages_end > cache.pages {
            return Err(Error::argument(
                "block_tables",
                format!("page {}", step.pages_end - 1),
                format!("below the cache's {} pages", cache.pages),
            ));
        }
        if let Some(rotary) = &call.rotary {
            self.check_rotation(step, rotary)?;
            if step.expanded_tokens() > 0 {
                return Err(Error::argument(
                    "rotary",
                    format!(
                        "with {} tokens on the expanded path",
                        step.expanded_tokens()
                    ),
                    "none, and rotated queries and keys: only the absorbed path can leave it to \
                     the cache write. `forward_unrotated` takes any step",
                ));
            }
        }
        self.check_places(step, call)?;
        self.check_sinks(workspace, call.sinks.as_ref())?;
        self.check_gate(step.tokens, call.gate.as_ref())
    }

    /// Refuses tensors in memory that the device's work must not access. Lists are checked when
    /// they exist.
    pub(super) fn check_memory(&self, call: &LayerCall<'_, P::Device>) -> Result<()> {
        let device = &self.device;
        device.check_bytes("W_kv_b", call.weights.kv.bytes())?;
        device.check_bytes("query", call.query.bytes())?;
        device.check_bytes("latent", call.latent.bytes())?;
        device.check_bytes("rope", call.rope.bytes())?;
        device.check_bytes("cache", call.cache.as_ref().bytes())?;
        device.check_bytes("cache (rope)", call.cache.as_ref().rope_bytes())?;
        device.check_bytes("out", call.out.as_ref().bytes())?;
        if let Some(lse) = &call.lse {
            device.check_bytes("lse", lse.as_ref().bytes())?;
        }
        if let Some(sinks) = &call.sinks {
            device.check_bytes("sinks", sinks.bytes())?;
        }
        if let Some(gate) = &call.gate {
            device.check_bytes("gate", gate.bytes())?;
        }
        match &call.rotary {
            Some(rotary) => rotary.check_memory(device),
            None => Ok(()),
        }
    }

    fn check_lists_memory(&self, lists: &SlotLists<'_, P::Device>) -> Result<()> {
        let device = &self.device;
        device.check_bytes("slot_lists.slots", lists.slots.bytes())?;
        if let Some(counts) = &lists.counts {
            device.check_bytes("slot_lists.counts", counts.bytes())?;
        }
        let Some((cache, slots, _)) = &lists.second else {
            return Ok(());
        };
        device.check_bytes("slot_lists.second.cache", cache.bytes())?;
        let rope = cache.rope_bytes();
        device.check_bytes("slot_lists.second.cache (rope)", rope)?;
        device.check_bytes("slot_lists.second.slots", slots.bytes())
    }

    /// Refuses tensors whose shapes and dtypes are not those of `tokens` tokens of the problem.
    pub(super) fn check_shapes(
        &self,
        tokens: usize,
        call: &LayerCall<'_, P::Device>,
    ) -> Result<()> {
        let problem = &self.config.problem;
        let [heads, latent, nope, rope, v] = problem.extents();
        for (field, layout, shape) in [
            ("query", call.query.layout(), [tokens, heads, nope + rope]),
            ("latent", call.latent.layout(), [tokens, 1, latent]),
            ("rope", call.rope.layout(), [tokens, 1, rope]),
            ("out", call.out.layout(), [tokens, heads, v]),
        ] {
            layout.require(field, problem.dtype, shape)?;
            self.device.check_tensor(field, layout)?;
        }
        self.check_weights(&call.weights)?;
        match &call.lse {
            Some(lse) => lse.layout().require("lse", heads, tokens),
            None => Ok(()),
        }
    }

    /// Refuses weights made for another configuration, even if other heads have the same total
    /// number of columns.
    fn check_weights(&self, weights: &Weights<'_, P::Device>) -> Result<()> {
        let problem = &self.config.problem;
        let [heads, latent, nope, _, v] = problem.extents();
        let columns = heads * (nope + v);
        let kv = weights.kv.layout();
        kv.require("W_kv_b", problem.dtype, [1, latent, columns])?;
        let [theirs, their_nope, _] = weights.queries.shape();
        let [_, _, their_v] = weights.values.shape();
        if (theirs, their_nope, their_v) == (heads, nope, v) {
            return Ok(());
        }
        let shown = |heads, nope, v| format!("made for {heads} heads of P + V = {nope} + {v}");
        Err(Error::argument(
            "W_kv_b",
            shown(theirs, their_nope, their_v),
            shown(heads, nope, v),
        ))
    }

    /// Refuses tensors whose layout a backend or a product of the step does not support.
    fn check_places(&self, step: &StagedStep, call: &LayerCall<'_, P::Device>) -> Result<()> {
        let (prefill, decode) = (self.prefill.spec(), self.decode.spec());
        let [_, _, nope, rope, ..] = self.config.problem.extents();
        let first = step.absorbed_tokens;
        let (absorbed, expanded) = (0..first, first..step.tokens);
        let operand =
            |field, tensor: TensorRef<'_, P::Device>| self.device.check_operand(field, tensor);
        let (query, out) = (call.query.shorten(), call.out.as_ref());
        check_rows(&call.cache.as_ref(), decode.alignment)?;
        if !absorbed.is_empty() {
            let query = query.narrow(0, absorbed.clone())?;
            operand("query", query.narrow(2, 0..nope)?.transpose(0, 1))?;
            operand("W_kv_b", call.weights.queries)?;
            operand("W_kv_b", call.weights.values)?;
            operand("out", out.narrow(0, absorbed)?.transpose(0, 1))?;
            // If there is a rotation or another query format, the backend reads rotary parts that
            // the device writes.
            if decode.query_format == QueryFormat::Split && call.rotary.is_none() {
                let rope = query.narrow(2, nope..nope + rope)?;
                rope.require_aligned("query", decode.alignment as usize)?;
            }
        }
        if !expanded.is_empty() {
            let alignment = prefill.alignment as usize;
            let query = query.narrow(0, expanded.clone())?;
            query.require_aligned("query", alignment)?;
            let latent = call.latent.narrow(0, expanded.clone())?;
            operand("latent", latent.transpose(0, 1))?;
            operand("W_kv_b", call.weights.kv)?;
            operand("W_kv_b", call.weights.keys)?;
            operand("W_kv_b", call.weights.values)?;
            if prefill.key_layout == KeyLayout::Split {
                // The rotary part has one head, so the distance between heads does not matter.
                let rope = call.rope.narrow(0, expanded.clone())?.broadcast(1, 1)?;
                rope.require_aligned("rope", alignment)?;
            }
            let out = out.narrow(0, expanded)?;
            check_gaps(out.layout(), prefill)?;
            out.require_aligned("out", alignment)?;
        }
        Ok(())
    }
}
