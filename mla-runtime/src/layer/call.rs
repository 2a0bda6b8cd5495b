//! The arguments of a call of the layer.

use super::Weights;
use crate::backend::SlotLists;
use crate::device::{CacheRows, Device};
use crate::setters::options;
use crate::tensor::{ArrayRef, CacheMut, LseMut, Rotary, TensorMut, TensorRef};

/// One call of a layer: views of the engine's tensors for the T tokens of the prepared step.
///
/// V is the view of queries and rotary keys. It is a [`TensorMut`] in a call of
/// [`MlaLayer::forward_unrotated`](super::MlaLayer::forward_unrotated). Some vectors are then
/// rotated in place, and others only in the copy that goes to the cache or the attention. This
/// depends on the step. After the call, `query` and `rope` may be rotated or not.
#[non_exhaustive]
pub struct LayerCall<'a, D: Device, V = TensorRef<'a, D>> {
    /// The layer's weights.
    pub weights: Weights<'a, D>,
    /// `[T, H, P+R]`. The rotary part must already be rotated, unless `rotary` is given.
    pub query: V,
    /// The new tokens' normalised latents, `[T, 1, L]`.
    pub latent: TensorRef<'a, D>,
    /// The new tokens' rotary keys, `[T, 1, R]`. They must already be rotated, unless `rotary` is
    /// given.
    pub rope: V,
    /// The layer's cache.
    pub cache: CacheMut<'a, D>,
    /// `[T, H, V]`.
    pub out: TensorMut<'a, D>,
    /// `[H, T]`, if the caller needs the log-sum-exp. It is −inf for a token that attends to
    /// nothing.
    pub lse: Option<LseMut<'a, D>>,
    /// The slots that each token attends to. They must be given if the problem is sparse, and
    /// absent otherwise. An [`Indexer`](crate::indexer::Indexer) makes them.
    pub slot_lists: Option<SlotLists<'a, D>>,
    /// A score for each head that takes part in the softmax without a value, as in
    /// [`DecodeCall::sinks`](crate::backend::DecodeCall::sinks). On the expanded path, sinks take a
    /// device that [scales outputs](Device::scales_outputs).
    pub sinks: Option<ArrayRef<'a, D, f32>>,
    /// The output's gate before its sigmoid, in the problem's dtype: `[T, H, V]`, or `[T, H, 1]`
    /// with one value per head. Outputs are multiplied by `1 / (1 + e^(−gate))`. Like lists of
    /// slots, the gate's tokens are in the order of the step.
    /// [`MlaLayer::pack_rows`](super::MlaLayer::pack_rows) brings other rows into this order. A
    /// gate takes a device that [scales outputs](Device::scales_outputs).
    pub gate: Option<TensorRef<'a, D>>,
    /// The tables of the rotation of queries and keys. If the positions are not those of the step,
    /// it also has the caller's positions. The cache write applies it, in steps whose tokens are
    /// all on the absorbed path. (The expanded path reads tensors that are already rotated.)
    /// [`MlaLayer::forward_unrotated`](super::MlaLayer::forward_unrotated) accepts any step.
    pub rotary: Option<Rotary<'a, D>>,
}

impl<'a, D: Device> LayerCall<'a, D> {
    /// A call without a log-sum-exp, slot lists, sinks, a gate or a rotation. The fields describe
    /// the shapes.
    pub const fn new(
        weights: Weights<'a, D>,
        query: TensorRef<'a, D>,
        [latent, rope]: [TensorRef<'a, D>; 2],
        cache: CacheMut<'a, D>,
        out: TensorMut<'a, D>,
    ) -> Self {
        Self::of(weights, query, latent, rope, cache, out)
    }
}

impl<'a, D: Device> LayerCall<'a, D, TensorMut<'a, D>> {
    /// The same on queries and rotary keys that `rotary` has yet to rotate.
    pub fn unrotated(
        weights: Weights<'a, D>,
        query: TensorMut<'a, D>,
        latent: TensorRef<'a, D>,
        rope: TensorMut<'a, D>,
        rotary: Rotary<'a, D>,
        cache: CacheMut<'a, D>,
        out: TensorMut<'a, D>,
    ) -> Self {
        Self::of(weights, query, latent, rope, cache, out).with_rotary(rotary)
    }
}

impl<'a, D: Device, V> LayerCall<'a, D, V> {
    pub(super) const fn of(
        weights: Weights<'a, D>,
        query: V,
        latent: TensorRef<'a, D>,
        rope: V,
        cache: CacheMut<'a, D>,
        out: TensorMut<'a, D>,
    ) -> Self {
        Self {
            weights,
            query,
            latent,
            rope,
            cache,
            out,
            lse: None,
            slot_lists: None,
            sinks: None,
            gate: None,
            rotary: None,
        }
    }

    options! {
        with_lse(lse: LseMut<'a, D>);
        with_slot_lists(slot_lists: SlotLists<'a, D>);
        with_sinks(sinks: ArrayRef<'a, D, f32>);
        with_gate(gate: TensorRef<'a, D>);
        with_rotary(rotary: Rotary<'a, D>);
    }

    /// The same call on tensors that are read. `read` gives a view of such a tensor.
    pub(crate) fn reading<'b>(
        &'b mut self,
        read: impl Fn(&'b V) -> TensorRef<'b, D>,
    ) -> LayerCall<'b, D> {
        LayerCall {
            weights: self.weights.shorten(),
            query: read(&self.query),
            latent: self.latent.shorten(),
            rope: read(&self.rope),
            cache: self.cache.reborrow(),
            out: self.out.reborrow(),
            lse: self.lse.as_mut().map(LseMut::reborrow),
            slot_lists: self.slot_lists.as_ref().map(SlotLists::shorten),
            sinks: self.sinks.as_ref().map(ArrayRef::shorten),
            gate: self.gate.as_ref().map(TensorRef::shorten),
            rotary: self.rotary.as_ref().map(Rotary::shorten),
        }
    }
}

impl<D: Device> LayerCall<'_, D> {
    /// Returns the rows for the cache write, with these slots and these positions.
    pub(super) fn rows<'a>(
        &'a mut self,
        slots: ArrayRef<'a, D, i64>,
        positions: ArrayRef<'a, D, i64>,
    ) -> CacheRows<'a, D> {
        let rotary = self.rotary.as_ref().map(|rotary| rotary.at(positions));
        let (latent, rope) = (self.latent.shorten(), self.rope.shorten());
        CacheRows::new(latent, rope, slots, self.cache.reborrow()).with_rotary(rotary)
    }
}
