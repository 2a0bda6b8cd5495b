//! What is tried, of that which a spec accepts.

use super::{DecodeCase, Failure, PrefillCase};
use mla_runtime::backend::{
    DecodeBackend, DecodeStage, Entry, PrefillBackend, PrefillStage, SelectedDecode,
    SelectedPrefill,
};
use mla_runtime::capability::Target;
use mla_runtime::device::Device;
use mla_runtime::dims::{HeadDims, MlaDims};
use mla_runtime::feature::Feature;
use mla_runtime::kv_format::KvFormat;
use mla_runtime::problem::Problem;
use mla_runtime::registry::Registry;
use mla_runtime::selection::SelectionError;
use mla_runtime::spec::{BackendSpec, HeadCounts, PageSizes, Phase, QueryLen, SparseSupport};

use super::data::config;
use super::topic::{DecodeTopic, PrefillTopic};

// Of the problems that a spec could accept on a target, those that it does.
struct Accepted {
    spec: BackendSpec,
    target: Target,
    plainest: Problem,
}

impl Accepted {
    fn new(spec: BackendSpec, target: Target) -> Result<Self, Failure> {
        let mut problem = Problem::new(MlaDims::R1, 16, spec.dtypes[0]);
        problem.sparse = spec.sparse == SparseSupport::Required;
        let mut all = Self {
            spec,
            target,
            plainest: problem,
        };
        all.plainest.dims = all.dims()[0];
        all.plainest.heads = *all.heads().last().unwrap_or(&1).min(&16);
        if !spec.heads.accepts(all.plainest.heads) {
            all.plainest.heads = all.heads()[0];
        }
        if spec.phase == Phase::Decode {
            let own = KvFormat::of(problem.dtype);
            let first = spec.kv_formats.first().copied().unwrap_or(own);
            all.plainest.kv_format = match spec.kv_formats.contains(&own) {
                true => own,
                false => first,
            };
            all.plainest.page_size = all.page_sizes()[0];
        }
        let reasons = spec.validate(target, &all.plainest);
        if reasons.is_empty() {
            return Ok(all);
        }
        Err(Failure::NothingAccepted {
            name: spec.name,
            target,
            reasons: Box::new(reasons),
        })
    }

    fn accepts(&self, problem: &Problem) -> bool {
        problem.fault().is_none() && self.spec.validate(self.target, problem).is_empty()
    }

    // The plainest problem, with each of some changes, as far as they are accepted.
    fn with<T>(&self, values: Vec<T>, change: impl Fn(&mut Problem, T)) -> Vec<Problem> {
        let changed = values.into_iter().map(|value| {
            let mut problem = self.plainest;
            change(&mut problem, value);
            problem
        });
        changed.filter(|problem| self.accepts(problem)).collect()
    }

    // Sparse problems of every cache format with one and several query tokens, and with few heads and many,
    // where the spec has a feature.
    fn sparse(&self, feature: Feature) -> Vec<Problem> {
        if !self.spec.features.contains(feature) {
            return Vec::new();
        }
        let levels = [QueryLen::Single, QueryLen::Ragged];
        let heads = [self.plainest.heads, 100];
        let changes = self.spec.kv_formats.iter().flat_map(|format| {
            let levels = levels.iter();
            levels.flat_map(move |level| heads.map(|heads| (*format, *level, heads)))
        });
        self.with(changes.collect(), |p, (format, level, heads)| {
            (p.sparse, p.kv_format, p.query_len, p.heads) = (true, format, level, heads);
        })
    }

    fn dims(&self) -> Vec<MlaDims> {
        let odd = HeadDims::new(48, 32, 80);
        let heads = self
            .spec
            .dims
            .map_or(vec![HeadDims::R1, odd], <[_]>::to_vec);
        match (self.spec.phase, self.spec.cache_dims) {
            (Phase::Prefill, _) => heads.iter().map(|head| MlaDims::new(512, *head)).collect(),
            (Phase::Decode, None) => heads
                .iter()
                .zip([512, 256].into_iter().cycle())
                .map(|(head, latent)| MlaDims::new(latent, *head))
                .collect(),
            (Phase::Decode, Some(rows)) => rows
                .iter()
                .map(|row| {
                    let head = heads.iter().find(|head| head.rope == row.rope);
                    let head = head.copied().unwrap_or(HeadDims::R1.with_rope(row.rope));
                    MlaDims::new(row.latent, head)
                })
                .collect(),
        }
    }

    fn heads(&self) -> Vec<u32> {
        let mut some = match self.spec.heads {
            HeadCounts::List(counts) => counts.to_vec(),
            HeadCounts::Any => vec![1, 3, 16, 40, 128],
            HeadCounts::Range(least, most) => {
                let mut counts = vec![least, 3, 16, 40, 128, most.min(256)];
                counts.retain(|count| self.spec.heads.accepts(*count));
                counts
            }
        };
        some.sort_unstable();
        some.dedup();
        some
    }

    fn page_sizes(&self) -> Vec<u32> {
        match self.spec.page_sizes {
            PageSizes::Any => vec![64, 1, 7, 16, 128],
            PageSizes::MultipleOf(unit) => vec![unit * 64u32.div_ceil(unit), unit, 3 * unit],
            PageSizes::List(sizes) => sizes.to_vec(),
        }
    }
}

/// Runs every case of a topic that the backend's spec accepts on the device.
///
/// # Errors
///
/// The first failure.
pub fn decode<B: DecodeBackend>(device: &B::Device, topic: DecodeTopic) -> Result<(), Failure> {
    decode_by(B::ENTRY, device, topic, |problem| {
        DecodeCase::backend::<B>(device, problem)
    })
}

/// The same of a backend that a [registry](Registry) has under a name.
///
/// # Errors
///
/// The first failure, among them that the backend is for devices of another type.
pub fn decode_entry<D: Device>(
    entry: Entry,
    device: &D,
    topic: DecodeTopic,
) -> Result<(), Failure> {
    decode_by(entry, device, topic, |problem| {
        decode_stage(entry, device, problem)
    })
}

// By what `make` makes for a problem.
fn decode_by<S: DecodeStage>(
    entry: Entry,
    device: &S::Device,
    topic: DecodeTopic,
    make: impl Fn(Problem) -> Result<S, Failure>,
) -> Result<(), Failure> {
    let spec = entry.spec;
    let accepted = Accepted::new(spec, device.target())?;
    let plain = accepted.plainest;
    let run = |case: DecodeCase| case.check_stage(&make(case.problem)?, device);
    let check = |case: DecodeCase| run(case).map(drop);
    let page = plain.page_size as usize;
    let lens = [1, page - 1, page, page + 1, 0, 150];
    let propagates_nan = spec.features.contains(Feature::NanPropagation);
    match topic {
        DecodeTopic::NanQueries | DecodeTopic::NanRows if !propagates_nan => Ok(()),
        DecodeTopic::SingleTokens => check(DecodeCase::new(plain, &lens)),
        DecodeTopic::QueryLengths => {
            let levels = vec![QueryLen::Uniform, QueryLen::Ragged];
            for problem in accepted.with(levels, |p, level| p.query_len = level) {
                let query_lens = match problem.query_len {
                    QueryLen::Uniform => vec![3; 4],
                    _ => vec![1, 4, 0, 2],
                };
                check(DecodeCase {
                    query_lens,
                    ..DecodeCase::new(problem, &[3, 140, 65, 2])
                })?;
            }
            Ok(())
        }
        DecodeTopic::Formats => {
            let pairs = spec
                .dtypes
                .iter()
                .flat_map(|dtype| spec.kv_formats.iter().map(|format| (*dtype, *format)))
                .collect();
            let problems = accepted.with(pairs, |p, (dtype, format)| {
                (p.dtype, p.kv_format) = (dtype, format);
            });
            problems
                .into_iter()
                .try_for_each(|problem| check(DecodeCase::new(problem, &lens)))
        }
        DecodeTopic::Dimensions => accepted
            .with(accepted.dims(), |p, dims| p.dims = dims)
            .into_iter()
            .try_for_each(|problem| check(DecodeCase::new(problem, &[5, 90]))),
        DecodeTopic::Heads => accepted
            .with(accepted.heads(), |p, heads| p.heads = heads)
            .into_iter()
            .try_for_each(|problem| check(DecodeCase::new(problem, &[70, 1, 33]))),
        DecodeTopic::PageSizes => accepted
            .with(accepted.page_sizes(), |p, size| p.page_size = size)
            .into_iter()
            .try_for_each(|problem| check(DecodeCase::new(problem, &[1, 200, 17]))),
        DecodeTopic::LongContexts => check(DecodeCase::new(plain, &[2100, 40, 900])),
        DecodeTopic::Strides => check(DecodeCase {
            gap: 16,
            lse: false,
            ..DecodeCase::new(plain, &lens)
        }),
        DecodeTopic::EmptyBatches => {
            check(DecodeCase::new(plain, &[]))?;
            check(DecodeCase::new(plain, &[0]))?;
            check(DecodeCase::new(plain, &[0, 5, 0]))
        }
        DecodeTopic::NanQueries => {
            let last = plain.dims.row() as usize - 1;
            check(DecodeCase {
                nan_queries: vec![[1, 0, 0], [3, plain.heads as usize - 1, last]],
                ..DecodeCase::new(plain, &[6, 6, page + 1, 150])
            })?;
            // Rows beside it in the same request, which see fewer keys or more.
            let several = vec![QueryLen::Uniform, QueryLen::Ragged];
            accepted
                .with(several, |p, level| p.query_len = level)
                .into_iter()
                .try_for_each(|problem| {
                    check(DecodeCase {
                        query_lens: vec![3; 2],
                        nan_queries: vec![[2, 0, 0], [4, 0, 0]],
                        ..DecodeCase::new(problem, &[3, 70])
                    })
                })
        }
        DecodeTopic::NanRows => {
            let formats = accepted.with(spec.kv_formats.to_vec(), |p, kv| p.kv_format = kv);
            let rope = plain.dims.latent as usize;
            let rope = rope.min(plain.dims.row() as usize - 1);
            for problem in formats {
                // The last row of one request, the first of the next, and a rotary part.
                check(DecodeCase {
                    nan_rows: vec![[1, 5, 0], [2, 0, 130], [4, 40, rope]],
                    ..DecodeCase::new(problem, &[6, 6, page + 1, 150, 70])
                })?;
            }
            // In one split of several.
            check(DecodeCase {
                nan_rows: vec![[0, 700, 3]],
                ..DecodeCase::new(plain, &[2100, 900])
            })?;
            // A later token's row, which the tokens before it do not see.
            let several = vec![QueryLen::Uniform, QueryLen::Ragged];
            accepted
                .with(several, |p, level| p.query_len = level)
                .into_iter()
                .try_for_each(|problem| {
                    check(DecodeCase {
                        query_lens: vec![3; 3],
                        nan_rows: vec![[0, 2, 1], [1, 68, 511.min(rope)], [2, 299, rope]],
                        ..DecodeCase::new(problem, &[3, 70, 300])
                    })
                })
        }
        DecodeTopic::SlotLists => accepted
            .with(vec![true], |p, sparse| p.sparse = sparse)
            .into_iter()
            .try_for_each(|problem| {
                check(DecodeCase::new(problem, &[300, 17, 0]))?;
                check(DecodeCase {
                    list_width: 150,
                    with_counts: true,
                    ..DecodeCase::new(problem, &[300, 40, 17, 9, 1, 0])
                })?;
                check(DecodeCase {
                    list_width: 0,
                    ..DecodeCase::new(problem, &[20])
                })
            }),
        DecodeTopic::DenseRequests => {
            let sparse = accepted.sparse(Feature::DenseRequests);
            sparse.into_iter().try_for_each(|problem| {
                // Shorter than its bound, as long, and longer; without tokens.
                check(DecodeCase {
                    dense_within: 37,
                    ..DecodeCase::new(problem, &[20, 37, 38, 0, 1])
                })?;
                let query_lens = match problem.query_len {
                    QueryLen::Single => return Ok(()),
                    _ => vec![4, 0, 3, 2],
                };
                check(DecodeCase {
                    query_lens,
                    list_width: 150,
                    dense_within: 130,
                    ..DecodeCase::new(problem, &[4, 90, 131, 130])
                })
            })
        }
        DecodeTopic::SecondCache => {
            let sparse = accepted.sparse(Feature::SecondCache);
            sparse.into_iter().try_for_each(|problem| {
                check(DecodeCase {
                    second_width: 21,
                    ..DecodeCase::new(problem, &[300, 17, 0])
                })?;
                // Beside nothing, and more than a tile beside dense requests.
                check(DecodeCase {
                    second_width: 5,
                    list_width: 0,
                    ..DecodeCase::new(problem, &[20])
                })?;
                let dense = spec.features.contains(Feature::DenseRequests);
                check(DecodeCase {
                    second_width: 130,
                    list_width: 90,
                    dense_within: if dense { 90 } else { 0 },
                    ..DecodeCase::new(problem, &[80, 200])
                })
            })
        }
        DecodeTopic::Sinks => {
            if !spec.features.contains(Feature::Sinks) {
                return Ok(());
            }
            let mut problems = accepted.with(vec![false], |p, sparse| p.sparse = sparse);
            problems.extend(accepted.sparse(Feature::Sinks));
            problems.into_iter().try_for_each(|problem| {
                check(DecodeCase {
                    with_sinks: true,
                    ..DecodeCase::new(problem, &[90, 17, 0])
                })?;
                if problem.heads != plain.heads || problem.query_len != plain.query_len {
                    return Ok(());
                }
                // In several splits, beside dense requests, and beside what a second cache has.
                let has = |feature| problem.sparse && spec.features.contains(feature);
                check(DecodeCase {
                    with_sinks: true,
                    with_counts: true,
                    list_width: 400,
                    dense_within: if has(Feature::DenseRequests) { 70 } else { 0 },
                    second_width: if has(Feature::SecondCache) { 21 } else { 0 },
                    ..DecodeCase::new(problem, &[500, 60])
                })
            })
        }
        DecodeTopic::QuantisedOutputs => accepted
            .with(vec![true], |p, quantised| p.quant_output = quantised)
            .into_iter()
            .try_for_each(|problem| check(DecodeCase::new(problem, &[130, 7]))),
        DecodeTopic::Repetition => {
            repeated(&spec, plain, || run(DecodeCase::new(plain, &[600, 3])))
        }
        DecodeTopic::ThroughTheRegistry => {
            let case = DecodeCase::new(plain, &[600, 3]);
            let stage = decode_stage(entry, device, plain)?;
            case.check_stage(&stage, device).map(drop)
        }
    }
}

/// Runs every case of a topic that the backend's spec accepts on the device.
///
/// # Errors
///
/// The first failure.
pub fn prefill<B: PrefillBackend>(device: &B::Device, topic: PrefillTopic) -> Result<(), Failure> {
    prefill_by(B::ENTRY, device, topic, |problem| {
        PrefillCase::backend::<B>(device, problem)
    })
}

/// The same of a backend that a [registry](Registry) has under a name.
///
/// # Errors
///
/// The first failure, among them that the backend is for devices of another type.
pub fn prefill_entry<D: Device>(
    entry: Entry,
    device: &D,
    topic: PrefillTopic,
) -> Result<(), Failure> {
    prefill_by(entry, device, topic, |problem| {
        prefill_stage(entry, device, problem)
    })
}

// By what `make` makes for a problem.
fn prefill_by<S: PrefillStage>(
    entry: Entry,
    device: &S::Device,
    topic: PrefillTopic,
    make: impl Fn(Problem) -> Result<S, Failure>,
) -> Result<(), Failure> {
    let spec = entry.spec;
    let accepted = Accepted::new(spec, device.target())?;
    let plain = accepted.plainest;
    let run = |case: PrefillCase| case.check_stage(&make(case.problem)?, device);
    let check = |case: PrefillCase| run(case).map(drop);
    let lens = [70, 0, 1, 33];
    let qk = plain.dims.head.qk() as usize;
    let propagates_nan = spec.features.contains(Feature::NanPropagation);
    match topic {
        PrefillTopic::NanQueries | PrefillTopic::NanKeys | PrefillTopic::NanValues
            if !propagates_nan =>
        {
            Ok(())
        }
        PrefillTopic::NewTokens => check(PrefillCase::new(plain, &lens)),
        PrefillTopic::MoreOrFewerKeys => check(PrefillCase {
            key_lens: vec![75, 5, 140, 20],
            ..PrefillCase::new(plain, &lens)
        }),
        PrefillTopic::ContextChunks => check(PrefillCase {
            key_lens: vec![0, 5, 300, 0],
            causal: false,
            ..PrefillCase::new(plain, &lens)
        }),
        PrefillTopic::DTypes => accepted
            .with(spec.dtypes.to_vec(), |p, dtype| p.dtype = dtype)
            .into_iter()
            .try_for_each(|problem| check(PrefillCase::new(problem, &lens))),
        PrefillTopic::Dimensions => accepted
            .with(accepted.dims(), |p, dims| p.dims = dims)
            .into_iter()
            .try_for_each(|problem| check(PrefillCase::new(problem, &[20, 50]))),
        PrefillTopic::Heads => accepted
            .with(accepted.heads(), |p, heads| p.heads = heads)
            .into_iter()
            .try_for_each(|problem| check(PrefillCase::new(problem, &[18, 3]))),
        PrefillTopic::LongPrompts => {
            let mut problem = plain;
            problem.heads = accepted.heads()[0];
            check(PrefillCase {
                key_lens: vec![700],
                ..PrefillCase::new(problem, &[600])
            })
        }
        PrefillTopic::Strides => check(PrefillCase {
            gap: 16,
            lse: false,
            ..PrefillCase::new(plain, &lens)
        }),
        PrefillTopic::EmptyBatches => {
            check(PrefillCase::new(plain, &[]))?;
            check(PrefillCase::new(plain, &[0]))?;
            check(PrefillCase {
                key_lens: vec![0, 4],
                ..PrefillCase::new(plain, &[3, 4])
            })
        }
        PrefillTopic::NanQueries => {
            let heads = plain.heads as usize;
            check(PrefillCase {
                nan_queries: vec![[2, 0, 0]],
                ..PrefillCase::new(plain, &[6])
            })?;
            check(PrefillCase {
                nan_queries: vec![[0, 0, 0], [69, heads - 1, qk - 1], [70, 0, 1]],
                ..PrefillCase::new(plain, &lens)
            })
        }
        PrefillTopic::NanKeys | PrefillTopic::NanValues => {
            // In the middle of a prompt, at its end, and at the beginning of the next.
            let places =
                |last: usize| vec![[40, 0, 0], [69, plain.heads as usize - 1, last], [71, 0, 1]];
            let with_nans = |case: PrefillCase| match topic {
                PrefillTopic::NanKeys => PrefillCase {
                    nan_keys: places(qk - 1),
                    ..case
                },
                _ => PrefillCase {
                    nan_values: places(plain.dims.head.v as usize - 1),
                    ..case
                },
            };
            check(with_nans(PrefillCase::new(plain, &lens)))?;
            check(with_nans(PrefillCase::new(plain, &[6, 300])))?;
            check(with_nans(PrefillCase {
                key_lens: vec![30, 5, 300, 0],
                causal: false,
                ..PrefillCase::new(plain, &lens)
            }))
        }
        PrefillTopic::QuantisedOutputs => accepted
            .with(vec![true], |p, quantised| p.quant_output = quantised)
            .into_iter()
            .try_for_each(|problem| check(PrefillCase::new(problem, &lens))),
        PrefillTopic::Repetition => {
            repeated(&spec, plain, || run(PrefillCase::new(plain, &[100, 30])))
        }
        PrefillTopic::ThroughTheRegistry => {
            let case = PrefillCase::new(plain, &lens);
            let stage = prefill_stage(entry, device, plain)?;
            case.check_stage(&stage, device).map(drop)
        }
    }
}

/// Whether a second run gives the bits of the first, where the spec promises that.
fn repeated<T: PartialEq>(
    spec: &BackendSpec,
    problem: Problem,
    run: impl Fn() -> Result<T, Failure>,
) -> Result<(), Failure> {
    if !spec.features.contains(Feature::Deterministic) || run()? == run()? {
        return Ok(());
    }
    Err(Failure::Differs {
        name: spec.name,
        problem: Box::new(problem),
        how: "a second run",
    })
}

// The backend as a registry gives it by name.
fn decode_stage<D: Device>(
    entry: Entry,
    device: &D,
    problem: Problem,
) -> Result<SelectedDecode<D>, Failure> {
    let name = entry.spec.name;
    registry(entry)
        .instantiate_decode(name, device, &config(problem))
        .map_err(|error| unregistered(name, error))
}

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

fn registry(entry: Entry) -> Registry {
    let mut registry = Registry::empty();
    // The first entry of a registry takes no name that is taken.
    let _ = registry.add(entry);
    registry
}

fn unregistered(name: &'static str, error: SelectionError) -> Failure {
    Failure::Unregistered {
        name,
        error: Box::new(error),
    }
}
