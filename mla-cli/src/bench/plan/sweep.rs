//! The rows of a sweep, which are all combinations of its keys' values, and those of a file of
//! cases.

use std::collections::BTreeMap;

use mla_runtime::backend::LayerConfig;
use mla_runtime::batch::Request;
use mla_runtime::model::ModelConfig;
use mla_runtime::plan::crossover;
use mla_runtime::spec::{Feature, GraphSupport, Phase, Problem, QueryLen};

use super::axes::{Batch, Model, batches, models};
use super::rows::{BenchContext, Rows};
use crate::args::cache_features;
use crate::batch::{BatchSpec, RequestKind, kind};
use crate::bench::cases::{Case, CaseKind};
use crate::bench::lists::Lists;
use crate::bench::settings::{
    Measure, OF_CASE, OF_CONTENDER, Route, SEED, Settings, effective, name_of, on_or_off,
};
use crate::bench::work::{Attention, Kind, Layer, RowPlan, Work};
use crate::device::stopwatch::Stopwatch;
use crate::error::CliError;
use crate::run::workload;

/// Returns the rows of a sweep.
pub(crate) fn sweep<D: Stopwatch>(
    context: &BenchContext<'_, D>,
    settings: &Settings,
) -> Result<Vec<RowPlan>, CliError> {
    let batches = batches(settings)?;
    let models = models(settings)?;
    let lists = settings.lists()?;
    let pages = settings.page.as_deref().unwrap_or(&[64]);
    let split_caches = settings.split_cache.as_deref().unwrap_or(&[false]);
    let forms = |page| split_caches.iter().map(move |split| (page, *split));
    let modes = settings.batch_invariant.as_deref().unwrap_or(&[false]);
    let mut sweep = Sweep {
        rows: Rows::new(context, settings),
        compared: [settings.several(&OF_CASE), settings.several(&OF_CONTENDER)],
    };
    for model in &models {
        let own = [model.heads];
        for &heads in settings.heads.as_deref().unwrap_or(&own) {
            for batch in &batches {
                for &kv_format in &model.kv_formats {
                    for (page, split) in pages.iter().copied().flat_map(forms) {
                        for lists in &lists {
                            let problem = Problem::new(model.dims, heads, model.dtype)
                                .with_kv_format(kv_format)
                                .with_page_size(page)
                                .with_sparse(lists.is_some());
                            for invariant in modes {
                                let mut features = cache_features(split);
                                if *invariant {
                                    features = features.with(Feature::BatchInvariant);
                                }
                                let problem = problem.with_features(features);
                                sweep.batch(model, &problem, batch, *lists)?;
                            }
                        }
                    }
                }
            }
        }
    }
    sweep.rows.finish()
}

/// Returns the rows of a file of cases: pages of 64, with numbers as its protocol says.
pub(crate) fn cases<D: Stopwatch>(
    context: &BenchContext<'_, D>,
    settings: &Settings,
    cases: Vec<Case>,
) -> Result<Vec<RowPlan>, CliError> {
    let mut sweep = Sweep {
        rows: Rows::new(context, settings),
        compared: [Vec::new(), Vec::new()],
    };
    for case in cases {
        sweep.case(&case)?;
    }
    sweep.rows.finish()
}

/// The maximum number of new tokens that count as speculative decode.
const MAX_SPECULATIVE_LEN: u32 = 16;

/// Returns the phase of a batch, by the kinds of its requests.
fn phase_of(spec: &BatchSpec) -> Option<Phase> {
    let decode = |r: &Request| r.q < r.kv && r.q <= MAX_SPECULATIVE_LEN;
    if spec.requests().iter().all(decode) {
        Some(Phase::Decode)
    } else if spec
        .requests()
        .iter()
        .all(|r| kind(*r) == RequestKind::Prefill)
    {
        Some(Phase::Prefill)
    } else {
        None
    }
}

/// A sweep whose batches and models become rows.
struct Sweep<'a, D> {
    rows: Rows<'a, D>,
    /// The keys that distinguish cases, and those that distinguish contenders.
    compared: [Vec<&'static str>; 2],
}

impl<D: Stopwatch> Sweep<'_, D> {
    fn batch(
        &mut self,
        model: &Model,
        problem: &Problem,
        batch: &Batch,
        lists: Option<Lists>,
    ) -> Result<(), CliError> {
        let settings = self.rows.settings;
        let given = settings.keys();
        let of_layer = ["path", "threshold", "query_chunk", "rows", "own_rows"];
        let wants_layer = of_layer.into_iter().find(|key| given.contains_key(*key));
        if let Some(lists) = lists {
            return match (settings.measure, wants_layer) {
                (Some(Measure::Layer), _) => Err(CliError::argument(
                    "topk",
                    "a value, with --measure layer",
                    "one only where attention alone is timed: the lists of a layer are made by its \
                     indexer",
                )),
                (_, Some(key)) => Err(CliError::argument(
                    key,
                    "a value, with --topk",
                    format!("one only {}", effective(key)),
                )),
                // Sparse attention is absorbed in both phases.
                (_, None) => self.attention(model, problem, batch, Kind::Decode, 1.0, Some(lists)),
            };
        }
        match (settings.measure, phase_of(&batch.spec), wants_layer) {
            (Some(Measure::Attention), _, Some(key)) => Err(CliError::argument(
                key,
                "a value, with --measure attention",
                format!("one only {}", effective(key)),
            )),
            (Some(Measure::Attention), None, _) => Err(CliError::argument(
                "measure",
                format!("attention, of {}", batch.text),
                "layer for this batch: attention alone is that of decodes, speculative ones \
                 included, or that of prefills without context",
            )),
            (Some(Measure::Attention) | None, Some(phase), None) => {
                let kind = match phase {
                    Phase::Decode => Kind::Decode,
                    Phase::Prefill => Kind::Prefill { causal: true },
                };
                self.attention(model, problem, batch, kind, 1.0, None)
            }
            _ => self.layer(model, problem, batch),
        }
    }

    /// Adds the rows of a case: attention with the scale that its file stands for, or a step of
    /// R1's layer.
    fn case(&mut self, case: &Case) -> Result<(), CliError> {
        let softmax_scale = match case.kind {
            CaseKind::Layer => ModelConfig::preset("deepseek-r1")?.softmax_scale() as f32,
            _ => 1.0 / (case.dims.head.qk() as f32).sqrt(),
        };
        let model = Model {
            parameters: Vec::new(),
            dims: case.dims,
            heads: case.heads,
            dtype: case.dtype,
            kv_formats: Vec::new(),
            softmax_scale,
        };
        let requests = &case.requests;
        let [queries, keys] = [|r: &Request| r.q, |r: &Request| r.kv].map(|of| {
            requests
                .iter()
                .map(|request| u64::from(of(request)))
                .sum::<u64>()
        });
        // A case can have a hundred lengths, so its label gives sums.
        let count = requests.len();
        let batch = Batch {
            spec: BatchSpec::new(requests.clone()),
            text: case.id.clone(),
            label: format!("{count} requests, {queries} query and {keys} kv tokens"),
        };
        let problem = Problem::new(case.dims, case.heads, case.dtype);
        match case.kind {
            CaseKind::Layer => self.layer(&model, &problem, &batch),
            CaseKind::Decode => self.attention(&model, &problem, &batch, Kind::Decode, 0.1, None),
            CaseKind::Sparse { kv_format, lists } => {
                let problem = problem.with_kv_format(kv_format).with_sparse(true);
                self.attention(&model, &problem, &batch, Kind::Decode, 0.1, Some(lists))
            }
            CaseKind::Prefill { causal } => {
                let kind = Kind::Prefill { causal };
                self.attention(&model, &problem, &batch, kind, 1.0, None)
            }
        }
    }

    /// Adds a row for each compared backend of an attention. Queries, keys and values have this
    /// standard deviation.
    fn attention(
        &mut self,
        model: &Model,
        problem: &Problem,
        batch: &Batch,
        kind: Kind,
        deviation: f32,
        lists: Option<Lists>,
    ) -> Result<(), CliError> {
        let requests = batch.spec.requests();
        let (phase, query_len) = match kind {
            Kind::Decode => (Phase::Decode, workload::query_len(requests)),
            Kind::Prefill { .. } => (Phase::Prefill, QueryLen::Single),
        };
        let problem = problem.with_query_len(query_len);
        let problem = with_graphs(problem, self.rows.context.graphs, phase);
        let decodes = phase == Phase::Decode;
        let of_decode = ["kv", "page", "split_cache", "decode"];
        self.rows.note(&batch.text, &of_decode, decodes);
        self.rows.note(&batch.text, &["prefill"], !decodes);
        let settings = self.rows.settings;
        for backend in self.rows.backends(&problem, phase)? {
            let attention = Attention {
                backend,
                kind,
                config: LayerConfig::new(problem, model.softmax_scale),
                requests: requests.to_vec(),
                deviation,
                layers: settings.layers.unwrap_or(1) as usize,
                seed: settings.seed.unwrap_or(SEED).into(),
                lists,
            };
            let of_lists = lists.map(|lists| {
                [
                    ("topk", lists.topk.to_string()),
                    ("lists", name_of(lists.kind)),
                    ("valid", lists.valid.to_string()),
                ]
            });
            let parameters = of_lists.into_iter().flatten().collect();
            let work = Work::Attention(attention);
            self.push(model, batch, backend, parameters, work)?;
        }
        Ok(())
    }

    fn layer(&mut self, model: &Model, problem: &Problem, batch: &Batch) -> Result<(), CliError> {
        let settings = self.rows.settings;
        // This comes before the batch's pages are made.
        let layers = f64::from(settings.layers.unwrap_or(1));
        let bytes = layers * workload::bytes(&batch.spec, problem);
        self.rows
            .context
            .about
            .check_memory("memory", &batch.text, bytes)?;
        let default =
            crossover::threshold(&self.rows.context.device.machine(), problem, false, None);
        let mut routes: Vec<(Option<Route>, u32)> = Vec::new();
        match (&settings.path, &settings.threshold) {
            (Some(paths), _) => routes.extend(paths.iter().map(|path| match path {
                Route::Absorbed => (Some(*path), u32::MAX),
                Route::Expanded => (Some(*path), 0),
            })),
            (None, Some(thresholds)) => routes.extend(thresholds.iter().map(|t| (None, *t))),
            (None, None) => routes.push((None, default.min(self.longest_decode(problem)?))),
        }
        for (route, threshold) in routes {
            for query_chunk in optional(&settings.query_chunk) {
                for rows in optional(&settings.rows) {
                    for own_rows in optional(&settings.own_rows) {
                        let layer = LayerSettings {
                            route,
                            threshold,
                            query_chunk,
                            rows,
                            own_rows,
                        };
                        self.step(model, problem, batch, layer)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the maximum number of new tokens of a request that every decode backend of the
    /// comparison accepts, for the queries of the layer.
    fn longest_decode(&mut self, problem: &Problem) -> Result<u32, CliError> {
        let (registry, target) = (
            self.rows.context.registry,
            self.rows.context.device.target(),
        );
        let mut min = u32::MAX;
        for name in self.rows.backends(problem, Phase::Decode)? {
            let spec = registry.get_on(target, Phase::Decode, name)?.spec;
            min = min.min(spec.max_query_len.unwrap_or(u32::MAX));
        }
        Ok(min)
    }

    fn step(
        &mut self,
        model: &Model,
        problem: &Problem,
        batch: &Batch,
        layer: LayerSettings,
    ) -> Result<(), CliError> {
        let paths = Paths::of(&batch.spec, layer.threshold);
        self.note_step(batch, layer, &paths);
        let is_batch_invariant = problem.features.contains(Feature::BatchInvariant);
        let len = layer.query_chunk.unwrap_or(u32::MAX);
        let absorbed = paths.absorbed.iter();
        let chunks: Vec<Request> = absorbed.flat_map(|r| workload::chunks(r, len)).collect();
        let query_len = match workload::query_len(&chunks) {
            QueryLen::Uniform if is_batch_invariant => QueryLen::Ragged,
            query_len => query_len,
        };
        let problem = problem.with_query_len(query_len);
        let problem = with_graphs(problem, self.rows.context.graphs, Phase::Decode);
        let config = LayerConfig::new(problem, model.softmax_scale);
        let mut prefills = self.rows.backends(&problem, Phase::Prefill)?;
        let mut decodes = self.rows.backends(&problem, Phase::Decode)?;
        // Several backends are compared only for the paths that the batch uses.
        if paths.expanded.is_empty() {
            prefills.truncate(1);
        }
        if paths.absorbed.is_empty() {
            decodes.truncate(1);
        }
        for prefill in prefills {
            for &decode in &decodes {
                let measured = Layer {
                    prefill,
                    decode,
                    config,
                    spec: batch.spec.clone(),
                    threshold: layer.threshold,
                    query_chunk: layer.query_chunk,
                    rows: layer.rows,
                    own_rows: layer.own_rows == Some(true),
                    layers: self.rows.settings.layers.unwrap_or(1) as usize,
                    seed: self.rows.settings.seed.unwrap_or(SEED),
                };
                let backends = paths.backends(prefill, decode);
                let contender = match layer.route {
                    Some(route) => format!("{} ({backends})", name_of(route)),
                    None => backends,
                };
                let work = Work::Layer(measured);
                self.push(model, batch, &contender, layer.parameters(), work)?;
            }
        }
        Ok(())
    }

    /// Notes which keys have an effect on a step.
    fn note_step(
        &mut self,
        batch: &Batch,
        layer: LayerSettings,
        Paths { absorbed, expanded }: &Paths<'_>,
    ) {
        let (route, query_chunk) = (layer.route, layer.query_chunk);
        // In a comparison of paths, the path not taken need not be used.
        let [on_absorbed, on_expanded] =
            [Route::Absorbed, Route::Expanded].map(|path| route == Some(path));
        for (keys, effective) in [
            (
                &["kv", "page", "split_cache", "path", "threshold"][..],
                true,
            ),
            (&["decode"], !absorbed.is_empty()),
            (&["prefill"], !expanded.is_empty()),
            (
                &["query_chunk"],
                on_expanded || absorbed.iter().any(|r| Some(r.q) > query_chunk),
            ),
            (
                &["rows"],
                on_absorbed || expanded.iter().any(|r| r.context_len() > 0),
            ),
            (&["own_rows"], absorbed.len() + expanded.len() > 1),
        ] {
            self.rows.note(&batch.text, keys, effective);
        }
    }

    fn push(
        &mut self,
        model: &Model,
        batch: &Batch,
        contender: &str,
        more: Vec<(&'static str, String)>,
        work: Work,
    ) -> Result<(), CliError> {
        let problem = work.config().problem;
        let mut parameters: BTreeMap<&'static str, String> =
            model.parameters.iter().cloned().collect();
        parameters.insert("heads", problem.heads.to_string());
        parameters.insert("kv", problem.kv_format.to_string());
        parameters.insert("page", problem.page_size.to_string());
        for (key, is_on) in [
            ("split_cache", problem.has_split_cache()),
            (
                "batch_invariant",
                problem.features.contains(Feature::BatchInvariant),
            ),
        ] {
            parameters.insert(key, on_or_off(is_on).to_owned());
        }
        parameters.extend(more);
        let [case, contender] = [(0, &*batch.text), (1, contender)].map(|(of, name)| {
            let keys = self.compared[of].iter();
            let values = keys.filter_map(|key| Some((key, parameters.get(key)?)));
            values.fold(name.to_owned(), |text, (key, value)| {
                format!("{text} {key}={value}")
            })
        });
        self.rows.push(RowPlan {
            case,
            contender,
            label: batch.label.clone(),
            parameters,
            work,
        })
    }
}

/// Returns the problem with the graph support that it needs.
const fn with_graphs(problem: Problem, graphs: bool, phase: Phase) -> Problem {
    let graphs = match (graphs, phase, problem.query_len) {
        (false, ..) => GraphSupport::Never,
        (_, Phase::Decode, QueryLen::Single) => GraphSupport::SingleToken,
        (_, Phase::Decode, QueryLen::Uniform) => GraphSupport::UniformBatch,
        _ => GraphSupport::Always,
    };
    problem.with_graphs(graphs)
}

/// The settings with which a layer runs a batch.
#[derive(Clone, Copy)]
struct LayerSettings {
    route: Option<Route>,
    threshold: u32,
    query_chunk: Option<u32>,
    rows: Option<u32>,
    own_rows: Option<bool>,
}

/// Returns each value, or `None` if the key is not given.
fn optional<T: Copy>(list: &Option<Vec<T>>) -> Vec<Option<T>> {
    list.as_ref()
        .map_or(vec![None], |list| list.iter().copied().map(Some).collect())
}

impl LayerSettings {
    /// Returns the parameters that a row shows.
    fn parameters(self) -> Vec<(&'static str, String)> {
        let threshold = self.route.is_none().then_some(self.threshold);
        let parameters = [
            ("path", self.route.map(name_of)),
            ("threshold", threshold.map(|it| it.to_string())),
            ("query_chunk", self.query_chunk.map(|it| it.to_string())),
            ("rows", self.rows.map(|it| it.to_string())),
            ("own_rows", self.own_rows.map(|it| on_or_off(it).to_owned())),
        ];
        let given = parameters.into_iter();
        given
            .filter_map(|(key, value)| Some((key, value?)))
            .collect()
    }
}

/// The requests of a batch on the two paths of the layer.
struct Paths<'b> {
    absorbed: Vec<&'b Request>,
    expanded: Vec<&'b Request>,
}

impl<'b> Paths<'b> {
    fn of(spec: &'b BatchSpec, threshold: u32) -> Self {
        let requests = spec.requests().iter();
        let (absorbed, expanded) = requests.partition(|request| request.q <= threshold);
        Self { absorbed, expanded }
    }

    /// Returns the names of those of the two backends that run.
    fn backends(&self, prefill: &str, decode: &str) -> String {
        match (self.absorbed.is_empty(), self.expanded.is_empty()) {
            (true, _) => prefill.to_owned(),
            (_, true) => decode.to_owned(),
            _ if prefill == decode => prefill.to_owned(),
            _ => format!("{decode} + {prefill}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_of_at_most_sixteen_tokens_are_decode() {
        let phase = |spec: &str| phase_of(&spec.parse().unwrap());
        assert_eq!(phase("q1s17"), Some(Phase::Decode));
        assert_eq!(phase("q16s17_q1s17"), Some(Phase::Decode));
        assert_eq!(phase("q17s18"), None);
        assert_eq!(phase("q4"), Some(Phase::Prefill));
        assert_eq!(phase("q4_q1s17"), None);
    }
}
