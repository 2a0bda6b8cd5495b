//! The operations of a model besides attention and GEMMs.

mod cpu;
#[cfg(feature = "gpu")]
mod cuda;

use mla_runtime::Result;
use mla_runtime::prelude::*;

use crate::config::Routing;

/// A device that the engine runs on. Rows are `[T, 1, W]`.
pub trait Operations: Device {
    /// The dtype in which the model is computed.
    const DTYPE: DType;

    /// Opens the device.
    ///
    /// # Errors
    ///
    /// If this machine has none.
    fn open() -> Result<Self>;

    /// Computes `to = from / √(mean(from²) + eps) · weight`.
    ///
    /// # Errors
    ///
    /// If the device fails.
    fn norm(
        &self,
        from: TensorRef<'_, Self>,
        weight: TensorRef<'_, Self>,
        eps: f32,
        to: TensorMut<'_, Self>,
    ) -> Result<()>;

    /// Computes `to += from`.
    ///
    /// # Errors
    ///
    /// If the device fails.
    fn add(&self, from: TensorRef<'_, Self>, to: TensorMut<'_, Self>) -> Result<()>;

    /// Computes `to = silu(from[.., ..W]) · from[.., W..]`.
    ///
    /// # Errors
    ///
    /// If the device fails.
    fn silu_mul(&self, from: TensorRef<'_, Self>, to: TensorMut<'_, Self>) -> Result<()>;

    /// Computes a row of all experts' weights from a row of the router's logits, see
    /// [`Routing::weigh`].
    ///
    /// # Errors
    ///
    /// If the device fails.
    fn route(
        &self,
        routing: &Routing,
        logits: TensorRef<'_, Self>,
        bias: TensorRef<'_, Self>,
        weights: TensorMut<'_, Self>,
    ) -> Result<()>;

    /// Computes `to[t] += Σ weights[t][e] · from[e][t]`, with `from` `[E, T, W]`.
    ///
    /// # Errors
    ///
    /// If the device fails.
    fn add_weighted(
        &self,
        from: TensorRef<'_, Self>,
        weights: TensorRef<'_, Self>,
        to: TensorMut<'_, Self>,
    ) -> Result<()>;

    /// Copies row `ids[t]` of `from` to row t of `to`.
    ///
    /// # Errors
    ///
    /// If the device fails.
    fn gather(
        &self,
        from: TensorRef<'_, Self>,
        ids: Self::Bytes<'_>,
        to: TensorMut<'_, Self>,
    ) -> Result<()>;

    /// Computes the index of each row's largest element. Of equal elements the first counts.
    ///
    /// # Errors
    ///
    /// If the device fails.
    fn argmax(&self, from: TensorRef<'_, Self>, to: Self::BytesMut<'_>) -> Result<()>;
}
