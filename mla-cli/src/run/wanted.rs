//! A batch and its layer, as arguments ask for them.

use mla_runtime::Result;
use mla_runtime::backend::StepLimits;
use mla_runtime::device::Device;
use mla_runtime::plan::memory::{self, MemoryNeeds, MemoryPlan};
use mla_runtime::select::{Registry, Selection, SelectionRequest};
use mla_runtime::spec::Problem;

use super::batch_args::BatchArgs;
use super::step::Step;
use super::workload::{self, Workload};
use crate::args::Model;
use crate::batch::BatchSpec;
use crate::device::About;
use crate::error::CliError;

/// The requested step.
pub struct Wanted<'a> {
    pub model: &'a Model,
    pub on: &'a BatchArgs,
    /// The problem, before the batch says how its query lengths differ.
    pub problem: Problem,
    /// The maximum number of new tokens of a request on the absorbed path.
    pub threshold: u32,
    /// Rows of the context workspace, or the customary number if absent.
    pub rows: Option<u32>,
    /// Backends by name, or the best that fit if absent.
    pub prefill: Option<&'a str>,
    pub decode: Option<&'a str>,
}

impl Wanted<'_> {
    /// Makes the step, and plans its memory with what `needs` adds to the layer's. This fails if no
    /// backend fits, or if the step takes more memory than there is.
    pub fn step<D: Device>(
        &self,
        device: &D,
        about: &About,
        needs: impl FnOnce(MemoryNeeds, &StepLimits) -> Result<MemoryNeeds>,
    ) -> std::result::Result<(Step<D>, Selection, MemoryPlan), CliError> {
        let (on, problem) = (self.on, self.problem);
        let spec: BatchSpec = on.batch.parse().map_err(CliError::batch_spec)?;
        about.check_memory("--batch", &spec, workload::bytes(&spec, &problem))?;
        let workload = Workload::new(&spec, self.threshold, problem.page_size, on.seed)?;
        let problem = problem.with_query_len(workload.query_len);
        let mut request = SelectionRequest::new(device.target(), problem);
        request.prefill = self.prefill.map(str::to_owned);
        request.decode = self.decode.map(str::to_owned);
        let selection = Registry::linked()?.select(&request)?;
        let layer = selection.layer(device, self.model.config.softmax_scale() as f32)?;
        let limits = workload.limits(self.rows)?;
        let of_layer = layer.memory_needs(&limits, 1, workload.pages)?;
        let memory = memory::plan(&needs(of_layer, &limits)?)?;
        about.check_plan("--batch", &spec, &limits, &memory)?;
        let step = Step {
            workload,
            layer,
            limits,
            seed: on.seed,
        };
        Ok((step, selection, memory))
    }
}
