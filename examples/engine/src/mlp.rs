//! The part of a decoder layer after its attention: a gated MLP, or a mixture of experts as in
//! DeepSeek-V3.
//!
//! Every expert computes every token. Their outputs are summed with the router's weights, and most
//! weights are 0. A step therefore enqueues the same launches for any routing of its tokens, as a
//! graph needs it. A fast engine would sort the tokens by expert and use grouped GEMMs.

use mla_runtime::Result;
use mla_runtime::prelude::*;

use crate::config::{Config, Routing};
use crate::memory::Scratch;
use crate::operations::Operations;
use crate::tensor::Tensor;

/// The weights of a gated MLP, or those of several MLPs one after the other, each `[in, out]`.
pub struct Gated<D: Device> {
    count: usize,
    inner: usize,
    /// The weights of both factors, side by side.
    gate_up: Tensor<D>,
    down: Tensor<D>,
}

/// A mixture of experts.
pub struct Experts<D: Device> {
    routing: Routing,
    /// The router's weights, with a column for each expert.
    router: Tensor<D>,
    /// A bias of scores for choosing experts. The experts' weights do not include it.
    bias: Tensor<D>,
    routed: Gated<D>,
    shared: Gated<D>,
}

/// The part of a decoder layer after its attention.
pub enum Mlp<D: Device> {
    /// One MLP for all tokens.
    Dense(Gated<D>),
    /// MLPs of which a router chooses for each token.
    Experts(Experts<D>),
}

impl<D: Operations> Gated<D> {
    fn random(
        device: &D,
        random: &mut fastrand::Rng,
        [count, hidden, inner]: [usize; 3],
    ) -> Result<Self> {
        let mut matrices = |from, to| Tensor::matrices(device, random, [count, from, to]);
        Ok(Self {
            count,
            inner,
            gate_up: matrices(hidden, 2 * inner)?,
            down: matrices(inner, hidden)?,
        })
    }

    /// Enqueues the outputs of all MLPs for `normed`, `[T, hidden]`, to `[count, T, hidden]`.
    fn enqueue(
        &self,
        device: &D,
        [tokens, hidden]: [usize; 2],
        [normed, gate_up, inside, to]: [&mut Tensor<D>; 4],
    ) -> Result<()> {
        let Self { count, inner, .. } = *self;
        let normed = normed.view([1, tokens, hidden])?.broadcast(0, count)?;
        let weights = self.gate_up.view([count, hidden, 2 * inner])?;
        device.gemm(
            normed,
            weights,
            gate_up.view_mut([count, tokens, 2 * inner])?,
        )?;
        let rows = count * tokens;
        device.silu_mul(
            gate_up.view([rows, 1, 2 * inner])?,
            inside.view_mut([rows, 1, inner])?,
        )?;
        let inside = inside.view([count, tokens, inner])?;
        let weights = self.down.view([count, inner, hidden])?;
        device.gemm(inside, weights, to.view_mut([count, tokens, hidden])?)
    }
}

impl<D: Operations> Mlp<D> {
    /// Makes the part of decoder layer `layer` with random weights.
    ///
    /// # Errors
    ///
    /// If the device has no memory left.
    pub fn random(
        device: &D,
        config: &Config,
        layer: usize,
        random: &mut fastrand::Rng,
    ) -> Result<Self> {
        let hidden = config.widths.hidden_size;
        let Some(routing) = config
            .routing
            .filter(|routing| layer >= routing.first_layer)
        else {
            let shape = [1, hidden, config.widths.intermediate_size];
            return Gated::random(device, random, shape).map(Self::Dense);
        };
        let Routing { experts, inner, .. } = routing;
        Ok(Self::Experts(Experts {
            routing,
            router: Tensor::matrices(device, random, [1, hidden, experts])?,
            bias: Tensor::random(device, experts, random, [0.0, 0.1])?,
            routed: Gated::random(device, random, [experts, hidden, inner])?,
            shared: Gated::random(device, random, [1, hidden, routing.shared_inner()])?,
        }))
    }

    /// Enqueues the output for `scratch.normed`, `[T, hidden]`, to `scratch.delta`.
    ///
    /// # Errors
    ///
    /// If the device fails.
    pub fn enqueue(&self, device: &D, s: &mut Scratch<D>, shape: [usize; 2]) -> Result<()> {
        let [tokens, hidden] = shape;
        let experts = match self {
            Self::Dense(mlp) => {
                let room = [&mut s.normed, &mut s.gate_up, &mut s.inside, &mut s.delta];
                return mlp.enqueue(device, shape, room);
            }
            Self::Experts(experts) => experts,
        };
        let count = experts.routing.experts;
        let router = experts.router.view([1, hidden, count])?;
        let logits = s.router_logits.view_mut([1, tokens, count])?;
        device.gemm(s.normed.view([1, tokens, hidden])?, router, logits)?;
        let by_token = [tokens, 1, count];
        device.route(
            &experts.routing,
            s.router_logits.view(by_token)?,
            experts.bias.view([1, 1, count])?,
            s.expert_weights.view_mut(by_token)?,
        )?;
        let room = [
            &mut s.normed,
            &mut s.gate_up,
            &mut s.inside,
            &mut s.expert_out,
        ];
        experts.routed.enqueue(device, shape, room)?;
        let room = [&mut s.normed, &mut s.gate_up, &mut s.inside, &mut s.delta];
        experts.shared.enqueue(device, shape, room)?;
        device.add_weighted(
            s.expert_out.view([count, tokens, hidden])?,
            s.expert_weights.view(by_token)?,
            s.delta.view_mut([tokens, 1, hidden])?,
        )
    }
}
