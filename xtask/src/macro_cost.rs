//! Measures how much time another backend adds to a check build of mla-kernels, from Cargo's own
//! timings.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};

use crate::{Workspace, copy_folder, succeed};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Number of backends to add.
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..))]
    backends: u32,
    /// Number of timings of each build. The fastest one counts.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Fail if a backend adds more.
    #[arg(long, default_value_t = 50.0)]
    max_milliseconds: f64,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    let folder = tempfile::tempdir()?;
    let package = folder.path().join("mla-kernels");
    write_package(&workspace, &package)?;
    let library = package.join("src/lib.rs");
    let without = fs::read_to_string(&library)?;
    let with = format!("{without}\npub mod more;\n");
    fs::write(package.join("src/more.rs"), more(arguments.backends))?;

    let seconds = |library_text: &str| -> anyhow::Result<f64> {
        let mut min = f64::INFINITY;
        for _ in 0..arguments.repeat {
            fs::write(&library, library_text)?;
            min = min.min(check(&workspace, &package)?);
        }
        Ok(min)
    };
    // The first check compiles the dependencies.
    check(&workspace, &package)?;
    let (before, after) = (seconds(&without)?, seconds(&with)?);
    let each = (after - before) * 1e3 / f64::from(arguments.backends);
    println!(
        "check of mla-kernels: {before:.2} s, with {} more backends {after:.2} s: {each:.1} ms \
         each",
        arguments.backends
    );
    ensure!(
        each <= arguments.max_milliseconds,
        "a backend adds {each:.1} ms, allowed: at most {} ms",
        arguments.max_milliseconds
    );
    Ok(())
}

/// Writes a copy of mla-kernels outside the workspace, without an architecture. On any machine, a
/// check build is like this.
fn write_package(workspace: &Workspace, package: &Path) -> anyhow::Result<()> {
    copy_folder(&workspace.root.join("src"), &package.join("src"))?;
    fs::create_dir(package.join("docs"))?;
    for file in ["docs/engine.md", "Cargo.lock", "build.rs"] {
        fs::copy(workspace.root.join(file), package.join(file))?;
    }
    // The attribute looks in the manifest for the features of all families, on or off.
    let mut features = String::from("gpu = []\n");
    for entry in fs::read_dir(package.join("src/backends"))? {
        let entry = entry?;
        if entry.path().join("mod.rs").exists() {
            writeln!(features, "{} = [\"gpu\"]", entry.file_name().display())?;
        }
    }
    fs::write(
        package.join("Cargo.toml"),
        format!(
            "[package]\nname = \"mla-kernels\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n\
             [workspace]\n\n\
             [lints.rust]\nunexpected_cfgs = \"allow\"\n\n[features]\n{features}\n\
             [dependencies]\nmla-cpu.path = {:?}\n\
             mla-runtime.path = {:?}\n",
            workspace.root.join("mla-cpu"),
            workspace.root.join("mla-runtime")
        ),
    )?;
    Ok(())
}

/// Returns the seconds for the package itself in Cargo's report.
fn check(workspace: &Workspace, package: &Path) -> anyhow::Result<f64> {
    let target = workspace.target.join("macro-cost");
    let mut cargo = workspace.cargo();
    cargo
        .current_dir(package)
        .args(["check", "--quiet", "--offline", "--timings"])
        .env("CARGO_TARGET_DIR", &target)
        .env("CARGO_INCREMENTAL", "0");
    succeed(&mut cargo)?;
    let report = fs::read_to_string(target.join("cargo-timings/cargo-timing.html"))?;
    let (_, data) = report
        .split_once("const UNIT_DATA = ")
        .context("Cargo's report has no UNIT_DATA")?;
    let units: serde_json::Value = serde_json::Deserializer::from_str(data)
        .into_iter()
        .next()
        .context("Cargo's UNIT_DATA is empty")??;
    units
        .as_array()
        .into_iter()
        .flatten()
        .find(|unit| {
            let target = unit["target"].as_str().unwrap_or_default();
            unit["name"] == "mla-kernels" && !target.contains("build")
        })
        .and_then(|unit| unit["duration"].as_f64())
        .context("Cargo's report does not name mla-kernels")
}

/// Returns backends as a kernel author writes them, without the bodies of their functions.
fn more(backends: u32) -> String {
    let mut text = String::from(
        "//! More backends.\nuse mla_runtime::backend::*;\nuse mla_cpu::Cpu;\n\
         use mla_runtime::{Error, Result, mla_backend};\n",
    );
    for number in 0..backends {
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "
/// Number {number}.
pub struct More{number}(LayerConfig);

#[mla_backend(name = \"MORE_{number}\", sm = \"any\", dtypes = \"f16,bf16\",
    dims = \"(128,64,128)|(192,64,256)\", cache_dims = \"(512,64)\", heads = \"1..=128\",
    kv = \"f16,bf16,fp8\", page_sizes = \"x16\",
    query_len = \"ragged\", features = \"deterministic\", priority = {number})]
impl DecodeBackend for More{number} {{
    type Device = Cpu;
    type State = ();
    type Metadata = ();
    fn new(_: &Cpu, config: &LayerConfig) -> Result<Self> {{ Ok(Self(*config)) }}
    fn state(&self, _: &Cpu, _: &StepLimits) -> Result<()> {{ Ok(()) }}
    fn metadata(&self, _: &Cpu, _: &StepLimits) -> Result<()> {{ Ok(()) }}
    unsafe fn decode(&self, _: &Cpu, call: DecodeCall<'_, Cpu>, _: &mut (), _: &()) -> Result<()> {{
        Err(Error::argument(\"heads\", self.0.problem.heads, call.batch.block_table.requests()))
    }}
}}
"
        );
    }
    text
}
