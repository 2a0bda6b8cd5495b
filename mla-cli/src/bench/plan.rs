//! From settings to rows: every combination, and every reason why one cannot run, before any does.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use mla_runtime::backend::{DecodeStage, LayerConfig, PrefillStage};
use mla_runtime::batch::template::Template;
use mla_runtime::batch::{BatchSpec, MAX_SPECULATIVE_LEN, Request, RequestKind};
use mla_runtime::capability::{Platform, Target};
use mla_runtime::dims::{HeadDims, MlaDims};
use mla_runtime::dtype::DType;
use mla_runtime::kv_format::KvFormat;
use mla_runtime::layer::crossover_threshold;
use mla_runtime::model::ModelConfig;
use mla_runtime::problem::Problem;
use mla_runtime::selection::{self, SelectionError};
use mla_runtime::spec::{GraphSupport, Phase, QueryLen};

use super::attention::{Attention, Kind};
use super::cases::{Case, CaseKind};
use super::job::{Job, Subject};
use super::layer::Layer;
use super::lists::Lists;
use super::settings::{Key, Measure, Route, SEED, Settings, Switch};
use super::site::Site;
use crate::args::read_config;
use crate::error::CliError;
use crate::run::workload;
use crate::stopwatch::{Protocol, Stopwatch};

/// The most rows of one benchmark.
const MAX_ROWS: usize = 10_000;

/// The name that stands for every backend that fits.
pub(super) const ALL: &str = "all";

fn refused(
    argument: &'static str,
    given: impl Into<String>,
    accepted: impl Into<String>,
) -> CliError {
    CliError::Argument {
        argument,
        given: given.into(),
        accepted: accepted.into(),
    }
}

/// How samples are taken.
pub(super) fn protocol<D: Stopwatch>(settings: &Settings) -> Result<Protocol, CliError> {
    let on_gpu = D::PLATFORM == Platform::Cuda;
    let graphs = settings
        .graphs
        .map_or(on_gpu, |graphs| graphs == Switch::On);
    if graphs && !on_gpu {
        return Err(refused(
            "graphs",
            "on",
            "off: a CPU has no graphs to replay",
        ));
    }
    Ok(Protocol {
        samples: settings.samples.unwrap_or(30) as usize,
        warm_up: settings.warm_up.unwrap_or(3) as usize,
        cold_cache: settings.cold_cache != Some(Switch::Off),
        graphs,
    })
}

/// The rows of a sweep.
pub(super) fn sweep<D: Stopwatch>(
    site: &Site<'_, D>,
    settings: &Settings,
) -> Result<Vec<Job>, CliError> {
    let batches = batches(settings)?;
    let models = models(settings)?;
    let lists = settings.lists()?;
    let mut plan = Plan::new(site, settings);
    for model in &models {
        let heads = settings
            .heads
            .clone()
            .unwrap_or_else(|| vec![model.config.heads]);
        for heads in heads {
            for batch in &batches {
                for kv in axis(&model.kv_formats) {
                    for page in axis(&settings.page.clone().unwrap_or_else(|| vec![64])) {
                        let kv_format = *kv;
                        for lists in &lists {
                            let problem = Problem::new(model.config.dims, heads, model.dtype)
                                .with_kv_format(kv_format)
                                .with_page_size(*page)
                                .with_sparse(lists.is_some());
                            plan.batch(model, &problem, batch, *lists)?;
                        }
                    }
                }
            }
        }
    }
    plan.finish()
}

fn axis<T>(values: &[T]) -> std::slice::Iter<'_, T> {
    values.iter()
}

/// A batch of a sweep.
struct Batch {
    spec: BatchSpec,
    text: String,
}

fn batches(settings: &Settings) -> Result<Vec<Batch>, CliError> {
    if settings.batches.is_empty() {
        return Err(refused(
            "SPEC",
            "none",
            "at least one batch, such as 8q1s4k, by arguments, --config or --cases",
        ));
    }
    let ranges = settings.ranges()?;
    let mut unused: BTreeSet<&str> = ranges.keys().map(String::as_str).collect();
    let mut batches = Vec::new();
    for text in &settings.batches {
        let template: Template = text.parse()?;
        let mut numbers = Vec::new();
        for name in template.names() {
            let Some(range) = ranges.get(name) else {
                return Err(refused(
                    "--range",
                    format!("none for {{{name}}} of {text}"),
                    format!("its numbers: --range {name}=1,8,32"),
                ));
            };
            unused.remove(name.as_str());
            numbers.push(range.clone());
        }
        batches.extend(template.expand(&numbers)?.into_iter().map(|one| Batch {
            text: one.spec.to_string(),
            spec: one.spec,
        }));
    }
    if let Some(name) = unused.first() {
        return Err(refused(
            "--range",
            format!("{name}, which occurs in no batch"),
            format!("names of a batch, as in {{{name}}}q1s1k"),
        ));
    }
    let mut seen = BTreeSet::new();
    if let Some(twice) = batches.iter().find(|batch| !seen.insert(&batch.text)) {
        return Err(refused(
            "SPEC",
            format!("{} twice", twice.text),
            "each batch once",
        ));
    }
    Ok(batches)
}

/// A model with dims and dtype of a sweep.
struct Model {
    parameters: Vec<(&'static str, String)>,
    config: ModelConfig,
    dtype: DType,
    kv_formats: Vec<KvFormat>,
}

fn models(settings: &Settings) -> Result<Vec<Model>, CliError> {
    let names = settings
        .model
        .clone()
        .unwrap_or_else(|| vec!["deepseek-r1".to_owned()]);
    let dims = match &settings.dims {
        None => vec![None],
        Some(dims) => dims
            .iter()
            .map(|text| read_dims(text).map(Some))
            .collect::<Result<_, _>>()?,
    };
    let dtypes = match &settings.dtype {
        None => vec![None],
        Some(names) => names
            .iter()
            .map(|name| named("dtype", name, DType::ALL, DType::name).map(Some))
            .collect::<Result<_, _>>()?,
    };
    let mut models = Vec::new();
    for name in &names {
        let path = PathBuf::from(name);
        let config = if path
            .extension()
            .is_some_and(|extension| extension == "json")
        {
            read_config("--model", &path)?
        } else {
            ModelConfig::preset(name)?
        };
        for dims in &dims {
            for dtype in &dtypes {
                let mut config = config;
                config.dims = dims.unwrap_or(config.dims);
                let dtype = dtype.or(config.dtype).unwrap_or(DType::BF16);
                let kv_formats = match &settings.kv {
                    None => vec![KvFormat::of(dtype)],
                    Some(names) => names
                        .iter()
                        .map(|name| named("kv", name, KvFormat::ALL, KvFormat::name))
                        .collect::<Result<_, _>>()?,
                };
                models.push(Model {
                    parameters: vec![
                        ("model", name.clone()),
                        ("dims", config.dims.to_string()),
                        ("dtype", dtype.to_string()),
                    ],
                    config,
                    dtype,
                    kv_formats,
                });
            }
        }
    }
    Ok(models)
}

fn named<T: Copy>(
    argument: &'static str,
    given: &str,
    all: &[T],
    name: fn(T) -> &'static str,
) -> Result<T, CliError> {
    let found = all.iter().copied().find(|value| name(*value) == given);
    found.ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|value| name(*value)).collect();
        refused(argument, format!("{given:?}"), names.join(", "))
    })
}

/// `512x128x64x128`: L, P, R, V.
fn read_dims(text: &str) -> Result<MlaDims, CliError> {
    let numbers: Option<Vec<u32>> = text
        .split('x')
        .map(|part| {
            part.parse()
                .ok()
                .filter(|number| (1..=4096).contains(number))
        })
        .collect();
    match numbers.as_deref() {
        Some(&[latent, nope, rope, v]) => Ok(MlaDims::new(latent, HeadDims::new(nope, rope, v))),
        _ => Err(refused(
            "dims",
            format!("{text:?}"),
            "LxPxRxV of numbers from 1 to 4096, such as 512x128x64x128",
        )),
    }
}

/// Rows as they are being collected.
struct Plan<'a, D> {
    site: &'a Site<'a, D>,
    settings: &'a Settings,
    jobs: Vec<Job>,
    /// For each key, a row that it has an effect on, and one that it has none on.
    used: BTreeMap<Key, String>,
    unused: BTreeMap<Key, String>,
    /// Backends that some row uses.
    names: BTreeSet<String>,
}

/// How a layer runs a batch.
#[derive(Clone, Copy)]
struct Way {
    route: Option<Route>,
    threshold: u32,
    query_chunk: Option<u32>,
    rows: Option<u32>,
    num_splits: Option<u32>,
}

/// Each value, or none where the key is not given.
fn optional(list: &Option<Vec<u32>>) -> Vec<Option<u32>> {
    list.as_ref()
        .map_or(vec![None], |list| list.iter().copied().map(Some).collect())
}

fn splits(number: Option<u32>) -> impl Iterator<Item = (&'static str, String)> {
    number
        .into_iter()
        .map(|number| ("num_splits", number.to_string()))
}

impl Way {
    /// What a row says of it.
    fn parameters(self) -> Vec<(&'static str, String)> {
        let mut parameters = match self.route {
            Some(route) => vec![("path", route.name().to_owned())],
            None => vec![("threshold", self.threshold.to_string())],
        };
        parameters.extend(
            self.query_chunk
                .map(|chunk| ("query_chunk", chunk.to_string())),
        );
        parameters.extend(self.rows.map(|rows| ("rows", rows.to_string())));
        parameters.extend(splits(self.num_splits));
        parameters
    }
}

/// The requests of a batch on either path of the layer.
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

    /// How the query lengths differ of what decode backends are given, in chunks if so.
    fn query_len(&self, chunk: Option<u32>) -> QueryLen {
        let longest = self.absorbed.iter().map(|r| r.q).max().unwrap_or(0);
        match (longest, chunk) {
            (0 | 1, _) | (_, Some(1)) => QueryLen::Single,
            _ if self.absorbed.iter().all(|r| r.q == longest)
                && chunk.is_none_or(|chunk| longest.is_multiple_of(chunk.min(longest))) =>
            {
                QueryLen::Uniform
            }
            _ => QueryLen::Ragged,
        }
    }

    /// The backends that run, of two.
    fn backends(&self, prefill: &str, decode: &str) -> String {
        match (self.absorbed.is_empty(), self.expanded.is_empty()) {
            (true, _) => prefill.to_owned(),
            (_, true) => decode.to_owned(),
            _ if prefill == decode => prefill.to_owned(),
            _ => format!("{decode} + {prefill}"),
        }
    }
}

/// The keys with several values that tell cases apart, and those that tell contenders apart: what
/// is to be computed makes a case, how it is done competes within one.
fn compared(settings: &Settings) -> [Vec<&'static str>; 2] {
    fn several<T>(list: &Option<Vec<T>>) -> bool {
        list.as_ref().is_some_and(|list| list.len() > 1)
    }
    let of_case = [
        ("model", several(&settings.model)),
        ("dims", several(&settings.dims)),
        ("dtype", several(&settings.dtype)),
        ("heads", several(&settings.heads)),
        ("kv", several(&settings.kv)),
        ("topk", several(&settings.topk)),
        ("lists", several(&settings.lists)),
        ("valid", several(&settings.valid)),
    ];
    let of_contender = [
        ("page", several(&settings.page)),
        ("threshold", several(&settings.threshold)),
        ("query_chunk", several(&settings.query_chunk)),
        ("rows", several(&settings.rows)),
        ("num_splits", several(&settings.num_splits)),
    ];
    [&of_case[..], &of_contender].map(|axes| {
        let several = axes.iter().filter(|(_, several)| *several);
        several.map(|(name, _)| *name).collect()
    })
}

/// A name with the values of these keys behind it.
fn with_values(
    name: &str,
    keys: &[&'static str],
    values: &BTreeMap<&'static str, String>,
) -> String {
    let values = keys.iter().filter_map(|key| Some((key, values.get(key)?)));
    values.fold(name.to_owned(), |text, (key, value)| {
        format!("{text} {key}={value}")
    })
}

/// What a batch does, by the kinds of its requests.
fn phase_of(spec: &BatchSpec) -> Option<Phase> {
    let decode = |r: &Request| {
        r.kind() == RequestKind::Decode || (r.is_speculative_decode() && r.q <= MAX_SPECULATIVE_LEN)
    };
    if spec.requests().iter().all(decode) {
        Some(Phase::Decode)
    } else if spec
        .requests()
        .iter()
        .all(|r| r.kind() == RequestKind::Prefill)
    {
        Some(Phase::Prefill)
    } else {
        None
    }
}

impl<'a, D: Stopwatch> Plan<'a, D> {
    const fn new(site: &'a Site<'a, D>, settings: &'a Settings) -> Self {
        Self {
            site,
            settings,
            jobs: Vec::new(),
            used: BTreeMap::new(),
            unused: BTreeMap::new(),
            names: BTreeSet::new(),
        }
    }

    fn batch(
        &mut self,
        model: &Model,
        problem: &Problem,
        batch: &Batch,
        lists: Option<Lists>,
    ) -> Result<(), CliError> {
        let settings = self.settings;
        let of_layer = [
            (Key::Path, settings.path.is_some()),
            (Key::Threshold, settings.threshold.is_some()),
            (Key::QueryChunk, settings.query_chunk.is_some()),
            (Key::Rows, settings.rows.is_some()),
        ];
        let wants_layer = of_layer
            .iter()
            .find_map(|(key, given)| given.then_some(*key));
        if let Some(lists) = lists {
            return match (settings.measure, wants_layer) {
                (Some(Measure::Layer), _) => Err(refused(
                    "topk",
                    "a value, with --measure layer",
                    "one only where attention alone is timed: the lists of a layer are made by its indexer",
                )),
                (_, Some(key)) => Err(refused(
                    key.name(),
                    "a value, with --topk",
                    format!("one only {}", key.effective()),
                )),
                // Whatever the phase, it is absorbed.
                (_, None) => self.attention(model, problem, batch, Phase::Decode, Some(lists)),
            };
        }
        match (settings.measure, phase_of(&batch.spec), wants_layer) {
            (Some(Measure::Attention), _, Some(key)) => Err(refused(
                key.name(),
                "a value, with --measure attention",
                format!("one only {}", key.effective()),
            )),
            (Some(Measure::Attention), None, _) => Err(refused(
                "measure",
                format!("attention, of {}", batch.text),
                "layer for this batch: attention alone is that of decodes, speculative ones included, \
                 or that of prefills without context",
            )),
            (Some(Measure::Attention) | None, Some(phase), None) => {
                self.attention(model, problem, batch, phase, None)
            }
            _ => self.layer(model, problem, batch),
        }
    }

    fn attention(
        &mut self,
        model: &Model,
        problem: &Problem,
        batch: &Batch,
        phase: Phase,
        lists: Option<Lists>,
    ) -> Result<(), CliError> {
        let requests = batch.spec.requests();
        let problem = problem.with_query_len(match phase {
            Phase::Decode => workload::query_len(requests),
            Phase::Prefill => QueryLen::Single,
        });
        let problem = with_graphs(problem, self.site.graphs, phase);
        let (effective, idle) = match phase {
            Phase::Decode => (
                vec![Key::Kv, Key::Page, Key::Decode, Key::NumSplits],
                vec![Key::Prefill],
            ),
            Phase::Prefill => (
                vec![Key::Prefill],
                vec![Key::Kv, Key::Page, Key::Decode, Key::NumSplits],
            ),
        };
        self.note(&batch.text, &effective, &idle);
        let config = LayerConfig::new(problem, model.config.softmax_scale() as f32);
        let settings = self.settings;
        for backend in self.backends(&problem, phase)? {
            for num_splits in optional(&settings.num_splits) {
                let attention = Attention {
                    backend,
                    kind: match phase {
                        Phase::Decode => Kind::Decode,
                        Phase::Prefill => Kind::Prefill { causal: true },
                    },
                    config,
                    requests: requests.to_vec(),
                    deviation: 1.0,
                    layers: settings.layers.unwrap_or(1) as usize,
                    num_splits: num_splits.filter(|_| phase == Phase::Decode),
                    seed: settings.seed.unwrap_or(SEED).into(),
                    lists,
                };
                let of_lists = lists.map(|lists| {
                    [
                        ("topk", lists.topk.to_string()),
                        ("lists", lists.kind.name().to_owned()),
                        ("valid", lists.valid.to_string()),
                    ]
                });
                let of_lists = of_lists.into_iter().flatten();
                let parameters = of_lists.chain(splits(num_splits)).collect();
                let subject = Subject::Attention(attention);
                self.push(model, batch, backend.to_owned(), parameters, subject)?;
            }
        }
        Ok(())
    }

    fn layer(&mut self, model: &Model, problem: &Problem, batch: &Batch) -> Result<(), CliError> {
        let settings = self.settings;
        // Before its pages are dealt out.
        let layers = f64::from(settings.layers.unwrap_or(1));
        let bytes = layers * workload::bytes(&batch.spec, problem);
        self.site.about.check_memory("memory", &batch.text, bytes)?;
        let default = crossover_threshold(&self.site.device.machine(), problem, false, None);
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
                    for num_splits in optional(&settings.num_splits) {
                        let way = Way {
                            route,
                            threshold,
                            query_chunk,
                            rows,
                            num_splits,
                        };
                        self.step(model, problem, batch, way)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The most new tokens of a request that every decode backend of the comparison takes, as the layer asks it.
    fn longest_decode(&mut self, problem: &Problem) -> Result<u32, CliError> {
        let (registry, target) = (self.site.registry, self.site.device.target());
        let mut least = u32::MAX;
        for name in self.backends(problem, Phase::Decode)? {
            let spec = registry.get_on(target, Phase::Decode, name)?.spec;
            least = least.min(spec.max_query_len.unwrap_or(u32::MAX));
        }
        Ok(least)
    }

    fn step(
        &mut self,
        model: &Model,
        problem: &Problem,
        batch: &Batch,
        way: Way,
    ) -> Result<(), CliError> {
        let paths = Paths::of(&batch.spec, way.threshold);
        self.note_step(batch, way, &paths);
        let problem = problem.with_query_len(paths.query_len(way.query_chunk));
        let problem = with_graphs(problem, self.site.graphs, Phase::Decode);
        let config = LayerConfig::new(problem, model.config.softmax_scale() as f32);
        let mut prefills = self.backends(&problem, Phase::Prefill)?;
        let mut decodes = self.backends(&problem, Phase::Decode)?;
        // Where several are compared, only those that the batch comes to.
        if paths.expanded.is_empty() {
            prefills.truncate(1);
        }
        if paths.absorbed.is_empty() {
            decodes.truncate(1);
        }
        for prefill in prefills {
            for &decode in &decodes {
                let layer = Layer {
                    prefill,
                    decode,
                    config,
                    spec: batch.spec.clone(),
                    threshold: way.threshold,
                    query_chunk: way.query_chunk,
                    rows: way.rows,
                    num_splits: way.num_splits.filter(|_| !paths.absorbed.is_empty()),
                    layers: self.settings.layers.unwrap_or(1) as usize,
                    seed: self.settings.seed.unwrap_or(SEED),
                };
                let backends = paths.backends(prefill, decode);
                let contender = match way.route {
                    Some(route) => format!("{} ({backends})", route.name()),
                    None => backends,
                };
                let subject = Subject::Layer(layer);
                self.push(model, batch, contender, way.parameters(), subject)?;
            }
        }
        Ok(())
    }

    /// Notes which keys have an effect on a step.
    fn note_step(&mut self, batch: &Batch, way: Way, Paths { absorbed, expanded }: &Paths<'_>) {
        let Way {
            route, query_chunk, ..
        } = way;
        let keys = [
            (Key::Kv, true),
            (Key::Page, true),
            (Key::Decode, !absorbed.is_empty()),
            (Key::Prefill, !expanded.is_empty()),
            (Key::Path, true),
            (Key::Threshold, true),
            // The other path of a comparison of paths need not be touched.
            (
                Key::QueryChunk,
                route == Some(Route::Expanded) || absorbed.iter().any(|r| Some(r.q) > query_chunk),
            ),
            (
                Key::Rows,
                route == Some(Route::Absorbed) || expanded.iter().any(|r| r.context_len() > 0),
            ),
            (
                Key::NumSplits,
                route == Some(Route::Expanded) || !absorbed.is_empty(),
            ),
        ];
        for (key, effective) in keys {
            let key = [key];
            match effective {
                true => self.note(&batch.text, &key, &[]),
                false => self.note(&batch.text, &[], &key),
            }
        }
    }

    fn push(
        &mut self,
        model: &Model,
        batch: &Batch,
        contender: String,
        more: Vec<(&'static str, String)>,
        subject: Subject,
    ) -> Result<(), CliError> {
        let problem = subject.config().problem;
        let mut parameters: BTreeMap<&'static str, String> =
            model.parameters.iter().cloned().collect();
        parameters.insert("heads", problem.heads.to_string());
        parameters.insert("kv", problem.kv_format.to_string());
        parameters.insert("page", problem.page_size.to_string());
        parameters.extend(more);
        let [of_case, of_contender] = compared(self.settings);
        let case = with_values(&batch.text, &of_case, &parameters);
        let contender = with_values(&contender, &of_contender, &parameters);
        if let Subject::Attention(attention) = &subject {
            let bytes = attention.bytes();
            self.site.about.check_memory("memory", &case, bytes)?;
        }
        if self.jobs.len() == MAX_ROWS {
            return Err(refused(
                "SPEC",
                format!("more than {MAX_ROWS} rows"),
                format!("at most {MAX_ROWS} combinations"),
            ));
        }
        self.jobs.push(Job {
            case,
            contender,
            label: batch.spec.label(),
            parameters,
            subject,
        });
        Ok(())
    }

    /// The backends of a phase that are to be compared.
    fn backends(&mut self, problem: &Problem, phase: Phase) -> Result<Vec<&'static str>, CliError> {
        let registry = self.site.registry;
        let given = self.given_backends(phase)?;
        let target: Target = self.site.device.target();
        let request = selection::SelectionRequest::new(target, *problem);
        let explanation = registry.explain(&request)?;
        let candidates = &explanation.phase(phase).candidates;
        let none_fits = || SelectionError::NoneFits {
            phase,
            explanation: Box::new(explanation.clone()),
        };
        let Some(given) = given else {
            let best = explanation.phase(phase).selected().ok_or_else(none_fits)?;
            return Ok(vec![best.spec.name]);
        };
        let mut names: Vec<&'static str> = Vec::new();
        for name in given {
            if name == ALL {
                let fitting = candidates.iter().filter(|candidate| candidate.is_valid());
                names.extend(fitting.map(|candidate| candidate.spec.name));
                self.names.insert(name);
                continue;
            }
            let known = registry.get(phase, &name)?.spec.name;
            let candidate = candidates
                .iter()
                .find(|candidate| candidate.spec.name == known);
            if let Some(candidate) = candidate.filter(|candidate| !candidate.is_valid()) {
                return Err(SelectionError::Refused {
                    phase,
                    name: known,
                    target,
                    reasons: Box::new(candidate.reasons),
                }
                .into());
            }
            names.push(known);
            self.names.insert(name);
        }
        if names.is_empty() {
            return Err(none_fits().into());
        }
        let mut seen = BTreeSet::new();
        names.retain(|name| seen.insert(*name));
        Ok(names)
    }

    /// The names that the settings give for a phase, `all` among them; none if the best backend is
    /// to be taken.
    fn given_backends(&self, phase: Phase) -> Result<Option<Vec<String>>, CliError> {
        let (settings, registry) = (self.settings, self.site.registry);
        let own = match phase {
            Phase::Prefill => &settings.prefill,
            Phase::Decode => &settings.decode,
        };
        if own.is_some() {
            return Ok(own.clone());
        }
        let Some(both) = &settings.backends else {
            return Ok(None);
        };
        for name in both.iter().filter(|name| *name != ALL) {
            // A name of the other phase says nothing about this one.
            if registry.get(Phase::Decode, name).is_err() {
                registry.get(Phase::Prefill, name)?;
            }
        }
        let of_phase = both
            .iter()
            .filter(|name| *name == ALL || registry.get(phase, name).is_ok());
        Ok(Some(of_phase.cloned().collect::<Vec<_>>()).filter(|names| !names.is_empty()))
    }

    fn case(&mut self, case: Case) -> Result<(), CliError> {
        let (kind, phase, key, deviation) = match case.kind {
            CaseKind::Decode | CaseKind::Sparse { .. } => {
                (Kind::Decode, Phase::Decode, Key::Decode, 0.1)
            }
            CaseKind::Prefill { causal } => {
                (Kind::Prefill { causal }, Phase::Prefill, Key::Prefill, 1.0)
            }
        };
        let (problem, lists) = problem_of(&case, phase, self.site.graphs);
        self.note(&case.id, &[key], &[]);
        let queries: u64 = case.requests.iter().map(|r| u64::from(r.q)).sum();
        let keys: u64 = case.requests.iter().map(|r| u64::from(r.kv)).sum();
        let label = format!(
            "{} requests, {queries} query and {keys} kv tokens",
            case.requests.len()
        );
        for backend in self.backends(&problem, phase)? {
            let attention = Attention {
                backend,
                kind,
                config: LayerConfig::new(problem, 1.0 / (problem.dims.head.qk() as f32).sqrt()),
                requests: case.requests.clone(),
                deviation,
                layers: self.settings.layers.unwrap_or(1) as usize,
                num_splits: None,
                seed: self.settings.seed.unwrap_or(SEED).into(),
                lists,
            };
            let about = &self.site.about;
            about.check_memory("memory", &case.id, attention.bytes())?;
            self.jobs.push(Job {
                case: case.id.clone(),
                contender: backend.to_owned(),
                label: label.clone(),
                parameters: BTreeMap::from([("heads", case.heads.to_string())]),
                subject: Subject::Attention(attention),
            });
        }
        Ok(())
    }

    fn note(&mut self, batch: &str, effective: &[Key], idle: &[Key]) {
        for key in effective {
            self.used.entry(*key).or_insert_with(|| batch.to_owned());
        }
        for key in idle {
            self.unused.entry(*key).or_insert_with(|| batch.to_owned());
        }
    }

    fn finish(self) -> Result<Vec<Job>, CliError> {
        for (key, values) in self.settings.given() {
            let idle = match (self.used.get(&key), self.unused.get(&key)) {
                (None, Some(batch)) => Some(batch),
                // Several values would give the same row several times.
                (Some(_), Some(batch)) if values > 1 => Some(batch),
                _ => None,
            };
            if let Some(batch) = idle {
                return Err(refused(
                    key.name(),
                    format!(
                        "{values} value{} without effect on {batch}",
                        if values == 1 { "" } else { "s" }
                    ),
                    format!("one only {}", key.effective()),
                ));
            }
        }
        for name in self.settings.backends.iter().flatten() {
            if !self.names.contains(name) {
                return Err(refused(
                    "backends",
                    format!("{name}, which no batch comes to"),
                    "backends of the phases that the batches have",
                ));
            }
        }
        for job in &self.jobs {
            try_out(self.site, job)?;
        }
        Ok(self.jobs)
    }
}

/// The problem with the graph support that it takes.
const fn with_graphs(problem: Problem, graphs: bool, phase: Phase) -> Problem {
    let graphs = match (graphs, phase, problem.query_len) {
        (false, ..) => GraphSupport::Never,
        (_, Phase::Decode, QueryLen::Single) => GraphSupport::SingleToken,
        (_, Phase::Decode, QueryLen::Uniform) => GraphSupport::UniformBatch,
        _ => GraphSupport::Always,
    };
    problem.with_graphs(graphs)
}

/// Lets the backends refuse what their spec does not say.
fn try_out<D: Stopwatch>(site: &Site<'_, D>, job: &Job) -> Result<(), CliError> {
    let attention = match &job.subject {
        Subject::Attention(attention) => attention,
        Subject::Layer(layer) => return layer.try_out(site),
    };
    let (registry, device) = (site.registry, site.device);
    let (config, limits) = (&attention.config, attention.limits());
    match attention.kind {
        Kind::Decode => {
            let backend = attention.decode_backend(registry, device)?;
            drop(backend.state(device, &limits)?);
        }
        Kind::Prefill { .. } => {
            let backend = registry.instantiate_prefill(attention.backend, device, config)?;
            drop(backend.state(device, &limits)?);
        }
    }
    Ok(())
}

/// The problem of a case: R1's dimensions in bf16, and pages of 64; with the lists of a sparse one.
fn problem_of(case: &Case, phase: Phase, graphs: bool) -> (Problem, Option<Lists>) {
    let query_len = match phase {
        Phase::Decode => workload::query_len(&case.requests),
        Phase::Prefill => QueryLen::Single,
    };
    let problem = Problem::new(MlaDims::R1, case.heads, DType::BF16).with_query_len(query_len);
    let (problem, lists) = match case.kind {
        CaseKind::Sparse { kv_format, lists } => {
            let problem = problem.with_kv_format(kv_format).with_sparse(true);
            (problem, Some(lists))
        }
        _ => (problem, None),
    };
    (with_graphs(problem, graphs, phase), lists)
}

/// The rows of a file of cases, with numbers as its protocol says.
pub(super) fn cases<D: Stopwatch>(
    site: &Site<'_, D>,
    settings: &Settings,
    cases: Vec<Case>,
) -> Result<Vec<Job>, CliError> {
    let mut plan = Plan::new(site, settings);
    for case in cases {
        plan.case(case)?;
    }
    plan.finish()
}
