//! The program that `cargo xtask` starts. The toolkit is needed before anything is compiled, so the
//! chore that installs it is here, with few dependencies. All other chores are in `xtask`, which is
//! compiled when one of them is called.

mod toolkit;

use std::{
    env,
    os::unix::process::CommandExt,
    process::{Command, ExitCode},
};

use anyhow::Context;

// The folder and the versions of the pinned wheels, as mla-build knows them.
#[path = "../../../mla-build/src/toolkit/pins.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "mla-build uses and exports the rest"
)]
mod pins;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        // The error and its causes are printed without a backtrace.
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let arguments: Vec<_> = env::args_os().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "toolkit") {
        return toolkit::run(&arguments[1..]);
    }
    let error = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["run", "--quiet", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"))
        .arg("--")
        .args(arguments)
        .exec();
    Err(error).context("cargo does not start")
}
