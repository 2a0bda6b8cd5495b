//! `mla bench indexer`: a sparse layer part by part, from the caches' rows to the output.
//!
//! Every part is timed on its own by the protocol of all benchmarks, and then all together as
//! [`forward_selecting`](mla_runtime::layer::MlaLayer::forward_selecting) enqueues them. The lists
//! are compared with f64, and so is the output.

mod peers;

use std::path::PathBuf;

use comfy_table::Cell;
use fastrand::Rng;
use mla_runtime::Result;
use mla_runtime::backend::{DecodeBatch, SelectedDecode, SelectedPrefill};
use mla_runtime::batch::BatchSpec;
use mla_runtime::cache::BlockTable;
use mla_runtime::capability::Platform;
use mla_runtime::device::CacheRows;
use mla_runtime::dtype::DType;
use mla_runtime::indexer::{
    IndexCall, IndexDevice, IndexDims, IndexHeads, IndexKeys, IndexProjection, IndexQueries,
    IndexQueriesMut, IndexRows, IndexerConfig, SlotListsMut,
};
use mla_runtime::layer::{LayerCall, SelectedLayer, Workspace};
use mla_runtime::problem::Problem;
use mla_runtime::registry::Registry;
use mla_runtime::rotary::{Rotary, RotaryStyle, Rotation};
use mla_runtime::selection::SelectionRequest;
use mla_runtime::tensor::{ArrayRef, Layout, TensorMut, TensorRef};
use serde::Serialize;

use self::peers::{Case, LayerCase};
use super::check::Errors;
use super::environment::Environment;
use super::peers::Said;
use super::statistics::Summary;
use super::{Until, check_files, json, save};
use crate::args::{Format, Model, ModelArgs, natural, positive, samples};
use crate::device::{About, IndexedJob};
use crate::error::CliError;
use crate::figures::number;
use crate::progress::Progress;
use crate::run::batch_args::BatchArgs;
use crate::run::data::{Data, HostLists};
use crate::run::memory_plan;
use crate::run::reference;
use crate::run::sparse::{Indexed, ListErrors, Lists, Run};
use crate::run::workload::{self, Workload};
use crate::stopwatch::{Protocol, Stopwatch};
use crate::table::{numbers, table};
use crate::upload::upload;

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    on: BatchArgs,
    /// Timed runs of each part.
    #[arg(long, value_name = "N", default_value = "30", value_parser = samples)]
    samples: u32,
    /// Runs of each part that do not count, before the first sample.
    #[arg(long, value_name = "N", default_value = "3", value_parser = natural)]
    warm_up: u32,
    /// How many tokens' lists, and rows of the output, are compared with the reference.
    #[arg(long, value_name = "N", default_value = "16", value_parser = positive)]
    check: u32,
    #[command(flatten)]
    peers: peers::PeerArgs,
    /// Where to write everything.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// How to write the result.
    #[arg(long, default_value = "table")]
    format: Format,
}

/// What a part took.
#[derive(Serialize)]
struct Part {
    name: &'static str,
    /// In seconds.
    time: Summary,
    /// What it computes and moves at least, if that is said.
    flop: f64,
    bytes: f64,
}

#[derive(Serialize)]
struct Report {
    model: String,
    device: String,
    batch: String,
    backends: [String; 2],
    environment: Environment,
    protocol: Protocol,
    /// The query tokens whose logits are there at a time: the parts of the selection are timed with
    /// as many.
    rows: usize,
    parts: Vec<Part>,
    lists: ListErrors,
    /// Of sampled rows of the output.
    largest_error: f64,
    pass: bool,
    /// The same batch by others.
    #[serde(skip_serializing_if = "Option::is_none")]
    beside: Option<Said>,
}

/// The table, and whether lists and outputs are right.
pub(super) fn output(args: &Args) -> std::result::Result<(String, bool), CliError> {
    check_files([&args.json])?;
    args.peers.check(args.on.device)?;
    let model = args.model.read()?;
    if model.config.indexer.is_none() {
        return Err(CliError::Argument {
            argument: "--model",
            given: format!("{}, which has no indexer", model.name),
            accepted: "a model with index_n_heads, index_head_dim and index_topk, such as \
                       deepseek-v3.2 or glm-5"
                .to_owned(),
        });
    }
    let report = args.on.device.run_indexed(Bench {
        args,
        model: &model,
    })?;
    let text = args.format.write(&report, || report.describe());
    let saved = match &args.json {
        Some(path) => save(path, Until::End, &json(&report)),
        None => Ok(()),
    };
    match saved {
        Ok(()) => Ok((text, report.pass)),
        Err(error) => Err(error.behind(text)),
    }
}

struct Bench<'a> {
    args: &'a Args,
    model: &'a Model,
}

type Space<D> = Workspace<SelectedPrefill<D>, SelectedDecode<D>>;

impl IndexedJob for Bench<'_> {
    type Output = Report;

    fn run<D: IndexDevice + Stopwatch>(
        self,
        device: &D,
        about: &About,
    ) -> std::result::Result<Report, CliError> {
        let (args, model) = (self.args, self.model);
        let problem = Problem::new(model.config.dims, model.heads, model.dtype)
            .with_sparse(true)
            .with_kv_format(args.on.kv_format(model.dtype));
        let spec: BatchSpec = args.on.batch.parse()?;
        about.check_memory("--batch", &spec, workload::bytes(&spec, &problem))?;
        // The expanded form has no lists.
        let workload = Workload::new(&spec, u32::MAX, problem.page_size, args.on.seed)?;
        let problem = problem.with_query_len(workload.query_len);
        let registry = Registry::linked()?;
        let selection = registry.select(&SelectionRequest::new(device.target(), problem))?;
        let config = selection.config(model.config.softmax_scale() as f32);
        let layer = selection.layer(device, config.softmax_scale)?;
        let limits = workload.limits(None)?;
        let plan = memory_plan::<D, Indexed<D>>(&layer, &model.config, &limits, workload.pages)?;
        about.check_plan("--batch", &spec, &limits, &plan)?;

        let progress = Progress::spinner();
        let mut workspace = layer.workspace(&limits)?;
        let mut data = Data::new(device, &config, &workload, args.on.seed, &progress)?;
        let made_from = Run {
            device,
            model: &model.config,
            config: &config,
            workload: &workload,
            limits,
            seed: args.on.seed,
            progress: &progress,
        };
        let mut indexed = Indexed::new(&made_from)?;
        workspace.prepare(&layer, &workload.batch()?)?;
        let mut times = Times::new(device, args, &progress)?;
        let mut steps = Steps::new(device, &mut indexed, &workload, args.on.seed)?;
        steps.time(&mut times, &mut indexed, &mut data, &layer)?;
        let rows = steps.rows();
        drop(steps);
        whole(&mut times, &layer, &mut workspace, &mut indexed, &mut data)?;

        let (lists, outputs) =
            compare(&made_from, &mut indexed, &mut data, &workspace, args.check)?;
        let case = Case {
            requests: workload.requests.iter().map(|r| [r.q, r.kv]).collect(),
            heads: lists.index_heads,
            topk: lists.topk,
            samples: args.samples,
            warm_up: args.warm_up,
            layer: LayerCase {
                heads: model.heads,
                query_rank: indexed.query_rank(),
                kv: problem.kv_format.name(),
            },
        };
        progress.finish();
        let beside = args.peers.time(&case, rows)?;
        Ok(Report {
            model: model.name.clone(),
            device: about.description.clone(),
            batch: workload.label.clone(),
            backends: [selection.prefill.name, selection.decode.name].map(str::to_owned),
            environment: Environment::here(),
            protocol: times.protocol,
            rows,
            parts: times.parts,
            pass: lists.pass && outputs.pass,
            lists,
            largest_error: outputs.relative,
            beside,
        })
    }
}

/// The lists and the outputs beside those of the reference.
fn compare<D: IndexDevice>(
    run: &Run<'_, D>,
    indexed: &mut Indexed<D>,
    data: &mut Data<D>,
    workspace: &Space<D>,
    check: u32,
) -> std::result::Result<(ListErrors, Errors), CliError> {
    data.lists = match &indexed.lists(workspace)? {
        Some(lists) => Some(HostLists::read(run.device, lists)?),
        None => None,
    };
    let errors = reference::compare(
        run.device,
        run.config,
        run.workload,
        data,
        workspace,
        check,
        run.seed,
        run.progress,
    )?;
    let lists = indexed
        .compare(run, data.lists.as_ref(), check)?
        .expect("a sparse layer has lists");
    Ok((lists, Errors::of_paths([errors.absorbed, errors.expanded])))
}

/// Takes the times of parts.
struct Times<'a, D: Stopwatch> {
    device: &'a D,
    protocol: Protocol,
    flush: D::Buffer,
    parts: Vec<Part>,
    progress: &'a Progress,
}

impl<'a, D: Stopwatch> Times<'a, D> {
    fn new(device: &'a D, args: &Args, progress: &'a Progress) -> Result<Self> {
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

    fn time(
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
fn whole<D: IndexDevice + Stopwatch>(
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

/// The parts of a selection, with memory of their own.
struct Steps<D: IndexDevice> {
    config: IndexerConfig,
    page_size: usize,
    columns: usize,
    /// Pairs of the rows that are scored and the positions that they see, and cached tokens.
    pairs: f64,
    cached: f64,
    scored: Scored<D>,
    /// Room for the queries as they are projected.
    product: D::Buffer,
    head_weights: D::Buffer,
    values: D::Buffer,
    weights: D::Buffer,
    logits: D::Buffer,
    lists: D::Buffer,
    slots: D::Buffer,
    positions: D::Buffer,
}

/// The rows that are scored, and their requests.
struct Scored<D: IndexDevice> {
    rows: usize,
    requests: usize,
    max_pages: usize,
    longest: usize,
    query_len: usize,
    lens: D::Buffer,
    starts: D::Buffer,
    tables: D::Buffer,
}

impl<D: IndexDevice> Scored<D> {
    fn batch(&self) -> Result<IndexRows<'_, D>> {
        let entries = ArrayRef::new(D::bytes(&self.tables), self.requests * self.max_pages)?;
        let lens = ArrayRef::new(D::bytes(&self.lens), self.requests)?;
        let starts = ArrayRef::new(D::bytes(&self.starts), self.requests + 1)?;
        Ok(IndexRows {
            batch: DecodeBatch::new(
                BlockTable::new(entries, self.requests, self.max_pages)?,
                (lens, self.longest),
                (starts, self.query_len),
            ),
            tokens: 0..self.rows,
            in_turn: false,
        })
    }
}

impl<D: IndexDevice + Stopwatch> Steps<D> {
    fn new(
        device: &D,
        indexed: &mut Indexed<D>,
        workload: &Workload,
        seed: u32,
    ) -> std::result::Result<Self, CliError> {
        let (indexer, lists, _) = indexed.call()?;
        let config = *indexer.config();
        let IndexDims {
            heads, width, topk, ..
        } = config.dims;
        let [heads, width, topk] = [heads, width, topk].map(|n| n as usize);
        let rows = lists.rows().min(workload.tokens());
        let mut rng = Rng::with_seed(u64::from(seed) ^ 0x57e9);
        let mut random = |count: usize| {
            let values: Vec<f32> = (0..count).map(|_| 2.0 * rng.f32() - 1.0).collect();
            upload(device, &values)
        };
        let head_weights = random(rows * heads)?;
        let (tables, max_pages, slots) = workload.entries();
        let requests = &workload.requests;
        let lens: Vec<i32> = requests.iter().map(|r| r.kv as i32).collect();
        let starts: Vec<i32> = workload.token_starts.iter().map(|at| *at as i32).collect();
        let positions: Vec<i64> = requests
            .iter()
            .flat_map(|r| i64::from(r.context_len())..i64::from(r.kv))
            .collect();
        let [pairs, cached] = pairs_and_cached(workload, rows);
        let longest = requests.iter().map(|r| r.kv).max().unwrap_or(0) as usize;
        let columns = longest.next_multiple_of(256).max(256);
        let page_size = workload.tables()?.page_size() as usize;
        Ok(Self {
            config,
            page_size,
            columns,
            pairs,
            cached,
            scored: Scored {
                rows,
                requests: requests.len(),
                max_pages,
                longest,
                query_len: requests.iter().map(|r| r.q).max().unwrap_or(0) as usize,
                lens: upload(device, &lens)?,
                starts: upload(device, &starts)?,
                tables: upload(device, tables)?,
            },
            product: device.allocate(rows * heads * width * indexed.query_dtype().bytes())?,
            head_weights,
            values: device.allocate(rows * heads * width)?,
            weights: device.allocate(rows * heads * 4)?,
            logits: device.allocate(rows * columns * 4)?,
            lists: device.allocate(rows * topk * 4)?,
            slots: upload(device, slots)?,
            positions: upload(device, &positions)?,
        })
    }

    fn rows(&self) -> usize {
        self.scored.rows
    }

    fn time(
        &mut self,
        times: &mut Times<'_, D>,
        indexed: &mut Indexed<D>,
        data: &mut Data<D>,
        layer: &SelectedLayer<D>,
    ) -> std::result::Result<(), CliError> {
        let config = self.config;
        let [heads, width] = [config.dims.heads, config.dims.width].map(|n| n as usize);
        let topk = f64::from(config.dims.topk);
        let rows = self.scored.rows as f64;
        times.time("rows of both caches", [0.0; 2], &mut |device| {
            let (_, _, index) = indexed.call()?;
            self.write(device, index, data.call(layer.config())?)
        })?;
        let weights = (indexed.query_rank() * heads * width) as f64;
        let bytes = weights * indexed.query_dtype().bytes() as f64;
        times.time(
            "index queries",
            [2.0 * rows * weights, bytes],
            &mut |device| self.project(device, indexed),
        )?;
        let products = 2.0 * (heads * width) as f64 * self.pairs;
        let bytes = (width + 4) as f64 * self.cached + 4.0 * self.pairs;
        times.time("logits", [products, bytes], &mut |device| {
            self.score(device, indexed)
        })?;
        let bytes = 4.0 * (self.pairs + rows * topk);
        times.time("lists of slots", [0.0, bytes], &mut |device| {
            self.select(device)
        })?;
        Ok(())
    }

    fn write(
        &self,
        device: &D,
        mut index: IndexCall<'_, D>,
        mut call: LayerCall<'_, D>,
    ) -> Result<()> {
        let tokens = call.latent.shape()[0];
        let slots = ArrayRef::new(D::bytes(&self.slots), tokens)?;
        let positions = ArrayRef::new(D::bytes(&self.positions), tokens)?;
        let rotary = rotary(positions, index.rotary.as_ref(), self.config.rotary);
        let rows = CacheRows {
            latent: call.latent.shorten(),
            rope: call.rope.shorten(),
            slots,
            cache: call.cache.reborrow(),
            rotary: None,
        };
        let slots = ArrayRef::new(D::bytes(&self.slots), tokens)?;
        device.write_cache_and_index_keys(
            &self.config,
            rows,
            None,
            IndexKeys {
                keys: index.keys.shorten(),
                norm: index.norm.shorten(),
                rotary,
                slots,
                cache: index.cache.reborrow(),
            },
        )
    }

    fn project(&mut self, device: &D, indexed: &mut Indexed<D>) -> Result<()> {
        let [heads, width] = [self.config.dims.heads, self.config.dims.width].map(|n| n as usize);
        let rows = self.scored.rows;
        let (_, _, index) = indexed.call()?;
        let positions = ArrayRef::new(D::bytes(&self.positions), rows)?;
        let rotary = rotary(positions, index.rotary.as_ref(), self.config.rotary);
        let latent = index.query_latent.shorten().narrow(0, 0..rows)?;
        let product = Layout::contiguous(latent.dtype(), [1, rows, heads * width]);
        let of_heads = Layout::contiguous(DType::F32, [rows, 1, heads]);
        device.project_index_queries(
            &self.config,
            IndexProjection {
                latent,
                weights: index.query_weights.shorten(),
                product: TensorMut::new(D::bytes_mut(&mut self.product), product)?,
            },
            IndexHeads {
                weights: TensorRef::new(D::bytes(&self.head_weights), of_heads)?,
                rotary,
            },
            IndexQueriesMut {
                values: D::bytes_mut(&mut self.values),
                weights: TensorMut::new(D::bytes_mut(&mut self.weights), of_heads)?,
            },
        )
    }

    fn logits_layout(&self) -> Layout {
        Layout::contiguous(DType::F32, [1, self.scored.rows, self.columns])
    }

    fn score(&mut self, device: &D, indexed: &mut Indexed<D>) -> Result<()> {
        let heads = self.config.dims.heads as usize;
        let of_heads = Layout::contiguous(DType::F32, [self.scored.rows, 1, heads]);
        let layout = self.logits_layout();
        let (_, _, index) = indexed.call()?;
        device.index_logits(
            self.config.dims,
            IndexQueries {
                values: D::bytes(&self.values),
                weights: TensorRef::new(D::bytes(&self.weights), of_heads)?,
            },
            index.cache.as_ref(),
            &self.scored.batch()?,
            TensorMut::new(D::bytes_mut(&mut self.logits), layout)?,
        )
    }

    fn select(&mut self, device: &D) -> Result<()> {
        let layout = self.logits_layout();
        let width = self.config.dims.topk as usize;
        device.select_slots(
            TensorRef::new(D::bytes(&self.logits), layout)?,
            &self.scored.batch()?,
            self.page_size,
            SlotListsMut {
                slots: D::bytes_mut(&mut self.lists),
                width,
            },
        )
    }
}

/// Pairs of the first `rows` query tokens and the positions that they see, and the cached tokens of their requests.
fn pairs_and_cached(workload: &Workload, rows: usize) -> [f64; 2] {
    let (mut pairs, mut cached) = (0.0, 0.0);
    for (request, start) in workload.requests.iter().zip(&workload.token_starts) {
        let tokens = rows.saturating_sub(*start).min(request.q as usize);
        let first = f64::from(request.context_len()) + 1.0;
        pairs += tokens as f64 * (first + (tokens as f64 - 1.0) / 2.0);
        if tokens > 0 {
            cached += f64::from(request.kv);
        }
    }
    [pairs, cached]
}

/// The rotation of tokens at these positions.
fn rotary<'a, D: IndexDevice>(
    positions: ArrayRef<'a, D, i64>,
    rotation: Option<&'a Rotation<'_, D>>,
    style: RotaryStyle,
) -> Option<Rotary<'a, D>> {
    let rotation = rotation?;
    let tables = [rotation.cos.shorten(), rotation.sin.shorten()];
    Some(Rotary::new(positions, tables, style))
}

impl Report {
    fn describe(&self) -> String {
        let mut table = table(["part", "µs", "spread", "TFLOP/s", "GB/s"]);
        numbers(&mut table, 1..5);
        for part in &self.parts {
            let rate = |amount: f64, unit: f64| match amount {
                0.0 => Cell::new(""),
                _ => Cell::new(number(amount / part.time.median / unit)),
            };
            table.add_row([
                Cell::new(part.name),
                Cell::new(number(part.time.median * 1e6)),
                Cell::new(format!("{:.1}%", part.time.spread * 100.0)),
                rate(part.flop, 1e12),
                rate(part.bytes, 1e9),
            ]);
        }
        let beside = self
            .beside
            .as_ref()
            .map_or_else(String::new, |said| self.describe_peers(said));
        let [prefill, decode] = &self.backends;
        let lists = &self.lists;
        format!(
            "{}, {} on {}; {prefill} and {decode}\n{}\nQueries, logits and lists: of {} tokens. \
             Lists: {} of {} identical with f64, the others by at most {:.1e} of a row's range \
             (accepted {:.0e}). Output: {:.1e}. {}\n{beside}",
            self.model,
            self.batch,
            self.device,
            table.trim_fmt(),
            self.rows,
            lists.identical,
            lists.lists,
            lists.largest_distance,
            lists.tolerance,
            self.largest_error,
            if self.pass {
                "All agree."
            } else {
                "They do not agree."
            },
        )
    }

    /// What others take, and how many times ours that is.
    fn describe_peers(&self, said: &Said) -> String {
        let mut table = table(["peer", "part", "µs", "of ours"]);
        numbers(&mut table, 2..4);
        for figures in &said.peers {
            let Some(us) = figures.e2e_us else { continue };
            let own = self.parts.iter().find(|part| {
                figures
                    .id
                    .starts_with(part.name.split(' ').next().unwrap_or(""))
            });
            let ratio = own.map(|part| number(us / (part.time.median * 1e6)));
            table.add_row([
                Cell::new(&figures.peer),
                Cell::new(&figures.id),
                Cell::new(number(us)),
                Cell::new(ratio.unwrap_or_default()),
            ]);
        }
        let refusals: String = said
            .refusals
            .iter()
            .map(|refusal| format!("{refusal}\n"))
            .collect();
        format!("{}\n{refusals}", table.trim_fmt())
    }
}
