//! Developer chores of this workspace: `cargo xtask NAME`.

mod api;
mod book;
mod bundle;
mod cubins;
mod declarations;
mod engines;
mod goldens;
mod kernels;
mod language;
mod macro_cost;
mod package;
mod release;
mod sass;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

use anyhow::{Context, ensure};
use cargo_metadata::Message;
use clap::{Parser, Subcommand};

/// Developer chores of this workspace.
#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    after_help = "`cargo xtask toolkit` installs the pinned CUDA toolkit, CUTLASS and libclang."
)]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Compile the kernels, show each unit when it is done, and show what took time.
    Kernels(kernels::Arguments),
    /// Pack the GPU tests and the benchmarks into a folder that runs on a machine without Rust.
    Bundle(bundle::Arguments),
    /// Compare the checked-in expansions, compiler errors, machine code and outputs, or write them
    /// again.
    Goldens(goldens::Arguments),
    /// Write the Rust declarations beside each C header of the kernels, as bindgen makes them.
    Declarations,
    /// Resolve and check the library with the dependencies of engines, and with the oldest ones.
    Engines(engines::Arguments),
    /// Compare the public interface of each crate with the checked-in list, or write it again.
    Api(api::Arguments),
    /// Compile kernels into cubins and PTX with a manifest, for a program that links nothing.
    Cubins(cubins::Arguments),
    /// Make one site of the manuals, the benchmarks and rustdoc, and check its links.
    Book(book::Arguments),
    /// Compare the machine code of two revisions, except for symbol names.
    Sass(sass::Arguments),
    /// List comments that begin without a subject.
    Language,
    /// Check that the published packages are complete and contain nothing else.
    Package,
    /// Compile the kernels into packages, so that a release needs no nvcc, and check the packages
    /// to publish.
    Release(release::Arguments),
    /// Measure the time that one more backend adds to a check build of mla-kernels.
    MacroCost(macro_cost::Arguments),
}

fn main() -> ExitCode {
    match run(Arguments::parse().chore) {
        Ok(()) => ExitCode::SUCCESS,
        // The error and its causes are printed without a backtrace, since the user of a chore has
        // to fix its error.
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(chore: Chore) -> anyhow::Result<()> {
    match chore {
        Chore::Kernels(arguments) => kernels::run(&arguments),
        Chore::Bundle(arguments) => bundle::run(&arguments),
        Chore::Engines(arguments) => engines::run(&arguments),
        Chore::Goldens(arguments) => goldens::run(&arguments),
        Chore::Declarations => declarations::run(),
        Chore::Api(arguments) => api::run(&arguments),
        Chore::Cubins(arguments) => cubins::run(&arguments),
        Chore::Book(arguments) => book::run(&arguments),
        Chore::Sass(arguments) => sass::run(&arguments),
        Chore::Language => language::run(),
        Chore::Package => package::run(),
        Chore::Release(arguments) => release::run(&arguments),
        Chore::MacroCost(arguments) => macro_cost::run(&arguments),
    }
}

/// The folders of the workspace that the chores need.
struct Workspace {
    root: PathBuf,
    target: PathBuf,
    /// The folder that build scripts write to. It is the target folder, unless the user chose
    /// another one.
    build: PathBuf,
}

impl Workspace {
    fn find() -> anyhow::Result<Self> {
        let metadata = cargo_metadata::MetadataCommand::new()
            .manifest_path(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml"))
            .no_deps()
            .exec()?;
        Ok(Self {
            root: metadata.workspace_root.into(),
            target: metadata.target_directory.clone().into(),
            build: metadata
                .build_directory
                .unwrap_or(metadata.target_directory)
                .into(),
        })
    }

    /// Returns Cargo's metadata of the workspace's packages, without their dependencies.
    fn metadata(&self) -> anyhow::Result<cargo_metadata::Metadata> {
        let mut command = cargo_metadata::MetadataCommand::new();
        Ok(command.current_dir(&self.root).no_deps().exec()?)
    }

    /// Returns a command of the Cargo that started this program, at the workspace's root.
    fn cargo(&self) -> Command {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command.current_dir(&self.root);
        command
    }
}

/// Runs a command, shows its messages, and fails if the command fails.
fn succeed(command: &mut Command) -> anyhow::Result<()> {
    let status = command
        .status()
        .with_context(|| format!("{} does not start", command.get_program().display()))?;
    ensure!(
        status.success(),
        "{command:?} ended with {status}; its message stands above"
    );
    Ok(())
}

/// Returns the standard output of a command that has to succeed.
fn text_of(command: &mut Command) -> anyhow::Result<String> {
    let output = command
        .output()
        .with_context(|| format!("{} does not start", command.get_program().display()))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}

/// Runs a command of Cargo's that compiles. Returns true if it succeeds, and its messages.
fn messages(cargo: &mut Command) -> anyhow::Result<(bool, Vec<Message>)> {
    cargo.arg("--message-format=json-render-diagnostics");
    cargo.stdin(Stdio::null());
    let output = cargo.output().context("cargo does not start")?;
    let messages = Message::parse_stream(output.stdout.as_slice());
    Ok((output.status.success(), messages.collect::<Result<_, _>>()?))
}

/// Returns a call of pip that installs wheels into a folder.
fn pip(python: &Path, target: &Path) -> Command {
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps"])
        .args(["--only-binary=:all:", "--root-user-action=ignore"])
        .args(["--disable-pip-version-check", "--target"])
        .arg(target);
    pip
}

fn copy_folder(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}
