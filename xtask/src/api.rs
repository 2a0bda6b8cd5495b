//! The public interface of each published crate. It is checked in, so that a review shows its
//! changes.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};
use public_api::Builder;

use crate::{Workspace, succeed, text_of};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Write the lists again instead of comparing them, and then review the changes.
    #[arg(long)]
    bless: bool,
    /// Compare only these packages.
    #[arg(long, value_name = "PACKAGE")]
    package: Vec<String>,
}

/// The packages, and the features with which their documentation is built.
///
/// Crates with third-party kernels are listed without features, because their bindings need
/// libclang, which is not needed otherwise. A feature would add a backend's state and the list of
/// compiled targets. mla-candle is not listed, since it is in a separate workspace, whose tests use
/// its interface. The packages of compiled kernels are not listed, since they have one constant
/// each.
const PACKAGES: [(&str, &str); 10] = [
    ("mla-macros", ""),
    ("mla-runtime", ""),
    ("mla-cpu", ""),
    ("mla-conformance", ""),
    ("mla-build", "bindings,budget,table"),
    ("mla-kernels", "sm80,sm90,sm100"),
    ("mla-flashinfer", ""),
    ("mla-flashmla", ""),
    ("mla-cudnn", ""),
    ("mla-cli", ""),
];

/// The compiler whose JSON documentation `public-api` can read. The form of this documentation is
/// not stable.
const COMPILER: &str = "1.95";

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    let version = text_of(Command::new("rustc").arg("--version"))?;
    ensure!(
        version.starts_with(&format!("rustc {COMPILER}.")),
        "compiler: given {}, accepted Rust {COMPILER}, by which the lists were made: \
         rustup run {COMPILER}.0 cargo xtask api",
        version.trim()
    );
    let folder = workspace.root.join("xtask/api");
    let mut stale = Vec::new();
    for wanted in &arguments.package {
        ensure!(
            PACKAGES.iter().any(|(package, _)| package == wanted),
            "package: given {wanted}, accepted {}",
            PACKAGES.map(|(package, _)| package).join(", ")
        );
    }
    let chosen = |package: &str| {
        arguments.package.is_empty() || arguments.package.iter().any(|wanted| wanted == package)
    };
    for (package, features) in PACKAGES.iter().filter(|(package, _)| chosen(package)) {
        let list = list(&workspace, package, features)?;
        let path = folder.join(format!("{package}.txt"));
        if arguments.bless {
            fs::write(&path, list).with_context(|| format!("cannot write {}", path.display()))?;
        } else if fs::read_to_string(&path).unwrap_or_default() != list {
            show_difference(&fs::read_to_string(&path).unwrap_or_default(), &list);
            stale.push(*package);
        }
    }
    if !stale.is_empty() {
        bail!(
            "the public interface of {} is not what xtask/api says (- there, + now); where the \
             change is meant, run `cargo xtask api --bless`",
            stale.join(", ")
        );
    }
    Ok(())
}

fn list(workspace: &Workspace, package: &str, features: &str) -> anyhow::Result<String> {
    let mut rustdoc = workspace.cargo();
    rustdoc
        .args(["rustdoc", "--quiet", "--lib", "--package", package])
        .args(["--features", features])
        .args(["--", "-Zunstable-options", "--output-format=json"])
        .env("RUSTDOC", unstable_rustdoc(&workspace.target)?)
        // docs.rs builds documentation without CUDA, and this build does the same.
        .env("DOCS_RS", "1");
    succeed(&mut rustdoc)?;
    let json = workspace
        .target
        .join(format!("doc/{}.json", package.replace('-', "_")));
    let api = Builder::from_rustdoc_json(json)
        .omit_blanket_impls(true)
        .omit_auto_trait_impls(true)
        .omit_auto_derived_impls(true)
        .build()
        .with_context(|| format!("cannot read what rustdoc says of {package}"))?;
    Ok(api.to_string())
}

/// Makes a rustdoc that accepts unstable options. The variable that allows them is set for rustdoc
/// alone: build scripts of other crates look at it. If Cargo and rustc had it, everything would be
/// rebuilt each time it is set or unset.
fn unstable_rustdoc(target: &Path) -> anyhow::Result<PathBuf> {
    let script = target.join("unstable-rustdoc");
    fs::write(
        &script,
        "#!/bin/sh\nRUSTC_BOOTSTRAP=1 exec rustdoc \"$@\"\n",
    )
    .and_then(|()| fs::set_permissions(&script, fs::Permissions::from_mode(0o755)))
    .with_context(|| format!("cannot write {}", script.display()))?;
    Ok(script)
}

fn show_difference(old: &str, new: &str) {
    let missing = |from: &str, other: &str, mark: char| {
        let other: std::collections::HashSet<&str> = other.lines().collect();
        for line in from.lines().filter(|line| !other.contains(line)) {
            println!("{mark} {line}");
        }
    };
    missing(old, new, '-');
    missing(new, old, '+');
}
