//! A layer of the backends that were selected at run time.

use super::{MlaLayer, Workspace};
use crate::backend::{LayerConfig, SelectedDecode, SelectedPrefill};
use crate::device::Device;
use crate::select::{Selection, SelectionError, selected};

/// A layer of backends that a [`Selection`] chose. Each backend is behind one pointer.
pub type SelectedLayer<D> = MlaLayer<SelectedPrefill<D>, SelectedDecode<D>>;

/// The workspace of such layers.
pub type SelectedWorkspace<D> = Workspace<SelectedPrefill<D>, SelectedDecode<D>>;

impl Selection {
    /// Makes a layer of the selected backends on `device`.
    ///
    /// # Errors
    ///
    /// If a backend does not fit this device, which need not be the one of the selection. If a
    /// backend needs devices of another type, or cannot be made.
    pub fn layer<D: Device>(
        &self,
        device: &D,
        softmax_scale: f32,
    ) -> Result<SelectedLayer<D>, SelectionError> {
        self.layer_of(device, &self.config(softmax_scale))
    }

    /// Makes a layer with a configuration that contains more than [`config`](Self::config): a
    /// [query scaling](LayerConfig::query_scaling), or a rank's own part of a cache.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::layer`]. Also if a backend does not fit the configuration's problem.
    pub fn layer_of<D: Device>(
        &self,
        device: &D,
        config: &LayerConfig,
    ) -> Result<SelectedLayer<D>, SelectionError> {
        let [prefill, decode] = &self.entries;
        let prefill = selected(prefill, device, config)?;
        let decode = selected(decode, device, config)?;
        Ok(MlaLayer::new(device, config, prefill, decode)?)
    }
}
