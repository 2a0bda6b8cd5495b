//! A batch and its layer: everything that is decided before anything is allocated.

use mla_runtime::backend::{LayerConfig, StepLimits};
use mla_runtime::device::Device;
use mla_runtime::layer::SelectedLayer;
use mla_runtime::plan::memory::{self, MemoryPlan};
use mla_runtime::select::{Registry, Selection, SelectionRequest};
use mla_runtime::spec::Problem;

use super::batch_args::BatchArgs;
use super::sparse::{Lists, Run};
use super::workload::{self, Workload};
use crate::args::Model;
use crate::batch::BatchSpec;
use crate::device::About;
use crate::device::progress::Progress;
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

/// One step of a layer.
pub struct Step<D: Device> {
    pub workload: Workload,
    pub selection: Selection,
    pub config: LayerConfig,
    pub layer: SelectedLayer<D>,
    pub limits: StepLimits,
    pub memory: MemoryPlan,
}

impl<D: Device> Step<D> {
    /// Makes the step. This fails if no backend fits, or if the step takes more memory than there
    /// is.
    pub fn new<L: Lists<D>>(
        wanted: &Wanted<'_>,
        device: &D,
        about: &About,
    ) -> Result<Self, CliError> {
        let Wanted {
            model, on, problem, ..
        } = wanted;
        let spec: BatchSpec = on.batch.parse().map_err(CliError::batch_spec)?;
        about.check_memory("--batch", &spec, workload::bytes(&spec, problem))?;
        let workload = Workload::new(&spec, wanted.threshold, problem.page_size, on.seed)?;
        let problem = problem.with_query_len(workload.query_len);
        let mut request = SelectionRequest::new(device.target(), problem);
        request.prefill = wanted.prefill.map(str::to_owned);
        request.decode = wanted.decode.map(str::to_owned);
        let selection = Registry::linked()?.select(&request)?;
        let config = selection.config(model.config.softmax_scale() as f32);
        let layer = selection.layer(device, config.softmax_scale)?;
        let limits = workload.limits(wanted.rows)?;
        let needs = layer.memory_needs(&limits, 1, workload.pages)?;
        let memory = memory::plan(&L::needs(needs, &model.config, &limits)?)?;
        about.check_plan("--batch", &spec, &limits, &memory)?;
        Ok(Self {
            workload,
            selection,
            config,
            layer,
            limits,
            memory,
        })
    }

    /// Returns the input from which the step's data is made.
    pub const fn made_from<'a>(
        &'a self,
        wanted: &Wanted<'a>,
        device: &'a D,
        progress: &'a Progress,
    ) -> Run<'a, D> {
        Run {
            device,
            model: &wanted.model.config,
            config: &self.config,
            workload: &self.workload,
            limits: self.limits,
            seed: wanted.on.seed,
            progress,
        }
    }
}
