//! Times of each part of the layer.

use std::time::Instant;

use mla_runtime::Result;
use mla_runtime::device::Device;
use mla_runtime::layer::SelectedWorkspace;

use super::data::{Data, HostLists};
use super::sparse::Lists;
use super::step::Step;
use crate::device::progress::Progress;
use crate::device::statistics::Summary;
use crate::error::CliError;

/// The median seconds of each part, and of all parts together.
pub(super) struct Timings {
    pub selection: f64,
    pub absorbed: f64,
    pub expanded: f64,
    pub total: f64,
}

/// Runs a step once to warm up, and `repeat` times with timing.
pub(super) fn measure<D: Device, L: Lists<D>>(
    step: &Step<D>,
    workspace: &mut SelectedWorkspace<D>,
    data: &mut Data<D>,
    lists: &mut L,
    repeat: u32,
    progress: &Progress,
) -> std::result::Result<Timings, CliError> {
    let layer = &step.layer;
    let device = layer.device();
    let mut samples = [const { Vec::new() }; 4];
    for run in 0..=repeat {
        progress.step(match run {
            0 => "warming up".to_owned(),
            _ => format!("timing: {run} of {repeat}"),
        });
        let timed = |part: &mut dyn FnMut() -> Result<()>| -> Result<f64> {
            device.synchronize()?;
            let start = Instant::now();
            part()?;
            device.synchronize()?;
            Ok(start.elapsed().as_secs_f64())
        };
        let selection = timed(&mut || lists.select(workspace))?;
        let lists = lists.lists(workspace)?;
        let mut call = data.call(layer.config())?.with_slot_lists(lists);
        let write = timed(&mut || layer.write_cache(workspace, &mut call))?;
        let absorbed = timed(&mut || layer.attend_absorbed(workspace, &mut call))?;
        let expanded = timed(&mut || layer.attend_expanded(workspace, &mut call))?;
        if run > 0 {
            let total = selection + write + absorbed + expanded;
            let times = [selection, absorbed, expanded, total];
            for (samples, time) in samples.iter_mut().zip(times) {
                samples.push(time);
            }
        }
    }
    if let Some(lists) = lists.lists(workspace)? {
        data.lists = Some(HostLists::read(device, &lists)?);
    }
    let [selection, absorbed, expanded, total] =
        samples.map(|samples| Summary::of(&samples).median);
    Ok(Timings {
        selection,
        absorbed,
        expanded,
        total,
    })
}
