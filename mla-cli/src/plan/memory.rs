//! `mla plan memory`: every buffer of the layer, or what fits in a given amount of memory.

use std::fmt::Write as _;

use bytesize::ByteSize;
use mla_runtime::Error;
use mla_runtime::backend::StepLimits;
use mla_runtime::model::KvFormat;
use mla_runtime::plan::memory::{MemoryNeeds, MemoryPlan, max_pages, max_rows, plan};
use mla_runtime::plan::parallel::ContextParallel;
use mla_runtime::plan::workspace::MAX_ROWS;
use mla_runtime::spec::Problem;
use serde::Serialize;

use super::ParallelArgs;
use crate::args::{self, Format, Model, ModelArgs, SparseArgs, kv_format, natural, positive};
use crate::error::CliError;
use crate::table::{counted, numbers, size, table};

// The default is the number above which more rows no longer pay.
const DEFAULT_ROWS: u32 = MAX_ROWS as u32;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Layers with a cache [default: the model's].
    #[arg(long, value_name = "N", value_parser = positive)]
    layers: Option<u32>,
    /// The format of the cache [default: the dtype].
    #[arg(long, value_parser = kv_format())]
    kv: Option<KvFormat>,
    /// Tokens in a page of the cache.
    #[arg(long, value_name = "TOKENS", default_value = "64", value_parser = positive)]
    page: u32,
    /// Keep latents and rotary keys in two tensors, instead of one with rows of both.
    #[arg(long)]
    split_cache: bool,
    /// Tokens that the cache holds, rounded up to whole pages [default with --fit: the number that
    /// fits].
    #[arg(long, value_name = "TOKENS", value_parser = positive, required_unless_present = "fit")]
    tokens: Option<u32>,
    /// W: rows of the context workspace [default: with --fit and --tokens the largest number that
    /// fits, otherwise 65536, or 0 for a sparse layer].
    #[arg(long, value_name = "W", value_parser = natural)]
    rows: Option<u32>,
    /// Find what fits in this much memory, such as 80GiB: the cache, or the workspace if --tokens
    /// is given.
    #[arg(long, value_name = "SIZE", value_parser = args::size, allow_hyphen_values = true)]
    fit: Option<ByteSize>,
    /// Maximum number of requests of a step.
    #[arg(long, value_name = "N", default_value = "256", value_parser = natural)]
    requests: u32,
    /// Maximum number of new tokens of a step.
    #[arg(long, value_name = "TOKENS", default_value = "8192", value_parser = natural)]
    step_tokens: u32,
    /// Maximum number of new tokens of a request on the absorbed path.
    #[arg(long, value_name = "TOKENS", default_value = "1", value_parser = natural)]
    decode_query_len: u32,
    /// Maximum number of tokens of a request, which sets the width of the block tables.
    #[arg(long, value_name = "TOKENS", default_value = "131072", value_parser = natural)]
    context_len: u32,
    #[command(flatten)]
    form: SparseArgs,
    #[command(flatten)]
    parallel: ParallelArgs,
    /// Plan for a prefill backend that takes each head's key packed.
    #[arg(long)]
    packed_keys: bool,
    /// Format of the result.
    #[arg(long, default_value = "table")]
    format: Format,
}

/// The maximum number of rows in a step's limits.
const MAX_STEP_ROWS: u32 = i32::MAX as u32 - 1;

/// The plan, and the settings it was made for.
#[derive(Serialize)]
struct Report {
    layers: u32,
    heads: u32,
    kv_format: &'static str,
    page_size: u32,
    pages: u64,
    tokens: u64,
    rows: u32,
    #[serde(flatten)]
    plan: MemoryPlan,
}

pub(crate) fn output(args: &Args) -> Result<String, CliError> {
    let model = args.model.read()?;
    let kv_format = args.kv.unwrap_or(KvFormat::of(model.dtype));
    let sparse = args.form.read(&model);
    let default = if sparse { 0 } else { DEFAULT_ROWS };
    let rows = args.rows.unwrap_or(default);
    let needs = |rows| needs(args, &model, kv_format, rows);
    let needs = fitted(args, sparse, needs, rows)?;
    let report = Report {
        layers: needs.layers,
        heads: needs.heads,
        kv_format: kv_format.name(),
        page_size: needs.page_size,
        pages: needs.pages,
        tokens: needs.pages * u64::from(needs.page_size),
        rows: needs.rows,
        plan: plan(&needs)?,
    };
    let table = || describe(&report, &model, sparse);
    Ok(args.format.write(&report, table))
}

fn needs(
    args: &Args,
    model: &Model,
    kv_format: KvFormat,
    rows: u32,
) -> Result<MemoryNeeds, CliError> {
    let layers = args.layers.or(model.config.layers);
    let layers = layers.ok_or_else(|| {
        CliError::argument(
            "--layers",
            "none, and none in the configuration (num_hidden_layers)",
            "1 and up",
        )
    })?;
    let problem = Problem::new(model.config.dims, model.heads, model.dtype)
        .with_kv_format(kv_format)
        .with_page_size(args.page)
        .with_sparse(args.form.read(model))
        .with_features(args::cache_features(args.split_cache));
    let limits = StepLimits::new(
        args.requests as usize,
        args.step_tokens as usize,
        args.context_len.div_ceil(args.page) as usize,
    )
    .with_decode_query_len(args.decode_query_len as usize)
    .with_context_rows(rows as usize);
    let mut needs = MemoryNeeds::of_steps(&problem, &limits).map_err(by_argument)?;
    // The model has an indexer of the engine's own, and only the engine knows its memory.
    if problem.sparse && model.config.foreign_indexer.is_none() {
        let indexers = model.config.indexers(layers);
        let with_indexers = needs.with_indexer(&model.indexer()?, &limits, indexers);
        needs = with_indexers.map_err(by_argument)?;
    }
    Ok(needs
        .with_pages(args.tokens.unwrap_or(0).div_ceil(args.page).into())
        .with_layers(layers)
        .with_parallel(args.parallel.read()?.unwrap_or(ContextParallel::SINGLE))
        .with_packed_keys(args.packed_keys))
}

// Fits the limits that are not given into the available memory.
fn fitted(
    args: &Args,
    sparse: bool,
    needs: impl Fn(u32) -> Result<MemoryNeeds, CliError>,
    rows: u32,
) -> Result<MemoryNeeds, CliError> {
    let Some(ByteSize(bytes)) = args.fit else {
        return needs(rows);
    };
    match (args.tokens, args.rows) {
        (None, _) => {
            let first = needs(rows)?;
            let pages = max_pages(&first, bytes).map_err(too_little)?;
            Ok(first.with_pages(pages))
        }
        (Some(_), None) if sparse => Err(CliError::argument(
            "--fit",
            "together with --tokens for a sparse layer, which leaves nothing to find",
            "without --tokens, or with --dense",
        )),
        (Some(_), None) => {
            // With fewer rows a step has more chunks, so its arrays are longer. The search
            // therefore goes down from the maximum.
            let mut fitted = needs(MAX_STEP_ROWS)?;
            loop {
                let rows = max_rows(&fitted, bytes).map_err(too_little)?;
                fitted = needs(rows.min(MAX_STEP_ROWS))?;
                if plan(&fitted)?.total_bytes <= bytes {
                    return Ok(fitted);
                }
            }
        }
        (Some(_), Some(_)) => Err(CliError::argument(
            "--fit",
            "together with both --tokens and --rows, which leaves nothing to find",
            "with at most one of them",
        )),
    }
}

// Names the argument of the limit in an error about a step's limits.
fn by_argument(error: Error) -> CliError {
    let Error::Argument {
        field,
        given,
        accepted,
    } = &error
    else {
        return error.into();
    };
    let (argument, given) = match &**field {
        "limits.requests" => ("--requests", given.clone()),
        "limits.tokens" => ("--step-tokens", given.clone()),
        "limits.context_rows" => ("--rows", given.clone()),
        "limits.pages_per_request" => ("--context-len", format!("what takes {given} pages")),
        _ => return error.into(),
    };
    CliError::argument(argument, given, accepted)
}

// Names the argument in an error about too little memory, with sizes in its units.
fn too_little(error: Error) -> CliError {
    match error {
        Error::DoesNotFit {
            given,
            needed,
            smallest,
        } => CliError::argument(
            "--fit",
            size(given),
            format!(
                "at least {}, which is {needed} bytes, for {smallest}",
                size(needed)
            ),
        ),
        error => error.into(),
    }
}

fn describe(report: &Report, model: &Model, sparse: bool) -> String {
    let mut table = table(["region", "shape", "bytes", "about"]);
    for region in &report.plan.regions {
        let shape: Vec<_> = region.shape.iter().map(u64::to_string).collect();
        table.add_row([
            region.name().to_owned(),
            shape.join(" × "),
            region.bytes.to_string(),
            size(region.bytes),
        ]);
    }
    numbers(&mut table, [2, 3]);
    let lists = match report.plan.indexer_bytes {
        0 => String::new(),
        bytes => format!(", {} for lists", size(bytes)),
    };
    let mut text = format!(
        "{}: {}, {}, {}\n\
         {} cache of {}: {} of {}\n\
         {}\n\
         {} of cache, {} of workspace{lists}: {}, {} bytes.\n\
         Beside this comes what a backend allocates.\n\
         {}",
        model.name,
        counted(report.heads, "head"),
        counted(report.layers, "layer"),
        counted(report.rows, "context row"),
        report.kv_format,
        counted(report.tokens, "token"),
        counted(report.pages, "page"),
        report.page_size,
        table.trim_fmt(),
        size(report.plan.cache_bytes),
        size(report.plan.workspace_bytes),
        size(report.plan.total_bytes),
        report.plan.total_bytes,
        model.engine_work()
    );
    if let Some(indexer) = model.config.indexer
        && !sparse
    {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "This model can attend to {} slots per query token; --sparse counts what that takes.",
            indexer.topk
        );
    }
    text
}
