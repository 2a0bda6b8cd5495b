//! One backend's attention on random data, absorbed or expanded, for one or several layers at a
//! time.

mod decode;
mod outcome;
mod prefill;

use std::time::Instant;

use mla_runtime::Result;
use mla_runtime::backend::DecodeStage;
use mla_runtime::device::Device;
use mla_runtime::select::Registry;

use self::decode::Decode;
use self::prefill::Prefill;
use super::work::{Attention, Kind};
use crate::error::CliError;
use crate::run::deviation::Errors;

impl Attention {
    /// Sets up the attention on `device`, with everything that it needs.
    pub fn set_up<D: Device>(
        &self,
        registry: &Registry,
        device: &D,
    ) -> std::result::Result<Ready<'_, D>, CliError> {
        Ok(match self.kind {
            Kind::Decode => Ready::Decode(Decode::new(self, registry, device)?),
            Kind::Prefill { causal } => {
                Ready::Prefill(Prefill::new(self, causal, registry, device)?)
            }
        })
    }
}

/// An attention that is ready to run.
pub enum Ready<'a, D: Device> {
    Decode(Decode<'a, D>),
    Prefill(Prefill<'a, D>),
}

impl<D: Device> Ready<'_, D> {
    /// Enqueues all layers. Unless `planned`, this includes what has to be prepared from lengths on
    /// the device.
    pub fn enqueue(&mut self, device: &D, planned: bool) -> Result<()> {
        match self {
            Self::Decode(work) => {
                if !planned {
                    work.prepare(device)?;
                }
                work.attend(device)
            }
            Self::Prefill(work) => work.attend(device),
        }
    }

    /// Returns the seconds until a plan is on the device, if the host makes it. No graph can
    /// contain such a plan. The result is that of the fastest of several plans. Returns `None` if
    /// the device plans.
    pub fn planning(&mut self, device: &D) -> Result<Option<f64>> {
        let Self::Decode(work) = self else {
            return Ok(None);
        };
        if !work.backend.spec().plans_on_host {
            return Ok(None);
        }
        let mut fastest = f64::INFINITY;
        for _ in 0..5 {
            device.synchronize()?;
            let begin = Instant::now();
            work.prepare(device)?;
            device.synchronize()?;
            fastest = fastest.min(begin.elapsed().as_secs_f64());
        }
        Ok(Some(fastest))
    }

    /// True if a plan can be made before the run.
    pub const fn has_plan(&self) -> bool {
        matches!(self, Self::Decode(_))
    }

    /// Compares `count` rows of the last layer's output with attention in f64.
    pub fn check(&self, device: &D, count: usize) -> std::result::Result<Errors, CliError> {
        match self {
            Self::Decode(work) => work.check(device, count),
            Self::Prefill(work) => work.check(device, count),
        }
    }
}
