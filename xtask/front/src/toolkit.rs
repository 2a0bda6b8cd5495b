//! Installs the wheels that `mla-build/toolkit.txt` pins, and checks the hash of each.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::{self, Command},
    time::Instant,
};

use anyhow::{Context, bail};
use lexopt::{Arg, ValueExt};

use crate::pins::Pins;

const HELP: &str = "\
Install the pinned CUDA toolkit, CUTLASS and libclang into the user's data folder, once

Usage: cargo xtask toolkit [OPTIONS]

Options:
      --python <PATH>       The Python whose pip downloads the wheels [default: python3]
      --again               Install again what is already there
      --requirement <FILE>  Other pins than mla-build/toolkit.txt; MLA_TOOLKIT names their folder
  -h, --help                Print help";

struct Arguments {
    python: PathBuf,
    again: bool,
    requirement: PathBuf,
}

impl Arguments {
    /// Parses the arguments. Returns `None` if only help is asked for.
    fn parse(arguments: &[OsString]) -> anyhow::Result<Option<Self>> {
        let mut parsed = Self {
            python: "python3".into(),
            again: false,
            requirement: concat!(env!("CARGO_MANIFEST_DIR"), "/../../mla-build/toolkit.txt").into(),
        };
        let mut parser = lexopt::Parser::from_args(arguments);
        while let Some(argument) = parser.next()? {
            match argument {
                Arg::Long("python") => parsed.python = parser.value()?.into(),
                Arg::Long("again") => parsed.again = true,
                Arg::Long("requirement") => parsed.requirement = parser.value()?.parse()?,
                Arg::Short('h') | Arg::Long("help") => return Ok(None),
                other => return Err(other.unexpected().into()),
            }
        }
        Ok(Some(parsed))
    }
}

pub(crate) fn run(arguments: &[OsString]) -> anyhow::Result<()> {
    let Some(arguments) = Arguments::parse(arguments)? else {
        println!("{HELP}");
        return Ok(());
    };
    let pins = Pins::current();
    let folder = pins
        .folder()
        .context("no folder to install into: set MLA_TOOLKIT, XDG_DATA_HOME or HOME")?;
    // The folder is made by a rename, so it is complete if it exists.
    if folder.exists() && !arguments.again {
        println!(
            "{} is there already; --again installs it anew",
            folder.display()
        );
        return Ok(());
    }
    let parent = folder
        .parent()
        .context("MLA_TOOLKIT names no folder that could be made")?;
    let staging = Staging(parent.join(format!("installing-{}", process::id())));
    fs::create_dir_all(&staging.0)
        .with_context(|| format!("cannot make {}", staging.0.display()))?;
    let started = Instant::now();
    for package in &pins.packages {
        println!("installing {package}");
    }
    install(&arguments, &staging.0)?;
    if folder.exists() {
        fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::rename(&staging.0, &folder)
        .with_context(|| format!("cannot move into {}", folder.display()))?;
    println!(
        "installed into {} in {:.0} s",
        folder.display(),
        started.elapsed().as_secs_f64()
    );
    Ok(())
}

fn install(arguments: &Arguments, target: &Path) -> anyhow::Result<()> {
    let status = Command::new(&arguments.python)
        .args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--require-hashes",
            "--root-user-action=ignore",
            "--disable-pip-version-check",
        ])
        .arg("--target")
        .arg(target)
        .arg("--requirement")
        .arg(&arguments.requirement)
        .status()
        .with_context(|| {
            format!(
                "{} does not start; --python names another",
                arguments.python.display()
            )
        })?;
    if !status.success() {
        bail!("pip ended with {status}; what it said stands above");
    }
    Ok(())
}

/// A folder that is removed when the chore ends, unless it was renamed.
struct Staging(PathBuf);

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
