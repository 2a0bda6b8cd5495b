//! Makes what a release has beside the sources: each family's kernels, compiled, in a package of
//! its own. Whoever builds mla-kernels from a registry then needs neither nvcc nor CUTLASS nor
//! libclang.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, ensure};
use cargo_metadata::{DependencyKind, Metadata, Package};
use mla_build::{report::size, toolkit::Pins};
use serde_json::Value;

use crate::{Workspace, package};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The families to compile, each in all combinations with those before it.
    #[arg(long, value_delimiter = ',', default_values = FAMILIES)]
    families: Vec<String>,
    /// Check sizes and the order alone, of what was compiled before.
    #[arg(long)]
    check: bool,
}

/// A family's package holds the sources of no family for the combinations in which it is the last
/// of these.
const FAMILIES: [&str; 3] = ["sm80", "sm90", "sm100"];

/// What crates.io takes.
const MOST: u64 = 10 << 20;

/// The description that mla-build writes beside objects.
const DESCRIPTION: &str = "mla.prebuilt.json";

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    for family in &arguments.families {
        ensure!(
            FAMILIES.contains(&family.as_str()),
            "families: given {family}, accepted {}",
            FAMILIES.join(", ")
        );
    }
    let families: Vec<_> = FAMILIES
        .into_iter()
        .filter(|family| arguments.families.iter().any(|given| given == family))
        .collect();
    if !arguments.check {
        let folder = workspace.target.join("release-objects");
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        for combination in combinations(&families) {
            compile(&workspace, &combination, &folder)?;
        }
        for family in &families {
            fill(&workspace, family, &folder)?;
        }
    }
    for family in &families {
        check_size(&workspace, family)?;
    }
    package::run(&package::Arguments {})?;
    println!(
        "to publish, in this order: {}",
        order(&workspace.metadata()?)?.join(", ")
    );
    Ok(())
}

/// Every set of families that a build may turn on.
fn combinations<'a>(families: &[&'a str]) -> Vec<Vec<&'a str>> {
    let chosen = |bits: usize| {
        let one = |(place, family): (usize, &&'a str)| (bits >> place & 1 == 1).then_some(*family);
        families.iter().enumerate().filter_map(one).collect()
    };
    (1..1 << families.len()).map(chosen).collect()
}

/// Builds mla-kernels, which adds its objects to a folder named after the last family.
fn compile(workspace: &Workspace, combination: &[&str], folder: &Path) -> anyhow::Result<()> {
    let last = combination.last().context("a combination is empty")?;
    println!("compiling for {}", combination.join(", "));
    let status = workspace
        .cargo()
        .args(["build", "--quiet", "--package", "mla-kernels", "--features"])
        .arg(combination.join(","))
        .env("MLA_BUILD_EXPORT", folder.join(last))
        .status()?;
    ensure!(
        status.success(),
        "the build failed; its message stands above"
    );
    Ok(())
}

/// Gives a family's package what is compiled for it, and the notice of what that contains.
fn fill(workspace: &Workspace, family: &str, from: &Path) -> anyhow::Result<()> {
    let from = from.join(family);
    let package = workspace.root.join("prebuilt").join(family);
    let to = package.join("objects");
    if to.exists() {
        fs::remove_dir_all(&to)?;
    }
    fs::create_dir_all(&to)?;
    let mut description = read(&from.join(DESCRIPTION))?;
    pinned(&description)?;
    // Another family's sources are in that family's package.
    let others: Vec<_> = FAMILIES
        .into_iter()
        .filter(|other| *other != family)
        .collect();
    let is_here = |object: &Value| {
        let source = object["source"].as_str().unwrap_or_default();
        !others
            .iter()
            .any(|other| source.starts_with(&format!("cuda/{other}/")))
    };
    let runtime = description["runtime"].clone();
    let objects = description["objects"].as_array_mut();
    let objects = objects.context("the description lists no objects")?;
    objects.retain(is_here);
    let mut files: BTreeSet<String> = BTreeSet::new();
    let parts = objects
        .iter()
        .map(|object| &object["part"])
        .chain([&runtime]);
    for part in parts {
        files.insert(
            part["file"]
                .as_str()
                .context("a part has no file")?
                .to_owned(),
        );
    }
    for file in &files {
        fs::copy(from.join(file), to.join(file)).with_context(|| format!("cannot copy {file}"))?;
    }
    let text = serde_json::to_string_pretty(&description)?;
    fs::write(to.join(DESCRIPTION), text)?;
    fs::write(package.join("NOTICE"), notice(family, &description)?)?;
    println!("{}: {} files", to.display(), files.len());
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<Value> {
    let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("cannot understand {}", path.display()))
}

/// Only the pinned compilers make objects of a release.
fn pinned(description: &Value) -> anyhow::Result<()> {
    let pins = &Pins::current().packages;
    for compiler in description["compilers"].as_array().into_iter().flatten() {
        let (part, version) = (
            compiler[0].as_str(),
            compiler[1].as_str().unwrap_or_default(),
        );
        let wheel = match part {
            Some("CUDA") => "nvidia-cuda-nvcc==",
            Some("CUTLASS") => "nvidia-cutlass==",
            _ => continue,
        };
        let pin = pins.iter().find_map(|pin| pin.strip_prefix(wheel));
        let pin = pin.with_context(|| format!("no pin of {wheel}"))?;
        ensure!(
            !version.is_empty() && pin.starts_with(version),
            "{wheel} given {version}, accepted {pin}: `cargo xtask toolkit` installs it"
        );
    }
    Ok(())
}

/// What the objects contain, and under which terms.
fn notice(family: &str, description: &Value) -> anyhow::Result<String> {
    let folder = Pins::current()
        .folder()
        .context("no folder of the toolkit")?;
    let mut text = format!(
        "mla-kernels-{family}: what its objects contain\n\n\
         1. mla-kernels, compiled. MIT or Apache-2.0: LICENSE-MIT, LICENSE-APACHE.\n\
         2. Inline functions of the headers of CUDA's runtime and compiler, of NVIDIA Corporation. \
            The CUDA Toolkit\n   \
            End User License Agreement (https://docs.nvidia.com/cuda/eula/) allows to distribute \
            them in an application.\n\
         3. libcudart_static.a, CUDA's runtime, unchanged: Attachment A of that agreement lists it \
            as redistributable\n   \
            in object code. It may be used with NVIDIA's GPUs, under the agreement's terms.\n\
         4. Templates of CUTLASS and CuTe, of NVIDIA Corporation. BSD-3-Clause, below.\n\n\
         Compiled with:\n"
    );
    for compiler in description["compilers"].as_array().into_iter().flatten() {
        let [part, version] = [0, 1].map(|at| compiler[at].as_str().unwrap_or_default());
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {part} {version}");
    }
    let licence = fs::read_dir(&folder)
        .with_context(|| format!("cannot read {}", folder.display()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.to_string_lossy().contains("nvidia_cutlass-"))
        .map(|path| path.join("licenses/LICENSE.txt"))
        .find(|path| path.is_file())
        .context("CUTLASS's licence is not in the toolkit")?;
    text += "\nThe licence of CUTLASS:\n\n";
    text += &fs::read_to_string(licence)?;
    Ok(text)
}

/// Packs a family's package as Cargo would, and holds its size to what crates.io takes.
fn check_size(workspace: &Workspace, family: &str) -> anyhow::Result<()> {
    let objects = workspace.root.join("prebuilt").join(family).join("objects");
    ensure!(
        objects.join(DESCRIPTION).is_file(),
        "{} is empty: `cargo xtask release --families {family}` compiles what belongs there",
        objects.display()
    );
    let name = format!("mla-kernels-{family}");
    let status = workspace
        .cargo()
        .args([
            "package",
            "--quiet",
            "--no-verify",
            "--allow-dirty",
            "--package",
            &name,
        ])
        .status()?;
    ensure!(
        status.success(),
        "cargo package failed; its message stands above"
    );
    let packed: PathBuf = workspace.target.join("package");
    let version = env!("CARGO_PKG_VERSION");
    let packed = packed.join(format!("{name}-{version}.crate"));
    let bytes = fs::metadata(&packed)
        .with_context(|| format!("cannot read {}", packed.display()))?
        .len();
    println!("{name}: {} packed, at most {}", size(bytes), size(MOST));
    ensure!(bytes <= MOST, "{name} is larger than crates.io takes");
    Ok(())
}

/// The packages in an order in which each comes after what it needs from the registry.
fn order(metadata: &Metadata) -> anyhow::Result<Vec<String>> {
    let mut left = package::published(metadata);
    let mut order = Vec::new();
    while !left.is_empty() {
        let names: BTreeSet<String> = left.iter().map(|it| it.name.to_string()).collect();
        // Cargo leaves a development dependency without a version out of what it packs.
        let waits = |package: &Package| {
            package.dependencies.iter().any(|it| {
                let is_packed = it.kind != DependencyKind::Development || it.req.to_string() != "*";
                is_packed && names.contains(&it.name) && it.name != package.name.as_str()
            })
        };
        let next = left.iter().position(|package| !waits(package));
        let next = next.with_context(|| format!("these need each other: {names:?}"))?;
        let package = left.remove(next);
        for dependency in &package.dependencies {
            ensure!(
                dependency.kind == DependencyKind::Development
                    || dependency.path.is_none()
                    || dependency.req.to_string() != "*",
                "{} needs {} without a version",
                package.name,
                dependency.name
            );
        }
        order.push(package.name.to_string());
    }
    Ok(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_is_in_the_package_of_its_last_family() {
        let all = combinations(&FAMILIES);
        assert_eq!(all.len(), 7);
        let of = |family| all.iter().filter(|it| it.last() == Some(&family)).count();
        assert_eq!([of("sm80"), of("sm90"), of("sm100")], [1, 2, 4]);
    }
}
