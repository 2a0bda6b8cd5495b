//! `mla build-report`: what the last build of CUDA kernels did and what came out of it.

use std::env;
use std::path::PathBuf;

use mla_build::report;

use crate::args::Format;
use crate::error::CliError;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Cargo's target folder [default: CARGO_TARGET_DIR, or target].
    #[arg(long, value_name = "DIR")]
    target_dir: Option<PathBuf>,
    /// How to write the result.
    #[arg(long, default_value = "table")]
    format: Format,
}

pub(crate) fn output(args: &Args) -> Result<String, CliError> {
    let folder = args
        .target_dir
        .clone()
        .or_else(|| env::var_os("CARGO_TARGET_DIR").map(PathBuf::from))
        .unwrap_or_else(|| "target".into());
    let newest = report::newest(&folder)?;
    Ok(args.format.write(&newest, || report::table(&newest)))
}
