//! One step of a layer.

use mla_runtime::backend::StepLimits;
use mla_runtime::device::Device;
use mla_runtime::layer::{SelectedLayer, SelectedWorkspace};

use super::workload::Workload;
use crate::error::CliError;

/// One step of a layer, before anything is allocated for it.
pub struct Step<D: Device> {
    pub workload: Workload,
    pub layer: SelectedLayer<D>,
    pub limits: StepLimits,
    pub seed: u32,
}

impl<D: Device> Step<D> {
    /// Returns a workspace that is prepared for the step.
    pub fn workspace(&self) -> Result<SelectedWorkspace<D>, CliError> {
        let mut workspace = self.layer.workspace(&self.limits)?;
        let problem = &self.layer.config().problem;
        let planned = self.workload.step(problem, workspace.limits())?;
        workspace.prepare(&self.layer, &planned)?;
        Ok(workspace)
    }
}
