//! The whole layer on random data: cache write, projections, attention on both paths, context.

use mla_runtime::backend::{DecodeStage, LayerConfig, PrefillStage, SelectedDecode};
use mla_runtime::batch::BatchSpec;
use mla_runtime::layer::MlaLayer;
use mla_runtime::select::Registry;

use super::check::Errors;
use super::sampling::{Measured, Sampling};
use super::site::Site;
use crate::cost::Cost;
use crate::error::CliError;
use crate::progress::Progress;
use crate::run::data::Data;
use crate::run::reference;
use crate::run::workload::Workload;
use crate::stopwatch::Stopwatch;

/// A step of a layer.
#[derive(Clone, Debug)]
pub struct Layer {
    pub prefill: &'static str,
    pub decode: &'static str,
    pub config: LayerConfig,
    pub spec: BatchSpec,
    pub threshold: u32,
    pub query_chunk: Option<u32>,
    pub rows: Option<u32>,
    pub num_splits: Option<u32>,
    pub layers: usize,
    pub seed: u32,
}

impl Layer {
    fn workload(&self) -> Result<Workload, CliError> {
        let page = self.config.problem.page_size;
        let workload = Workload::new(&self.spec, self.threshold, page, self.seed)?;
        match self.query_chunk {
            Some(len) => workload.cut(len),
            None => Ok(workload),
        }
    }

    /// The cost of one layer, regardless of chunks.
    pub fn cost(&self) -> Result<Cost, CliError> {
        let page = self.config.problem.page_size;
        let workload = Workload::new(&self.spec, self.threshold, page, self.seed)?;
        let problem = &self.config.problem;
        let parts = [
            workload.absorbed_cost(problem),
            workload.expanded_cost(problem),
        ];
        Ok(Cost {
            flop: parts.iter().map(|part| part.flop).sum(),
            bytes: parts.iter().map(|part| part.bytes).sum(),
        })
    }

    /// The decode backend, told how to divide rows.
    fn decode_backend<D: Stopwatch>(
        &self,
        registry: &Registry,
        device: &D,
    ) -> Result<SelectedDecode<D>, CliError> {
        let mut backend = registry.instantiate_decode(self.decode, device, &self.config)?;
        if let Some(parts) = self.num_splits {
            backend.set_num_splits(parts)?;
        }
        Ok(backend)
    }

    /// Refuses what would not fit into memory, and what the backends would refuse when the step is
    /// set up.
    pub fn try_out<D: Stopwatch>(&self, site: &Site<'_, D>) -> Result<(), CliError> {
        let (registry, device) = (site.registry, site.device);
        let workload = self.workload()?;
        let limits = workload.limits(self.rows)?;
        let prefill = registry.instantiate_prefill(self.prefill, device, &self.config)?;
        let decode = self.decode_backend(registry, device)?;
        let layer = MlaLayer::new(device, &self.config, prefill, decode)?;
        // Each layer has a cache of its own.
        let plan = layer.memory_plan(&limits, self.layers as u32, workload.pages)?;
        site.about
            .check_plan("memory", &self.spec, &limits, &plan)?;
        drop(layer.prefill().state(device, &limits)?);
        drop(layer.decode().state(device, &limits)?);
        Ok(())
    }

    pub fn measure<D: Stopwatch>(
        &self,
        registry: &Registry,
        device: &D,
        flush: &mut D::Buffer,
        sampling: &mut Sampling<'_>,
        rows: usize,
    ) -> Result<Measured, CliError> {
        let watch = device.watch_memory();
        let prefill = registry.instantiate_prefill(self.prefill, device, &self.config)?;
        let decode = self.decode_backend(registry, device)?;
        let layer = MlaLayer::new(device, &self.config, prefill, decode)?;
        let workload = self.workload()?;
        let mut workspace = layer.workspace(&workload.limits(self.rows)?)?;
        let progress = Progress::hidden();
        let mut layers = Vec::with_capacity(self.layers);
        for number in 0..self.layers {
            let seed = self.seed.wrapping_add(number as u32);
            layers.push(Data::new(device, &self.config, &workload, seed, &progress)?);
        }
        workspace.prepare(&layer, &workload.batch()?)?;
        let sampled = sampling.time(device, flush, watch, &mut |_| {
            for data in &mut layers {
                let call = data.call(layer.config())?;
                layer.forward(&mut workspace, call)?;
            }
            Ok(())
        })?;
        let errors = reference::compare(
            device,
            &self.config,
            &workload,
            &layers[self.layers - 1],
            &workspace,
            rows as u32,
            self.seed,
            &progress,
        )?;
        Ok(Measured {
            sampled,
            planned: None,
            errors: Errors::of_paths([errors.absorbed, errors.expanded]),
        })
    }
}
