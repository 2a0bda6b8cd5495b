//! The cases of a decode backend.

use mla_runtime::backend::{DecodeBackend, Entry, SelectedDecode};
use mla_runtime::device::Device;
use mla_runtime::model::KvFormat;
use mla_runtime::spec::{Feature, GraphSupport, Problem, QueryLen};

use super::{Cases, registry, unregistered};
use crate::data::config;
use crate::topic::DecodeTopic;
use crate::{DecodeCase, Failure, GroupScales, Trial};

/// Runs every case of a topic that the backend's spec accepts on the device.
///
/// # Errors
///
/// Returns the first failure.
pub fn decode<B: DecodeBackend>(device: &B::Device, topic: DecodeTopic) -> Result<(), Failure> {
    if topic == DecodeTopic::ThroughTheRegistry {
        return decode_entry(B::ENTRY, device, topic);
    }
    let run = |case: DecodeCase| {
        let backend = DecodeCase::backend::<B>(device, case.problem)?;
        case.check_stage(&backend, device)
    };
    Cases::new(B::ENTRY.spec, device.target(), DecodeCase::new, run)?.topic(topic)
}

/// Runs the cases of a backend that a [registry](mla_runtime::select::Registry) has under a name.
///
/// # Errors
///
/// Returns the first failure. It is an error, too, if the backend is for another type of device.
pub fn decode_entry<D: Device>(
    entry: Entry,
    device: &D,
    topic: DecodeTopic,
) -> Result<(), Failure> {
    let run = |case: DecodeCase| {
        let stage = decode_stage(entry, device, case.problem)?;
        case.check_stage(&stage, device)
    };
    Cases::new(entry.spec, device.target(), DecodeCase::new, run)?.topic(topic)
}

/// Number of columns of a block table with room for longer requests than it has.
const SPARE_PAGES: usize = 4096;

impl Cases<'_, DecodeCase> {
    /// Returns request lengths around zero, one page, and several pages.
    fn lens(&self) -> [usize; 6] {
        let page = self.plain.page_size as usize;
        [1, page - 1, page, page + 1, 0, 150]
    }

    fn topic(&self, topic: DecodeTopic) -> Result<(), Failure> {
        let (accepted, spec, plain) = (&self.accepted, &self.accepted.spec, self.plain);
        let propagates_nan = spec.features.contains(Feature::NanPropagation);
        match topic {
            DecodeTopic::NanQueries | DecodeTopic::NanRows if !propagates_nan => Ok(()),
            DecodeTopic::SingleTokens => self.check(DecodeCase::new(plain, &self.lens())),
            DecodeTopic::QueryLengths => self.query_lengths().try_for_each(|case| self.check(case)),
            DecodeTopic::Formats => self.each(self.every_format(), &self.lens()),
            DecodeTopic::Dimensions => {
                let problems = accepted.with(accepted.dims(), |p, dims| p.dims = dims);
                self.each(problems, &[5, 90])
            }
            DecodeTopic::Heads => {
                let problems = accepted.with(accepted.heads(), |p, heads| p.heads = heads);
                self.each(problems, &[70, 1, 33])
            }
            DecodeTopic::PageSizes => {
                let problems = accepted.with(accepted.page_sizes(), |p, size| p.page_size = size);
                self.each(problems, &[1, 200, 17])
            }
            DecodeTopic::LongContexts => self.check(DecodeCase::new(plain, &[2100, 40, 900])),
            DecodeTopic::LongTables => self.long_tables(),
            DecodeTopic::Strides => self.strides(),
            DecodeTopic::EmptyBatches => {
                let batches: [&[usize]; 3] = [&[], &[0], &[0, 5, 0]];
                let mut batches = batches.into_iter();
                batches.try_for_each(|lens| self.check(DecodeCase::new(plain, lens)))
            }
            DecodeTopic::NanQueries => self.nan_queries(),
            DecodeTopic::NanRows => self.nan_rows(),
            DecodeTopic::GroupScales => self.group_scales(),
            DecodeTopic::SlotLists => self.slot_lists(),
            DecodeTopic::DenseRequests => self.dense_requests(),
            DecodeTopic::SecondCache => self.second_cache(),
            DecodeTopic::SplitCache => self.split_cache(),
            DecodeTopic::NonCausal => self.non_causal(),
            DecodeTopic::Sinks => self.sinks(),
            DecodeTopic::QueryScales => self.query_scales(),
            DecodeTopic::QuantisedOutputs => {
                let quantised = accepted.with(vec![true], |p, on| p.quant_output = on);
                self.each(quantised, &[130, 7])
            }
            DecodeTopic::DependentLaunch => self.dependent_launch(),
            DecodeTopic::Graphs => self.graphs(),
            DecodeTopic::Workspace => self.workspace(),
            DecodeTopic::Alignment => self.alignment(),
            DecodeTopic::Repetition => self.repeated(|| DecodeCase::new(plain, &[600, 3])),
            DecodeTopic::BatchInvariance => self.batch_invariance(),
            // The caller runs these cases through the registry.
            DecodeTopic::ThroughTheRegistry => self.check(DecodeCase::new(plain, &[600, 3])),
        }
    }

    /// Tries tensors with room between their tokens: around pages, and with each number of heads
    /// on longer requests, which other forms of a kernel may do.
    fn strides(&self) -> Result<(), Failure> {
        let apart = |problem, lens: &[usize]| DecodeCase {
            gap: 16,
            lse: false,
            ..DecodeCase::new(problem, lens)
        };
        self.check(apart(self.plain, &self.lens()))?;
        let accepted = &self.accepted;
        let mut problems = accepted
            .with(accepted.heads(), |p, heads| p.heads = heads)
            .into_iter();
        problems.try_for_each(|problem| self.check(apart(problem, &[1, 600, 130, 65])))
    }

    /// Returns the problems with several query tokens.
    fn several(&self) -> Vec<Problem> {
        let levels = vec![QueryLen::Uniform, QueryLen::Ragged];
        self.accepted.with(levels, |p, level| p.query_len = level)
    }

    /// Returns a case for each of these problems.
    fn query_lengths(&self) -> impl Iterator<Item = DecodeCase> {
        let longest = self.accepted.spec.max_query_len;
        self.several().into_iter().flat_map(move |problem| {
            let lens = match problem.query_len {
                QueryLen::Uniform => [3; 4],
                _ => [1, 4, 0, 2],
            };
            let case = |query_lens| DecodeCase {
                query_lens,
                ..DecodeCase::new(problem, &[3, 140, 65, 2])
            };
            // The spec's bound on query tokens, if it has one, but at most 64.
            let longest = longest.map(|longest| longest.min(64) as usize);
            let at_bound = longest.map(|longest| case(vec![longest; 4]));
            let within = |len: usize| len.min(longest.unwrap_or(len));
            [case(lens.map(within).to_vec())]
                .into_iter()
                .chain(at_bound)
        })
    }

    /// Tries ten random batches of requests with lengths around tiles and with many splits. They
    /// have one and several query tokens, and lists of slots. Other problems are tried in a few
    /// batches.
    fn batch_invariance(&self) -> Result<(), Failure> {
        let accepted = &self.accepted;
        if !accepted.spec.features.contains(Feature::BatchInvariant) {
            return Ok(());
        }
        let invariant = |problem: Problem, batches, lens: &[usize]| {
            let features = problem.features.with(Feature::BatchInvariant);
            DecodeCase {
                trial: Trial::AmongOthers(batches),
                ..DecodeCase::new(problem.with_features(features), lens)
            }
        };
        let long = [1, 64, 65, 700, 4500, 0, 2100];
        self.check(invariant(self.plain, 10, &long))?;
        for problem in self.several() {
            let query_lens = match problem.query_len {
                QueryLen::Uniform => vec![3; long.len()],
                _ => vec![1, 4, 0, 2, 3, 1, 1],
            };
            self.check(DecodeCase {
                query_lens,
                ..invariant(problem, 10, &long)
            })?;
        }
        for problem in accepted.with(vec![true], |p, sparse| p.sparse = sparse) {
            self.check(DecodeCase {
                list_width: 1300,
                with_counts: true,
                ..invariant(problem, 10, &[1500, 17, 0, 3, 700])
            })?;
        }
        let mut problems = self.every_format();
        problems.extend(accepted.with(accepted.heads(), |p, heads| p.heads = heads));
        let mut problems = problems.into_iter();
        problems.try_for_each(|problem| self.check(invariant(problem, 3, &[63, 1, 900, 130])))
    }

    /// Returns the problems of every dtype with every cache format.
    fn every_format(&self) -> Vec<Problem> {
        let spec = &self.accepted.spec;
        let of = |dtype| spec.kv_formats.iter().map(move |format| (dtype, *format));
        let pairs = spec.dtypes.iter().copied().flat_map(of).collect();
        self.accepted.with(pairs, |p, (dtype, format)| {
            (p.dtype, p.kv_format) = (dtype, format);
        })
    }

    fn long_tables(&self) -> Result<(), Failure> {
        let accepted = &self.accepted;
        let long = |problem, seq_lens: &[usize]| DecodeCase {
            spare_pages: SPARE_PAGES,
            ..DecodeCase::new(problem, seq_lens)
        };
        for problem in self.every_format() {
            self.check(long(problem, &self.lens()))?;
        }
        for problem in accepted.with(accepted.dims(), |p, dims| p.dims = dims) {
            self.check(long(problem, &[5, 90]))?;
        }
        for problem in accepted.with(accepted.heads(), |p, heads| p.heads = heads) {
            self.check(long(problem, &[70, 1, 33]))?;
        }
        for case in self.query_lengths() {
            self.check(DecodeCase {
                spare_pages: SPARE_PAGES,
                ..case
            })?;
        }
        for problem in accepted.with(accepted.heads(), |p, heads| {
            (p.heads, p.sparse) = (heads, true);
        }) {
            let widest = accepted.spec.max_list_width;
            self.check(DecodeCase {
                list_width: widest.map_or(8192, |widest| widest.min(1 << 16) as usize),
                with_counts: true,
                ..long(problem, &[300, 17, 0])
            })?;
        }
        self.repeated(|| long(self.plain, &[2100, 40, 900]))
    }

    fn nan_queries(&self) -> Result<(), Failure> {
        let plain = self.plain;
        let page = plain.page_size as usize;
        let last = plain.dims.row() as usize - 1;
        self.check(DecodeCase {
            nan_queries: vec![[1, 0, 0], [3, plain.heads as usize - 1, last]],
            ..DecodeCase::new(plain, &[6, 6, page + 1, 150])
        })?;
        // The other rows of the request see fewer keys or more.
        self.several().into_iter().try_for_each(|problem| {
            self.check(DecodeCase {
                query_lens: vec![3; 2],
                nan_queries: vec![[2, 0, 0], [4, 0, 0]],
                ..DecodeCase::new(problem, &[3, 70])
            })
        })
    }

    fn nan_rows(&self) -> Result<(), Failure> {
        let plain = self.plain;
        let page = plain.page_size as usize;
        let formats = self.accepted.spec.kv_formats.to_vec();
        let formats = self.accepted.with(formats, |p, kv| p.kv_format = kv);
        let rope = plain.dims.latent as usize;
        let rope = rope.min(plain.dims.row() as usize - 1);
        for problem in formats {
            // The last row of one request, the first of the next, and a rotary part.
            self.check(DecodeCase {
                nan_rows: vec![[1, 5, 0], [2, 0, 130], [4, 40, rope]],
                ..DecodeCase::new(problem, &[6, 6, page + 1, 150, 70])
            })?;
        }
        // The NaN is in one of several splits.
        self.check(DecodeCase {
            nan_rows: vec![[0, 700, 3]],
            ..DecodeCase::new(plain, &[2100, 900])
        })?;
        // The NaN is in a later token's row, which earlier tokens do not see.
        self.several().into_iter().try_for_each(|problem| {
            self.check(DecodeCase {
                query_lens: vec![3; 3],
                nan_rows: vec![[0, 2, 1], [1, 68, 511.min(rope)], [2, 299, rope]],
                ..DecodeCase::new(problem, &[3, 70, 300])
            })
        })
    }

    fn group_scales(&self) -> Result<(), Failure> {
        let dtypes = self.accepted.spec.dtypes.iter();
        let both = dtypes.flat_map(|dtype| [false, true].map(|sparse| (*dtype, sparse)));
        let both = both.flat_map(|(dtype, sparse)| {
            let formats = [KvFormat::Fp8DsMla, KvFormat::Fp8PerToken];
            formats.map(|format| (dtype, sparse, format))
        });
        let problems = self.accepted.with(both.collect(), |p, all| {
            (p.dtype, p.sparse, p.kv_format) = all;
        });
        for (problem, far) in problems
            .iter()
            .flat_map(|p| [-10, -20].map(|far| (*p, far)))
        {
            // The smallest scale is the smallest normal number of f16.
            let top = -14 - far;
            let (low, middle) = (top + far, top + far / 2);
            let has_groups = problem.kv_format == KvFormat::Fp8DsMla;
            let check = |exponents, lead| {
                self.check(DecodeCase {
                    group_scales: Some(GroupScales {
                        exponents,
                        // Scales of single rows need not be powers of two.
                        factor: if has_groups { 1.0 } else { 1.5 },
                        queries: -top,
                        lead,
                    }),
                    ..DecodeCase::new(problem, &[150, 90, 17, 1])
                })
            };
            if has_groups {
                check([[top, low, top, middle]; 2], 0.0)?;
            }
            // On some GPUs, rows whose scales are only this far apart share one factor, which
            // brings the scales into f16's range.
            if far >= -10 {
                let rows = [[low; 4], [top, top, top, low]];
                check(rows, 0.0)?;
                // Rows with small scales have nearly all the weight.
                check([rows[1], rows[0]], 2.0)?;
            }
        }
        Ok(())
    }

    fn slot_lists(&self) -> Result<(), Failure> {
        let sparse = self
            .accepted
            .with(vec![true], |p, sparse| p.sparse = sparse);
        sparse.into_iter().try_for_each(|problem| {
            self.check(DecodeCase::new(problem, &[300, 17, 0]))?;
            self.check(DecodeCase {
                list_width: 150,
                with_counts: true,
                ..DecodeCase::new(problem, &[300, 40, 17, 9, 1, 0])
            })?;
            self.check(DecodeCase {
                list_width: 0,
                ..DecodeCase::new(problem, &[20])
            })
        })
    }

    fn tried(&self, case: DecodeCase, trials: &[Trial]) -> Result<(), Failure> {
        let mut trials = trials.iter().copied();
        trials.try_for_each(|trial| {
            self.check(DecodeCase {
                trial,
                ..case.clone()
            })
        })
    }

    fn dependent_launch(&self) -> Result<(), Failure> {
        let late = [Trial::LateQueries, Trial::LateRows];
        for problem in self.every_format() {
            self.tried(DecodeCase::new(problem, &self.lens()), &late)?;
        }
        // Cases with several splits, and with several query tokens.
        self.tried(DecodeCase::new(self.plain, &[2100, 40, 900]), &late)?;
        self.query_lengths()
            .try_for_each(|case| self.tried(case, &late))
    }

    /// Tries batches of each level that the spec says can be captured.
    fn graphs(&self) -> Result<(), Failure> {
        let levels = [
            (GraphSupport::SingleToken, QueryLen::Single, [1; 4]),
            (GraphSupport::UniformBatch, QueryLen::Uniform, [3; 4]),
            (GraphSupport::Always, QueryLen::Ragged, [1, 4, 0, 2]),
        ];
        let captured = levels.into_iter();
        let captured = captured.filter(|(level, ..)| self.accepted.spec.graphs >= *level);
        for (_, query_len, query_lens) in captured {
            let problems = self
                .accepted
                .with(vec![query_len], |p, level| p.query_len = level);
            for problem in problems {
                let case = DecodeCase {
                    query_lens: query_lens.to_vec(),
                    ..DecodeCase::new(problem, &[3, 1100, 65, 20])
                };
                self.tried(case, &[Trial::Replayed])?;
            }
        }
        Ok(())
    }

    fn workspace(&self) -> Result<(), Failure> {
        let trials = [Trial::Guarded, Trial::BeyondLimits];
        self.tried(DecodeCase::new(self.plain, &self.lens()), &trials)?;
        self.tried(DecodeCase::new(self.plain, &[2100, 40, 900]), &trials)?;
        self.query_lengths()
            .try_for_each(|case| self.tried(case, &[Trial::Guarded]))
    }

    fn alignment(&self) -> Result<(), Failure> {
        let exactly = [Trial::ExactlyAligned];
        for problem in self.every_format() {
            self.tried(DecodeCase::new(problem, &self.lens()), &exactly)?;
        }
        self.query_lengths()
            .try_for_each(|case| self.tried(case, &exactly))
    }

    fn dense_requests(&self) -> Result<(), Failure> {
        let sparse = self.accepted.sparse(Feature::DenseRequests);
        sparse.into_iter().try_for_each(|problem| {
            // Some requests are shorter than the bound, some as long, and some longer. One has no
            // tokens.
            self.check(DecodeCase {
                dense_within: 37,
                ..DecodeCase::new(problem, &[20, 37, 38, 0, 1])
            })?;
            let query_lens = match problem.query_len {
                QueryLen::Single => return Ok(()),
                _ => vec![4, 0, 3, 2],
            };
            self.check(DecodeCase {
                query_lens,
                list_width: 150,
                dense_within: 130,
                ..DecodeCase::new(problem, &[4, 90, 131, 130])
            })
        })
    }

    fn split_cache(&self) -> Result<(), Failure> {
        let Some(accepted) = self.accepted.split() else {
            return Ok(());
        };
        let split = Cases {
            plain: accepted.plainest,
            accepted,
            new: self.new,
            run: Box::new(|case| (self.run)(case)),
        };
        OF_CACHES.iter().try_for_each(|topic| split.topic(*topic))
    }

    fn second_cache(&self) -> Result<(), Failure> {
        let takes_dense = self.accepted.spec.features.contains(Feature::DenseRequests);
        let sparse = self.accepted.sparse(Feature::SecondCache);
        sparse.into_iter().try_for_each(|problem| {
            self.check(DecodeCase {
                second_width: 21,
                ..DecodeCase::new(problem, &[300, 17, 0])
            })?;
            // One second cache has no other lists beside it. Another one, with lists of more than a
            // tile, is beside dense requests.
            self.check(DecodeCase {
                second_width: 5,
                list_width: 0,
                ..DecodeCase::new(problem, &[20])
            })?;
            self.check(DecodeCase {
                second_width: 130,
                list_width: 90,
                dense_within: if takes_dense { 90 } else { 0 },
                ..DecodeCase::new(problem, &[80, 200])
            })
        })
    }

    /// Tries drafts that see each other, with every dtype and format and in several splits. A row
    /// that only later tokens would see has a NaN.
    fn non_causal(&self) -> Result<(), Failure> {
        let features = self.accepted.spec.features;
        if !features.contains(Feature::NonCausal) {
            return Ok(());
        }
        let case = |case: DecodeCase| DecodeCase {
            causal: false,
            ..case
        };
        let short = self.query_lengths();
        let long = self.query_lengths().map(|short| DecodeCase {
            seq_lens: vec![600, 2100, 65, 17],
            ..short
        });
        short
            .chain(long)
            .try_for_each(|step| self.check(case(step)))?;
        for problem in self.several() {
            for format in self.every_format() {
                let mut problem = problem;
                (problem.dtype, problem.kv_format) = (format.dtype, format.kv_format);
                let step = DecodeCase {
                    query_lens: vec![3; 3],
                    ..DecodeCase::new(problem, &[3, 70, 300])
                };
                self.check(case(step))?;
            }
            if features.contains(Feature::NanPropagation) {
                let step = DecodeCase {
                    query_lens: vec![3; 2],
                    nan_rows: vec![[0, 2, 1]],
                    ..DecodeCase::new(problem, &[3, 70])
                };
                self.check(case(step))?;
            }
        }
        Ok(())
    }

    /// Tries every dtype and format, every query length and list, and several splits.
    fn query_scales(&self) -> Result<(), Failure> {
        let mut problems = self.every_format();
        problems.extend(self.several());
        problems.extend(self.accepted.sparse(Feature::QueryScales));
        problems
            .into_iter()
            .filter_map(|problem| self.accepted.having(problem, Feature::QueryScales))
            .try_for_each(|problem| {
                let query_lens = match problem.query_len {
                    QueryLen::Single => [1; 3],
                    QueryLen::Uniform => [3; 3],
                    QueryLen::Ragged => [1, 0, 4],
                };
                self.check(DecodeCase {
                    query_lens: query_lens.to_vec(),
                    ..DecodeCase::new(problem, &[600, 17, 90])
                })
            })
    }

    fn sinks(&self) -> Result<(), Failure> {
        let (accepted, plain) = (&self.accepted, self.plain);
        let features = self.accepted.spec.features;
        if !features.contains(Feature::Sinks) {
            return Ok(());
        }
        let mut problems = accepted.with(vec![false], |p, sparse| p.sparse = sparse);
        problems.extend(accepted.sparse(Feature::Sinks));
        problems.into_iter().try_for_each(|problem| {
            self.check(DecodeCase {
                with_sinks: true,
                ..DecodeCase::new(problem, &[90, 17, 0])
            })?;
            if problem.heads != plain.heads || problem.query_len != plain.query_len {
                return Ok(());
            }
            // Sinks are tried with several splits, with dense requests, and with the entries of a
            // second cache.
            let has = |feature| problem.sparse && features.contains(feature);
            self.check(DecodeCase {
                with_sinks: true,
                with_counts: true,
                list_width: 400,
                dense_within: if has(Feature::DenseRequests) { 70 } else { 0 },
                second_width: if has(Feature::SecondCache) { 21 } else { 0 },
                ..DecodeCase::new(problem, &[500, 60])
            })
        })
    }
}

/// The topics that read a cache.
const OF_CACHES: &[DecodeTopic] = &[
    DecodeTopic::SingleTokens,
    DecodeTopic::QueryLengths,
    DecodeTopic::Formats,
    DecodeTopic::Dimensions,
    DecodeTopic::Heads,
    DecodeTopic::PageSizes,
    DecodeTopic::LongContexts,
    DecodeTopic::EmptyBatches,
    DecodeTopic::NanRows,
    DecodeTopic::SlotLists,
    DecodeTopic::DenseRequests,
    DecodeTopic::SecondCache,
    DecodeTopic::DependentLaunch,
    DecodeTopic::Graphs,
    DecodeTopic::Workspace,
    DecodeTopic::Alignment,
];

// Returns the backend that a registry finds under this name.
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
