//! Packs everything that a GPU machine needs to run the tests and the benchmarks, without Rust:
//! programs and a script.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, ensure};
use cargo_metadata::{Artifact, Message, TargetKind};
use mla_build::report::size;

use crate::{Workspace, messages, succeed};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Features to pack: those of architectures, and `nccl` for the tests of two GPUs.
    #[arg(long, value_delimiter = ',', default_value = "sm90")]
    features: Vec<String>,
    /// Also pack the tests of `mla-candle` on a GPU, compressed by xz. Building them has the
    /// requirements of candle's feature `cuda`: nvcc on the path, a CUDA toolkit to link, and
    /// `CUDA_COMPUTE_CAP`.
    #[arg(long)]
    candle: bool,
    /// Folder of the bundle, whose content is replaced [default: `bundle` in the target folder].
    #[arg(long)]
    output: Option<PathBuf>,
}

/// The maximum size of a bundle, since it is transferred for every run.
const MAX: u64 = 60 << 20;

/// The archive of all programs, used if they exceed [`MAX`]. Each program contains the kernels of
/// all families. The compression finds equal kernels in different programs, so the archive is
/// little larger than one program. `run.sh` unpacks it.
const ARCHIVE: &str = "programs.tar.xz";

const FOLDERS: [&str; 3] = ["tests", "examples", "bin"];

/// The package with the programs that need a GPU.
const KERNELS: [&str; 2] = ["--package", "mla-kernels"];

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    let output = arguments
        .output
        .clone()
        .unwrap_or_else(|| workspace.target.join("bundle"));
    begin(&output)?;
    let features = arguments.features.join(",");
    tests(&workspace, &features, &output)?;
    if arguments.candle {
        candle(&workspace, &output)?;
    }
    let examples = ["--package", "mla-kernels", "--examples"];
    for artifact in build(&workspace, "build", &examples, &features)? {
        copy(&artifact, &output.join("examples"))?;
    }
    tools(&workspace, &arguments.features, &output)?;
    let total = held(&output)?;
    ensure!(
        total <= MAX,
        "the bundle holds {}, allowed: at most {}",
        size(total),
        size(MAX)
    );
    println!("{:>10}  in {}", size(total), output.display());
    Ok(())
}

/// Makes an empty bundle with its script and its folders.
fn begin(output: &Path) -> anyhow::Result<()> {
    if output.exists() {
        // Only a folder that an earlier run of this chore made is replaced.
        ensure!(
            output.join("run.sh").is_file(),
            "{} is no bundle; remove it, or name another folder",
            output.display()
        );
        fs::remove_dir_all(output)?;
    }
    for folder in FOLDERS {
        fs::create_dir_all(output.join(folder))?;
    }
    // The script comes first. It marks the folder as a bundle, even if a build fails later.
    let script = output.join("run.sh");
    fs::write(&script, include_str!("run.sh"))?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// Packs the tests of mla-kernels that need a GPU, which are marked as ignored.
fn tests(workspace: &Workspace, features: &str, output: &Path) -> anyhow::Result<()> {
    let folder = output.join("tests");
    for artifact in build(workspace, "test", &KERNELS, features)? {
        // A program without such tests is not packed.
        if !has_ignored_tests(&executable(&artifact)?)? {
            continue;
        }
        let name = if artifact.target.kind.contains(&TargetKind::Test) {
            artifact.target.name.clone()
        } else {
            format!("{}-unit", artifact.target.name)
        };
        copy_as(&artifact, &folder.join(name))?;
    }
    ensure!(
        fs::read_dir(&folder)?.next().is_some(),
        "no test of mla-kernels with the features {features} is marked ignored, so none needs a GPU"
    );
    Ok(())
}

fn candle(workspace: &Workspace, output: &Path) -> anyhow::Result<()> {
    let manifest = ["--manifest-path", "mla-candle/Cargo.toml"];
    for artifact in build(workspace, "test", &manifest, "sm90")? {
        if artifact.target.kind.contains(&TargetKind::Test) {
            let name = format!("tests/candle-{}.xz", artifact.target.name);
            pack(&executable(&artifact)?, &output.join(name))?;
        }
    }
    Ok(())
}

/// Packs the command `mla` and the program of `cargo lab`. Their own features turn on those of the
/// kernels, and the device. They have features for architectures.
fn tools(workspace: &Workspace, features: &[String], output: &Path) -> anyhow::Result<()> {
    for package in ["mla-cli", "mla-lab"] {
        let own: Vec<_> = features
            .iter()
            .filter(|feature| feature.starts_with("sm"))
            .map(|feature| format!("{package}/{feature}"))
            .collect();
        for artifact in build(workspace, "build", &["--package", package], &own.join(","))? {
            if artifact.target.kind.contains(&TargetKind::Bin) {
                copy(&artifact, &output.join("bin"))?;
            }
        }
    }
    Ok(())
}

/// Lists the programs, puts them into an archive if they exceed the size of a bundle, and returns
/// the bundle's content.
fn held(output: &Path) -> anyhow::Result<u64> {
    let mut total = 0;
    for folder in FOLDERS {
        let mut files: Vec<_> = fs::read_dir(output.join(folder))?.collect::<Result<_, _>>()?;
        files.sort_by_key(fs::DirEntry::file_name);
        for file in files {
            let length = file.metadata()?.len();
            total += length;
            println!(
                "{:>10}  {folder}/{}",
                size(length),
                file.file_name().display()
            );
        }
    }
    if total <= MAX {
        return Ok(total);
    }
    let packed = archive(output)?;
    println!("{:>10}  {ARCHIVE}, for {}", size(packed), size(total));
    Ok(packed)
}

/// Puts all programs into one archive, and returns its size.
fn archive(output: &Path) -> anyhow::Result<u64> {
    let path = output.join(ARCHIVE);
    // The dictionary is large enough for a program with every family, so a program's kernels are
    // found in the preceding one.
    let mut tar = Command::new("tar");
    tar.args(["--create", "--sort=name", "--owner=0", "--group=0"])
        .arg("--use-compress-program=xz --threads=1 --lzma2=preset=6,dict=64MiB")
        .arg("--file")
        .arg(&path)
        .arg("--directory")
        .arg(output);
    succeed(tar.args(FOLDERS))?;
    for folder in FOLDERS {
        fs::remove_dir_all(output.join(folder))?;
    }
    Ok(fs::metadata(path)?.len())
}

/// Builds in release mode, stripped, and returns the executables.
fn build(
    workspace: &Workspace,
    command: &str,
    packages: &[&str],
    features: &str,
) -> anyhow::Result<Vec<Artifact>> {
    let mut cargo = workspace.cargo();
    cargo.args([command, "--release"]);
    if command == "test" {
        cargo.arg("--no-run");
    }
    cargo
        .args(packages)
        .args(["--features", features])
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
        .stderr(Stdio::inherit());
    let (succeeds, messages) = messages(&mut cargo)?;
    ensure!(succeeds, "cargo {command} failed; its message stands above");
    let artifacts = messages.into_iter().filter_map(|message| match message {
        Message::CompilerArtifact(artifact) => Some(artifact),
        _ => None,
    });
    let programs = artifacts.filter(|artifact| {
        artifact.executable.is_some() && !artifact.target.kind.contains(&TargetKind::CustomBuild)
    });
    Ok(programs.collect())
}

fn executable(artifact: &Artifact) -> anyhow::Result<PathBuf> {
    let path = artifact
        .executable
        .as_ref()
        .with_context(|| format!("{} is not executable", artifact.target.name))?;
    Ok(path.into())
}

fn has_ignored_tests(executable: &Path) -> anyhow::Result<bool> {
    let output = Command::new(executable)
        .args(["--list", "--ignored", "--format=terse"])
        .output()
        .with_context(|| format!("{} does not start", executable.display()))?;
    Ok(output.status.success()
        && String::from_utf8_lossy(&output.stdout)
            .lines()
            .any(|line| line.ends_with(": test")))
}

/// Compresses a program with candle to about a seventh of its size. Most of it is candle's kernels,
/// as PTX and for every quantised format.
fn pack(from: &Path, to: &Path) -> anyhow::Result<()> {
    let mut xz = Command::new("xz");
    xz.args(["--compress", "--stdout", "--threads=0"])
        .arg(from)
        .stdout(fs::File::create(to)?);
    succeed(&mut xz)
}

/// Copies a program into a folder under its own name.
fn copy(artifact: &Artifact, folder: &Path) -> anyhow::Result<()> {
    copy_as(artifact, &folder.join(&artifact.target.name))
}

fn copy_as(artifact: &Artifact, to: &Path) -> anyhow::Result<()> {
    let from = executable(artifact)?;
    fs::copy(&from, to)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a program of one MiB that cannot be compressed. Programs differ only in their names.
    fn program(name: &str) -> Vec<u8> {
        let mut bytes = format!("#!/bin/sh\necho {name} ran\nexit\n").into_bytes();
        let mut state = 1u64;
        bytes.extend((0..1 << 20).map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 56) as u8
        }));
        bytes
    }

    #[test]
    fn programs_that_are_alike_are_packed_once_and_run() -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let output = folder.path();
        fs::write(output.join("run.sh"), include_str!("run.sh"))?;
        for name in FOLDERS {
            fs::create_dir(output.join(name))?;
            let path = output.join(name).join(format!("of-{name}"));
            fs::write(&path, program(name))?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        }
        let packed = archive(output)?;
        assert!((1 << 20..3 << 19).contains(&packed), "{packed} bytes");
        for folder in FOLDERS {
            assert!(!output.join(folder).exists(), "{folder} is still there");
        }
        for what in ["tests", "examples"] {
            let run = Command::new("sh")
                .arg(output.join("run.sh"))
                .arg(what)
                .output()?;
            let said = String::from_utf8_lossy(&run.stdout).into_owned();
            assert!(
                run.status.success(),
                "{said}{}",
                String::from_utf8_lossy(&run.stderr)
            );
            assert_eq!(said, format!("== of-{what}\n{what} ran\n"));
        }
        Ok(())
    }
}
