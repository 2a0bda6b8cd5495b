//! `mla plan chunks`: cached context in chunks that fit a workspace.

use mla_runtime::plan::context::{ChunkLimits, ContextChunk, plan_chunks};

use super::ParallelArgs;
use crate::args::{Format, natural, positive};
use crate::error::CliError;
use crate::table::{counted, numbers, table};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Cached tokens of each request, without the new ones.
    #[arg(
        long,
        value_name = "LEN,LEN,…",
        required = true,
        value_delimiter = ',',
        value_parser = natural
    )]
    context_lens: Vec<u32>,
    /// W: the rows of the workspace, over all ranks.
    #[arg(long, value_name = "W", value_parser = positive)]
    rows: u32,
    /// Alignment of the cuts in a context: a multiple of this many tokens, the page size.
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    align: u32,
    /// Maximum number of tokens that a cut leaves in a chunk [default: W, rounded down to the
    /// alignment].
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    max_chunk: Option<u32>,
    #[command(flatten)]
    parallel: ParallelArgs,
    /// Format of the result.
    #[arg(long, default_value = "table")]
    format: Format,
}

/// The chunks in the form of the JSON.
#[derive(serde::Serialize)]
struct Report<'a> {
    chunks: &'a [ContextChunk],
}

pub(crate) fn output(args: &Args) -> Result<String, CliError> {
    let limits = ChunkLimits::new(args.rows, args.align)
        .with_max_chunk(args.max_chunk)
        .with_parallel(args.parallel.read()?);
    let plan = plan_chunks(&args.context_lens, &limits)?;
    let report = Report { chunks: &plan };
    Ok(args.format.write(&report, || describe(&plan, args)))
}

fn describe(plan: &[ContextChunk], args: &Args) -> String {
    let tokens: u64 = args.context_lens.iter().copied().map(u64::from).sum();
    // Under context parallelism, a rank stores fewer rows than the chunk has.
    let spread = plan.iter().any(|chunk| !chunk.local_starts.is_empty());
    let last = if spread { "rows per rank" } else { "" };
    let mut table = table(["chunk", "request: tokens from..to", "rows", last]);
    for (index, chunk) in plan.iter().enumerate() {
        let segments: Vec<_> = chunk
            .segments()
            .map(|(request, start, len)| {
                format!("{request}: {start}..{}", u64::from(start) + u64::from(len))
            })
            .collect();
        let local = chunk.padded_local_seq_lens.iter().copied().map(u64::from);
        table.add_row([
            index.to_string(),
            segments.join("   "),
            chunk.rows().to_string(),
            if spread {
                local.sum::<u64>().to_string()
            } else {
                String::new()
            },
        ]);
    }
    numbers(&mut table, [0, 2, 3]);
    format!(
        "{}\n{} of {} in {} of at most {}\n",
        table.trim_fmt(),
        counted(tokens, "context token"),
        counted(args.context_lens.len() as u64, "request"),
        counted(plan.len() as u64, "chunk"),
        counted(args.rows, "row")
    )
}
