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
        prefill_of(
            self.get_on(device.target(), Phase::Prefill, name)?,
            device,
            config,
        )
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
        decode_of(
            self.get_on(device.target(), Phase::Decode, name)?,
            device,
            config,
        )
    }
}

/// The entry's prefill backend for one layer, unless a reason speaks against it.
pub(crate) fn prefill_of<D: Device>(
    entry: &Entry,
    device: &D,
    config: &LayerConfig,
) -> Result<SelectedPrefill<D>, SelectionError> {
    validate(entry, device, config)?;
    match entry.make_prefill(device, config) {
        Some(made) => Ok(made?),
        None => Err(other_device::<D>(entry)),
    }
}

/// The entry's decode backend for one layer, unless a reason speaks against it.
pub(crate) fn decode_of<D: Device>(
    entry: &Entry,
    device: &D,
    config: &LayerConfig,
) -> Result<SelectedDecode<D>, SelectionError> {
    validate(entry, device, config)?;
    match entry.make_decode(device, config) {
        Some(made) => Ok(made?),
        None => Err(other_device::<D>(entry)),
    }
}

fn validate<D: Device>(
    entry: &Entry,
    device: &D,
    config: &LayerConfig,
) -> Result<(), SelectionError> {
    let target = device.target();
    let reasons = Registry::reasons_against(entry, target, &config.problem, true);
    if reasons.is_empty() {
        return Ok(());
    }
    Err(SelectionError::Refused {
        phase: entry.spec.phase,
        name: entry.spec.name,
        target,
        reasons: Box::new(reasons),
    })
}

#[cold]
fn other_device<D: Device>(entry: &Entry) -> SelectionError {
    SelectionError::OtherDevice {
        phase: entry.spec.phase,
        name: entry.spec.name,
        given: std::any::type_name::<D>(),
    }
}
