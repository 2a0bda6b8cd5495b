//! The devices that run a layer on candle's tensors, with or without an indexer.

use mla_cpu::Cpu;
use mla_runtime::Result;
use mla_runtime::backend::StepLimits;
use mla_runtime::indexer::{IndexCall, Indexer, IndexerWorkspace};
use mla_runtime::layer::SelectedWorkspace;
use mla_runtime::model::IndexerConfig;
use mla_runtime::spec::Problem;

use crate::lend::Lending;

/// A device of candle's, with an indexer or without one.
pub(super) trait Selecting: Lending {
    /// A layer's indexer, and the memory of its selections.
    type Lists: Lists<Self>;
}

/// The indexer of a device. On a device without one, this type has no values.
pub(super) trait Lists<D: Lending>: Sized {
    /// Makes the indexer of a model.
    fn new(device: &D, config: &IndexerConfig, problem: &Problem) -> Result<Self>;

    /// Returns the extents of the indexer.
    fn config(&self) -> &IndexerConfig;

    /// Allocates the memory for selections within these limits.
    fn workspace(&self, limits: &StepLimits) -> Result<IndexerWorkspace<D>>;

    /// Makes the lists of the prepared step.
    fn select(
        &self,
        workspace: &SelectedWorkspace<D>,
        lists: &mut IndexerWorkspace<D>,
        call: IndexCall<'_, D>,
    ) -> Result<()>;
}

impl<D: Lending + mla_runtime::indexer::IndexDevice> Lists<D> for Indexer<D> {
    fn new(device: &D, config: &IndexerConfig, problem: &Problem) -> Result<Self> {
        Self::new(device, config, problem)
    }

    fn config(&self) -> &IndexerConfig {
        self.config()
    }

    fn workspace(&self, limits: &StepLimits) -> Result<IndexerWorkspace<D>> {
        self.workspace(limits)
    }

    fn select(
        &self,
        workspace: &SelectedWorkspace<D>,
        lists: &mut IndexerWorkspace<D>,
        call: IndexCall<'_, D>,
    ) -> Result<()> {
        self.select(workspace, lists, call)
    }
}

impl Selecting for Cpu {
    type Lists = Indexer<Self>;
}

#[cfg(feature = "sm90")]
impl Selecting for mla_kernels::Cuda {
    type Lists = Indexer<Self>;
}

#[cfg(all(feature = "cuda", not(feature = "sm90")))]
mod without {
    use mla_kernels::Cuda;
    use mla_runtime::Error;

    use super::*;

    impl Selecting for Cuda {
        type Lists = NoIndexer;
    }

    /// A type without values for builds in which no indexer is compiled.
    pub(crate) enum NoIndexer {}

    impl Lists<Cuda> for NoIndexer {
        fn new(_: &Cuda, _: &IndexerConfig, _: &Problem) -> Result<Self> {
            let accepted = "none, or a build with the feature sm90";
            Err(Error::argument("indexer", "one on a GPU", accepted))
        }

        fn config(&self) -> &IndexerConfig {
            match *self {}
        }

        fn workspace(&self, _: &StepLimits) -> Result<IndexerWorkspace<Cuda>> {
            match *self {}
        }

        fn select(
            &self,
            _: &SelectedWorkspace<Cuda>,
            _: &mut IndexerWorkspace<Cuda>,
            _: IndexCall<'_, Cuda>,
        ) -> Result<()> {
            match *self {}
        }
    }
}
