//! Checks that the published packages are complete and hold nothing else.

use std::collections::HashSet;

use anyhow::ensure;
use cargo_metadata::{Metadata, Package};

use crate::{Workspace, text_of};

/// The published packages with their folders, and the files that each must contain besides its
/// sources. A name that ends in `/` stands for all files that git tracks below it.
const PACKAGES: &[(&str, &str, &[&str])] = &[
    (
        "mla-kernels",
        "",
        &[
            "build.rs",
            "README.md",
            "cuda/",
            "src/",
            "docs/engine.md",
            "docs/kernels/",
        ],
    ),
    (
        "mla-runtime",
        "mla-runtime/",
        &["dispatch/", "models/", "src/"],
    ),
    ("mla-cpu", "mla-cpu/", &["src/"]),
    ("mla-conformance", "mla-conformance/", &["src/"]),
    (
        "mla-macros",
        "mla-macros/",
        &["expansions/", "keys.md", "src/"],
    ),
    ("mla-build", "mla-build/", &["src/", "toolkit.txt"]),
    ("mla-kernels-sm80", "prebuilt/sm80/", &["src/"]),
    (
        "mla-kernels-sm80-decode",
        "prebuilt/sm80-decode/",
        &["src/"],
    ),
    ("mla-kernels-sm90", "prebuilt/sm90/", &["src/"]),
    ("mla-kernels-sm100", "prebuilt/sm100/", &["src/"]),
    (
        "mla-flashinfer",
        "mla-flashinfer/",
        &["build.rs", "kernels/", "src/", "wheels.txt"],
    ),
    (
        "mla-flashmla",
        "mla-flashmla/",
        &["build.rs", "kernels/", "src/"],
    ),
    (
        "mla-cudnn",
        "mla-cudnn/",
        &["build.rs", "shim/", "src/", "wheels.txt"],
    ),
    ("mla-cli", "mla-cli/", &["build.rs", "src/", "sweeps/"]),
];

/// Paths that do not belong into the root package, although they are in its folder.
const FOREIGN: &[&str] = &[
    ".ci",
    ".cargo/",
    "examples/backend-crate/",
    "examples/cpu-backend/",
    "examples/engine/",
    "fuzz/",
    "lab/",
    "mla-",
    "prebuilt/",
    "xtask/",
];

/// Folders that a package's users do not need.
const FOR_DEVELOPERS: &[&str] = &["docs/log/", "tests/"];

pub(crate) fn run() -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    let known: Vec<_> = PACKAGES.iter().map(|(package, ..)| *package).collect();
    for package in published(&workspace.metadata()?) {
        ensure!(
            known.contains(&package.name.as_str()),
            "{} is published, and PACKAGES of xtask/src/package.rs does not say what it has to \
             hold",
            package.name
        );
    }
    for (package, folder, needed) in PACKAGES {
        let mut list = workspace.cargo();
        list.args(["package", "--list", "--allow-dirty", "--package", package]);
        let packed = lines(&mut list)?;
        for needed in needed
            .iter()
            .chain(&["Cargo.toml", "LICENSE-MIT", "LICENSE-APACHE"])
        {
            let mut tracked = std::process::Command::new("git");
            tracked
                .current_dir(&workspace.root)
                .args(["ls-files", "--"])
                .arg(format!("{folder}{needed}"));
            let tracked = lines(&mut tracked)?;
            ensure!(!tracked.is_empty(), "{folder}{needed} does not exist");
            for file in &tracked {
                let file = file.strip_prefix(folder).unwrap_or(file);
                ensure!(packed.contains(file), "the package {package} lacks {file}");
            }
        }
        let foreign = if folder.is_empty() { FOREIGN } else { &[] };
        let unneeded = || foreign.iter().chain(FOR_DEVELOPERS);
        let unneeded = |file: &&String| unneeded().any(|it| file.starts_with(it));
        let unneeded = packed.iter().find(unneeded);
        ensure!(
            unneeded.is_none(),
            "the package {package} holds {unneeded:?}, which its users do not need"
        );
        println!("{package}: {} files", packed.len());
    }
    Ok(())
}

/// Returns the packages of the workspace that may be published.
pub(crate) fn published(metadata: &Metadata) -> Vec<&Package> {
    let mut packages = metadata.workspace_packages();
    packages.retain(|package| package.publish.as_ref().is_none_or(|to| !to.is_empty()));
    packages
}

fn lines(command: &mut std::process::Command) -> anyhow::Result<HashSet<String>> {
    let text = text_of(command)?;
    Ok(text.lines().map(str::to_owned).collect())
}
