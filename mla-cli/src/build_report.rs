//! `mla build-report`: what the last build of CUDA kernels did, and what it produced.

use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use mla_build::report;

use crate::args::Format;
use crate::args::input;
use crate::error::CliError;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Cargo's build folder, which usually is its target folder [default: as `cargo metadata` says
    /// here].
    #[arg(long, value_name = "DIR")]
    target_dir: Option<PathBuf>,
    /// Format of the result.
    #[arg(long, default_value = "table")]
    format: Format,
}

pub(crate) fn output(args: &Args) -> Result<String, CliError> {
    let folder = args.target_dir.clone().or_else(of_cargo);
    let newest = report::newest(&folder.unwrap_or_else(|| "target".into()))?;
    Ok(args.format.write(&newest, || report::table(&newest)))
}

/// Returns the folder that build scripts write to, if the current folder is in a workspace of
/// Cargo's.
fn of_cargo() -> Option<PathBuf> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["metadata", "--no-deps", "--format-version=1"]);
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    let (_, output) = input::read_program(&mut command, |child| child.stdout.take()).ok()?;
    let metadata: serde_json::Value = serde_json::from_slice(&output).ok()?;
    let folder = |name: &str| metadata[name].as_str().map(PathBuf::from);
    folder("build_directory").or_else(|| folder("target_directory"))
}
