//! The taking of samples, and its results.

use super::check::Errors;
use super::statistics::Summary;
use crate::error::CliError;
use crate::loaded::Loaded;
use crate::stopwatch::{Conditions, Memory, Protocol, Stopwatch};

/// The results of one row. Times are of all its layers together.
pub struct Measured {
    /// Seconds with everything that a step has to enqueue when only queries, cache, block table and
    /// lengths are on the device.
    pub sampled: Sampled,
    /// Seconds where the schedule exists already; absent where there is none to be made.
    pub planned: Option<Summary>,
    pub errors: Errors,
}

/// The settings for taking samples: the protocol, the number of rounds, and a hook after each
/// round, which takes the number of its samples.
pub struct Sampling<'a> {
    pub protocol: &'a Protocol,
    pub rounds: usize,
    pub after_round: &'a mut dyn FnMut(usize) -> Result<(), CliError>,
}

/// The samples, and observations made meanwhile.
pub struct Sampled {
    pub samples: Vec<f64>,
    /// The conditions of the first round.
    pub conditions: Conditions,
    /// The code that was loaded for the kernels, if they were replayed.
    pub loaded: Vec<Loaded>,
    /// The peak of the first round: the hook after a round may need memory of its own.
    pub peak_bytes: Option<u64>,
}

impl Sampling<'_> {
    /// Takes samples of `work`.
    pub fn time<D: Stopwatch>(
        &mut self,
        device: &D,
        flush: &mut D::Buffer,
        watch: Memory,
        work: &mut dyn FnMut(&D) -> mla_runtime::Result<()>,
    ) -> Result<Sampled, CliError> {
        let mut samples = Vec::with_capacity(self.protocol.samples);
        let mut first = None;
        for round in 0..self.rounds {
            let protocol = Protocol {
                samples: share(self.protocol.samples, self.rounds, round),
                ..*self.protocol
            };
            let (more, conditions) = device.time(&protocol, flush, work)?;
            samples.extend(more);
            first.get_or_insert_with(|| (conditions, device.peak_memory(watch)));
            (self.after_round)(protocol.samples)?;
        }
        let (conditions, peak_bytes) = first.unwrap_or_default();
        let loaded = match self.protocol.graphs {
            true => device.loaded(work)?,
            false => Vec::new(),
        };
        Ok(Sampled {
            samples,
            loaded,
            conditions,
            peak_bytes,
        })
    }
}

/// The samples of one of `rounds` rounds, as even as they can be.
const fn share(samples: usize, rounds: usize, round: usize) -> usize {
    samples * (round + 1) / rounds - samples * round / rounds
}

#[cfg(test)]
mod tests {
    use super::share;

    #[test]
    fn rounds_share_all_samples() {
        for samples in [1, 2, 29, 30, 31] {
            for rounds in 1..=samples {
                let shares: Vec<usize> = (0..rounds).map(|r| share(samples, rounds, r)).collect();
                assert_eq!(shares.iter().sum::<usize>(), samples);
                let (least, most) = (shares.iter().min(), shares.iter().max());
                assert!(most.unwrap() - least.unwrap() <= 1, "{shares:?}");
            }
        }
    }
}
