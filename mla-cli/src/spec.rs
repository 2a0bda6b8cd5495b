//! `mla spec`: the meaning of a batch spec.

use crate::args::Format;
use crate::batch::{BatchSpec, kind};
use crate::error::CliError;
use crate::table::{counted, numbers, table};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Segments `[count]q<len>[k][s<len>[k]]`, joined by `_`: `4q2k_8q4s1k_64q1s2k` is 4 prefills
    /// of 2048 tokens, 8 requests of 4 new tokens with 1024 in all, and 64 decodes at 2048.
    #[arg(allow_hyphen_values = true)]
    spec: String,
    /// Format of the result.
    #[arg(long, default_value = "table")]
    format: Format,
}

pub(crate) fn output(args: &Args) -> Result<String, CliError> {
    let spec: BatchSpec = args.spec.parse().map_err(CliError::batch_spec)?;
    Ok(args.format.write(&spec, || describe(&spec)))
}

fn describe(spec: &BatchSpec) -> String {
    let mut table = table(["requests", "kind", "query", "context", "kv"]);
    // Equal neighbours are one row, since a batch may have very many requests.
    for alike in spec.requests().chunk_by(|a, b| a == b) {
        if let Some(request) = alike.first() {
            table.add_row([
                alike.len().to_string(),
                kind(*request).to_string(),
                request.q.to_string(),
                request.context_len().to_string(),
                request.kv.to_string(),
            ]);
        }
    }
    numbers(&mut table, [0, 2, 3, 4]);
    format!(
        "{}\n{}\n{}, {}, {} in the cache after the step\n",
        spec.label(),
        table.trim_fmt(),
        counted(spec.requests().len() as u64, "request"),
        counted(spec.query_tokens(), "query token"),
        counted(spec.kv_tokens(), "token")
    )
}
