//! The parts of a sparse layer that are timed, and the whole layer.

use mla_cli::parts::{Data, Indexed, Lists, Progress, Protocol, Stopwatch, Summary};
use mla_runtime::Result;
use mla_runtime::backend::{SelectedDecode, SelectedPrefill};
use mla_runtime::indexer::IndexDevice;
use mla_runtime::layer::{SelectedLayer, Workspace};
use mla_runtime::spec::Platform;
use serde::Serialize;

use super::Args;

/// The time and the cost of a part.
#[derive(Serialize)]
pub(crate) struct Part {
    pub(crate) name: &'static str,
    /// The time in seconds.
    pub(crate) time: Summary,
    /// The arithmetic of the part. It is 0, and so is `bytes`, if no cost is known.
    pub(crate) flop: f64,
    pub(crate) bytes: f64,
}

/// The workspace of a layer whose backends are selected.
pub(crate) type Space<D> = Workspace<SelectedPrefill<D>, SelectedDecode<D>>;

/// Takes the times of parts.
pub(crate) struct Times<'a, D: Stopwatch> {
    device: &'a D,
    pub(crate) protocol: Protocol,
    flush: D::Buffer,
    pub(crate) parts: Vec<Part>,
    progress: &'a Progress,
}

impl<'a, D: Stopwatch> Times<'a, D> {
    pub(crate) fn new(device: &'a D, args: &Args, progress: &'a Progress) -> Result<Self> {
        Ok(Self {
            device,
            protocol: Protocol {
                samples: args.samples as usize,
                warm_up: args.warm_up as usize,
                cold_cache: true,
                graphs: D::PLATFORM != Platform::Cpu,
            },
            flush: device.allocate(device.flush_bytes())?,
            parts: Vec::new(),
            progress,
        })
    }

    pub(crate) fn time(
        &mut self,
        name: &'static str,
        [flop, bytes]: [f64; 2],
        work: &mut dyn FnMut(&D) -> Result<()>,
    ) -> Result<()> {
        self.progress.begin(&format!("timing {name}"));
        let (samples, _) = self.device.time(&self.protocol, &mut self.flush, work)?;
        self.parts.push(Part {
            name,
            time: Summary::of(&samples),
            flop,
            bytes,
        });
        Ok(())
    }
}

/// The selection, attention to lists that are there, and the layer.
pub(crate) fn whole<D: IndexDevice + Stopwatch>(
    times: &mut Times<'_, D>,
    layer: &SelectedLayer<D>,
    workspace: &mut Space<D>,
    indexed: &mut Indexed<D>,
    data: &mut Data<D>,
) -> Result<()> {
    times.time("the whole selection", [0.0; 2], &mut |_| {
        let (indexer, lists, call) = indexed.call()?;
        indexer.select(workspace, lists, call)
    })?;
    times.time("the layer by shared lists", [0.0; 2], &mut |_| {
        let mut call = data.call(layer.config())?;
        call.slot_lists = indexed.lists(workspace)?;
        layer.forward(workspace, call)
    })?;
    times.time("the layer with its indexer", [0.0; 2], &mut |_| {
        let (indexer, lists, index) = indexed.call()?;
        layer.forward_selecting(workspace, lists, indexer, index, data.call(layer.config())?)
    })
}
