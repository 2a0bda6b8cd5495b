//! Makes backends of a registry for one layer.

use crate::backend::{Entry, LayerConfig, SelectedDecode, SelectedPrefill};
use crate::device::Device;
use crate::select::{Registry, SelectionError};
use crate::spec::Phase;

impl Registry {
    /// Makes the prefill backend of this name for one layer on `device`. Calls go through one
    /// pointer.
    ///
    /// # Errors
    ///
    /// If the name is unknown, if the backend does not fit this layer on this device, if it needs
    /// devices of another type, or if it fails to start.
    pub fn instantiate_prefill<D: Device>(
        &self,
        name: &str,
        device: &D,
        config: &LayerConfig,
    ) -> Result<SelectedPrefill<D>, SelectionError> {
        let entry = self.get_on(device.target(), Phase::Prefill, name)?;
        selected(entry, device, config)
    }

    /// Makes the decode backend of this name for one layer on `device`. Calls go through one
    /// pointer.
    ///
    /// # Errors
    ///
    /// Same as [`instantiate_prefill`](Self::instantiate_prefill).
    pub fn instantiate_decode<D: Device>(
        &self,
        name: &str,
        device: &D,
        config: &LayerConfig,
    ) -> Result<SelectedDecode<D>, SelectionError> {
        let entry = self.get_on(device.target(), Phase::Decode, name)?;
        selected(entry, device, config)
    }
}

/// The entry's backend for one layer, unless a reason speaks against it. `S` is the selected
/// backend of the entry's phase.
pub(crate) fn selected<D: Device, S: 'static>(
    entry: &Entry,
    device: &D,
    config: &LayerConfig,
) -> Result<S, SelectionError> {
    let (phase, name, target) = (entry.spec.phase, entry.spec.name, device.target());
    let reasons = Registry::reasons_against(entry, target, &config.problem, true);
    if !reasons.is_empty() {
        return Err(SelectionError::Refused {
            phase,
            name,
            target,
            reasons: Box::new(reasons),
        });
    }
    match entry.make(device, config) {
        Some(made) => Ok(made?),
        None => Err(SelectionError::OtherDevice {
            phase,
            name,
            given: std::any::type_name::<D>(),
        }),
    }
}
