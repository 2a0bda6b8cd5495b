//! Times of each part of the layer.

use std::time::{Duration, Instant};

use mla_runtime::Result;
use mla_runtime::backend::{DecodeStage, PrefillStage};
use mla_runtime::layer::{MlaLayer, Workspace};
use mla_runtime::tensor::Memory;

use super::data::{Data, HostLists};
use super::sparse::Lists;
use super::workload::Workload;
use crate::device::progress::Progress;
use crate::error::CliError;

/// The median time of each part, and of all parts together.
pub(super) struct Timings {
    pub selection: Duration,
    pub absorbed: Duration,
    pub expanded: Duration,
    pub total: Duration,
}

/// Runs a step once to warm up, and `repeat` times with timing.
pub(super) fn measure<P, B, L>(
    layer: &MlaLayer<P, B>,
    workspace: &mut Workspace<P, B>,
    workload: &Workload,
    data: &mut Data<P::Device>,
    lists: &mut L,
    repeat: u32,
    progress: &Progress,
) -> std::result::Result<Timings, CliError>
where
    P: PrefillStage,
    B: DecodeStage<Device = P::Device>,
    L: Lists<P::Device>,
{
    let step = workload.step(&layer.config().problem, workspace.limits())?;
    workspace.prepare(layer, &step)?;
    let device = layer.device();
    let mut samples = [const { Vec::new() }; 4];
    for run in 0..=repeat {
        progress.step(match run {
            0 => "warming up".to_owned(),
            _ => format!("timing: {run} of {repeat}"),
        });
        let timed = |part: &mut dyn FnMut() -> Result<()>| -> Result<Duration> {
            device.synchronize()?;
            let start = Instant::now();
            part()?;
            device.synchronize()?;
            Ok(start.elapsed())
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
    let [selection, absorbed, expanded, total] = samples.map(median);
    Ok(Timings {
        selection,
        absorbed,
        expanded,
        total,
    })
}

/// Returns the median.
fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    let middle = times.len() / 2;
    if times.len().is_multiple_of(2) {
        (times[middle - 1] + times[middle]) / 2
    } else {
        times[middle]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        let of = |times: &[u64]| {
            let times = times.iter().map(|s| Duration::from_secs(*s)).collect();
            median(times).as_secs_f64()
        };
        assert_eq!(of(&[7]), 7.0);
        assert_eq!(of(&[9, 1, 2]), 2.0);
        assert_eq!(of(&[9, 1, 2, 4]), 3.0);
    }
}
