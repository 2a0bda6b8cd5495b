//! Installs the wheels that `mla-build/toolkit.toml` pins.

use std::{fs, path::PathBuf, process::Command, time::Instant};

use anyhow::{Context, bail};
use mla_build::toolkit::Pins;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The Python whose pip downloads the wheels.
    #[arg(long, default_value = "python3")]
    python: PathBuf,
    /// Install again what is already there.
    #[arg(long)]
    again: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let pins = Pins::current();
    let folder = pins
        .folder()
        .context("no folder to install into: set MLA_TOOLKIT, XDG_DATA_HOME or HOME")?;
    // The folder comes into being whole, by a rename, so it is complete wherever it exists.
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
    fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    let staging = tempfile::Builder::new()
        .prefix("installing-")
        .tempdir_in(parent)?;
    let started = Instant::now();
    for package in &pins.packages {
        println!("installing {package}");
    }
    let status = Command::new(&arguments.python)
        .args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--root-user-action=ignore",
        ])
        .arg("--target")
        .arg(staging.path())
        .args(&pins.packages)
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
    if folder.exists() {
        fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::rename(staging.keep(), &folder)
        .with_context(|| format!("cannot move into {}", folder.display()))?;
    println!(
        "installed into {} in {:.0} s",
        folder.display(),
        started.elapsed().as_secs_f64()
    );
    Ok(())
}
