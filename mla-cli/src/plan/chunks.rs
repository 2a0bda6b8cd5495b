//! `mla plan chunks`: cached context in chunks that fit a workspace.

use mla_runtime::plan::context::{ContextChunk, plan_chunks};

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
    /// W: the rows of the workspace.
    #[arg(long, value_name = "W", value_parser = positive)]
    rows: u32,
    /// Alignment of the cuts in a context: a multiple of this many tokens, the page size.
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    align: u32,
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
    let plan = plan_chunks(&args.context_lens, args.rows, args.align, false)?;
    let report = Report { chunks: &plan };
    Ok(args.format.write(&report, || describe(&plan, args)))
}

fn describe(plan: &[ContextChunk], args: &Args) -> String {
    let tokens: u64 = args.context_lens.iter().copied().map(u64::from).sum();
    let mut table = table(["chunk", "request: tokens from..to", "rows"]);
    for (index, chunk) in plan.iter().enumerate() {
        let segments: Vec<_> = chunk
            .segments()
            .map(|(request, start, len)| {
                format!("{request}: {start}..{}", u64::from(start) + u64::from(len))
            })
            .collect();
        table.add_row([
            index.to_string(),
            segments.join("   "),
            chunk.rows().to_string(),
        ]);
    }
    numbers(&mut table, [0, 2]);
    format!(
        "{}\n{} of {} in {} of at most {}\n",
        table.trim_fmt(),
        counted(tokens, "context token"),
        counted(args.context_lens.len() as u64, "request"),
        counted(plan.len() as u64, "chunk"),
        counted(args.rows, "row")
    )
}
