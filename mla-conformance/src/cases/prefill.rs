//! The cases of a prefill backend.

use mla_runtime::backend::{Entry, PrefillBackend, SelectedPrefill};
use mla_runtime::device::Device;
use mla_runtime::spec::{Feature, GraphSupport, Problem};

use super::{Cases, registry, unregistered};
use crate::data::config;
use crate::topic::PrefillTopic;
use crate::{Failure, PrefillCase, Trial};

/// Runs every case of a topic that the backend's spec accepts on the device.
///
/// # Errors
///
/// Returns the first failure.
pub fn prefill<B: PrefillBackend>(device: &B::Device, topic: PrefillTopic) -> Result<(), Failure> {
    if topic == PrefillTopic::ThroughTheRegistry {
        return prefill_entry(B::ENTRY, device, topic);
    }
    let run = |case: PrefillCase| {
        let backend = PrefillCase::backend::<B>(device, case.problem)?;
        case.check_stage(&backend, device)
    };
    Cases::new(B::ENTRY.spec, device.target(), PrefillCase::new, run)?.topic(topic)
}

/// Runs the cases of a backend that a [registry](mla_runtime::select::Registry) has under a name.
///
/// # Errors
///
/// Returns the first failure. It is an error, too, if the backend is for another type of device.
pub fn prefill_entry<D: Device>(
    entry: Entry,
    device: &D,
    topic: PrefillTopic,
) -> Result<(), Failure> {
    let run = |case: PrefillCase| {
        let stage = prefill_stage(entry, device, case.problem)?;
        case.check_stage(&stage, device)
    };
    Cases::new(entry.spec, device.target(), PrefillCase::new, run)?.topic(topic)
}

/// Numbers of new tokens of the requests in most cases.
const LENS: [usize; 4] = [70, 0, 1, 33];

impl Cases<'_, PrefillCase> {
    fn topic(&self, topic: PrefillTopic) -> Result<(), Failure> {
        let (accepted, spec, plain) = (&self.accepted, &self.accepted.spec, self.plain);
        let propagates_nan = spec.features.contains(Feature::NanPropagation);
        let case = || PrefillCase::new(plain, &LENS);
        match topic {
            PrefillTopic::NanQueries | PrefillTopic::NanKeys | PrefillTopic::NanValues
                if !propagates_nan =>
            {
                Ok(())
            }
            PrefillTopic::NewTokens => self.check(case()),
            PrefillTopic::MoreOrFewerKeys => self.check(PrefillCase {
                key_lens: vec![75, 5, 140, 20],
                ..case()
            }),
            PrefillTopic::ContextChunks => self.check(PrefillCase {
                key_lens: vec![0, 5, 300, 0],
                causal: false,
                ..case()
            }),
            PrefillTopic::NonCausal => self.non_causal(),
            PrefillTopic::QueryScales => self.query_scales(),
            PrefillTopic::DTypes => {
                let dtypes = spec.dtypes.to_vec();
                self.each(accepted.with(dtypes, |p, dtype| p.dtype = dtype), &LENS)
            }
            PrefillTopic::Dimensions => {
                let problems = accepted.with(accepted.dims(), |p, dims| p.dims = dims);
                self.each(problems, &[20, 50])
            }
            PrefillTopic::Heads => {
                let problems = accepted.with(accepted.heads(), |p, heads| p.heads = heads);
                self.each(problems, &[18, 3])
            }
            PrefillTopic::LongPrompts => self.long_prompts(),
            PrefillTopic::Strides => self.check(PrefillCase {
                gap: 16,
                lse: false,
                ..case()
            }),
            PrefillTopic::EmptyBatches => self.empty_batches(),
            PrefillTopic::NanQueries => self.nan_queries(),
            PrefillTopic::NanKeys => self.with_nans(|case| PrefillCase {
                nan_keys: self.nan_places(plain.dims.head.qk() as usize - 1),
                ..case
            }),
            PrefillTopic::NanValues => self.with_nans(|case| PrefillCase {
                nan_values: self.nan_places(plain.dims.head.v as usize - 1),
                ..case
            }),
            PrefillTopic::QuantisedOutputs => {
                let quantised = accepted.with(vec![true], |p, on| p.quant_output = on);
                self.each(quantised, &LENS)
            }
            PrefillTopic::DependentLaunch => self.tried(&[Trial::LateQueries, Trial::LateRows]),
            PrefillTopic::Graphs if spec.graphs == GraphSupport::Never => Ok(()),
            PrefillTopic::Graphs => self.tried(&[Trial::Replayed]),
            PrefillTopic::Workspace => self.tried(&[Trial::Guarded, Trial::BeyondLimits]),
            PrefillTopic::Alignment => self.tried(&[Trial::ExactlyAligned]),
            PrefillTopic::Repetition => self.repeated(|| PrefillCase::new(plain, &[100, 30])),
            PrefillTopic::BatchInvariance => self.batch_invariance(),
            // The caller runs these cases through the registry.
            PrefillTopic::ThroughTheRegistry => self.check(case()),
        }
    }

    /// Tries new tokens and a context with every dtype, and a long prompt.
    fn tried(&self, trials: &[Trial]) -> Result<(), Failure> {
        let dtypes = self.accepted.spec.dtypes.to_vec();
        let problems = self.accepted.with(dtypes, |p, dtype| p.dtype = dtype);
        let cases = problems.into_iter().flat_map(|problem| {
            let of_chunk = PrefillCase {
                key_lens: vec![0, 5, 300, 0],
                causal: false,
                ..PrefillCase::new(problem, &LENS)
            };
            [PrefillCase::new(problem, &LENS), of_chunk]
        });
        let long = PrefillCase {
            key_lens: vec![700],
            ..PrefillCase::new(self.plain, &[600])
        };
        cases.chain([long]).try_for_each(|case| {
            let mut trials = trials.iter().copied();
            trials.try_for_each(|trial| {
                self.check(PrefillCase {
                    trial,
                    ..case.clone()
                })
            })
        })
    }

    /// Tries ten random batches with every dtype, of new tokens and of contexts with so many tiles
    /// that a backend may divide them.
    fn batch_invariance(&self) -> Result<(), Failure> {
        let accepted = &self.accepted;
        if !accepted.spec.features.contains(Feature::BatchInvariant) {
            return Ok(());
        }
        let dtypes = accepted.spec.dtypes.to_vec();
        let problems = accepted.with(dtypes, |p, dtype| p.dtype = dtype);
        problems.into_iter().try_for_each(|problem| {
            let features = problem.features.with(Feature::BatchInvariant);
            let problem = problem.with_features(features);
            let case = PrefillCase {
                trial: Trial::AmongOthers(10),
                ..PrefillCase::new(problem, &[70, 1, 150, 33, 2])
            };
            self.check(case.clone())?;
            self.check(PrefillCase {
                key_lens: vec![300, 5, 4500, 0, 2100],
                causal: false,
                ..case
            })
        })
    }

    /// Tries new tokens, alone and behind their context, with every dtype and every (P,R,V).
    fn non_causal(&self) -> Result<(), Failure> {
        let accepted = &self.accepted;
        if !accepted.spec.features.contains(Feature::NonCausal) {
            return Ok(());
        }
        let dtypes = accepted.spec.dtypes.to_vec();
        let mut problems = accepted.with(dtypes, |p, dtype| p.dtype = dtype);
        problems.extend(accepted.with(accepted.dims(), |p, dims| p.dims = dims));
        let each = problems.into_iter().flat_map(|problem| {
            let alone = PrefillCase::new(problem, &LENS);
            let behind = PrefillCase {
                key_lens: vec![75, 5, 140, 300],
                ..alone.clone()
            };
            [alone, behind]
        });
        let long = PrefillCase {
            key_lens: vec![700, 20],
            ..PrefillCase::new(self.plain, &[600, 16])
        };
        each.chain([long]).try_for_each(|case| {
            self.check(PrefillCase {
                see_each_other: true,
                ..case
            })
        })
    }

    /// Tries new tokens, alone and behind their context, and a chunk of context, with every dtype.
    fn query_scales(&self) -> Result<(), Failure> {
        let accepted = &self.accepted;
        let dtypes = accepted.spec.dtypes.to_vec();
        let problems = accepted.with(dtypes, |p, dtype| p.dtype = dtype);
        problems
            .into_iter()
            .filter_map(|problem| accepted.having(problem, Feature::QueryScales))
            .try_for_each(|problem| {
                let alone = || PrefillCase::new(problem, &LENS);
                self.check(alone())?;
                for causal in [true, false] {
                    self.check(PrefillCase {
                        key_lens: vec![75, 5, 640, 300],
                        causal,
                        ..alone()
                    })?;
                }
                Ok(())
            })
    }

    fn long_prompts(&self) -> Result<(), Failure> {
        let mut problem = self.plain;
        problem.heads = self.accepted.heads()[0];
        self.check(PrefillCase {
            key_lens: vec![700],
            ..PrefillCase::new(problem, &[600])
        })?;
        // One request has most of the keys. Batches have a few requests, or more than a warp has
        // lanes.
        self.check(PrefillCase {
            key_lens: vec![40, 1500, 0, 20, 900],
            ..PrefillCase::new(problem, &[3, 130, 0, 20, 45])
        })?;
        let key_lens = (0..40).map(|i| if i == 35 { 1000 } else { i }).collect();
        self.check(PrefillCase {
            key_lens,
            causal: false,
            ..PrefillCase::new(problem, &[2; 40])
        })
    }

    fn empty_batches(&self) -> Result<(), Failure> {
        self.check(PrefillCase::new(self.plain, &[]))?;
        self.check(PrefillCase::new(self.plain, &[0]))?;
        self.check(PrefillCase {
            key_lens: vec![0, 4],
            ..PrefillCase::new(self.plain, &[3, 4])
        })
    }

    fn nan_queries(&self) -> Result<(), Failure> {
        let plain = self.plain;
        let (heads, qk) = (plain.heads as usize, plain.dims.head.qk() as usize);
        self.check(PrefillCase {
            nan_queries: vec![[2, 0, 0]],
            ..PrefillCase::new(plain, &[6])
        })?;
        self.check(PrefillCase {
            nan_queries: vec![[0, 0, 0], [69, heads - 1, qk - 1], [70, 0, 1]],
            ..PrefillCase::new(plain, &LENS)
        })
    }

    /// Returns three positions. With `LENS`, the first is in the middle of the first prompt. The
    /// second is the last value of a row at that prompt's end. The third is at the beginning of the
    /// last prompt.
    fn nan_places(&self, last: usize) -> Vec<[usize; 3]> {
        vec![
            [40, 0, 0],
            [69, self.plain.heads as usize - 1, last],
            [71, 0, 1],
        ]
    }

    /// Tries keys or values with NaN, in new tokens and in a context.
    fn with_nans(&self, with: impl Fn(PrefillCase) -> PrefillCase) -> Result<(), Failure> {
        self.check(with(PrefillCase::new(self.plain, &LENS)))?;
        self.check(with(PrefillCase::new(self.plain, &[6, 300])))?;
        self.check(with(PrefillCase {
            key_lens: vec![30, 5, 300, 0],
            causal: false,
            ..PrefillCase::new(self.plain, &LENS)
        }))
    }
}

// Returns the backend that a registry finds under this name.
fn prefill_stage<D: Device>(
    entry: Entry,
    device: &D,
    problem: Problem,
) -> Result<SelectedPrefill<D>, Failure> {
    let name = entry.spec.name;
    registry(entry)
        .instantiate_prefill(name, device, &config(problem))
        .map_err(|error| unregistered(name, error))
}
