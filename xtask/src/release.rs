//! Makes the packages of a release that contain compiled kernels: one for each family, and a second
//! one for the decode kernels of `sm80`. Builds of mla-kernels from a registry then need neither
//! nvcc nor CUTLASS nor libclang.

#[path = "../../src/drivers.rs"]
mod drivers;

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, ensure};
use cargo_metadata::{DependencyKind, Metadata, Package};
use mla_build::{
    report::size,
    toolkit::{Pins, Version},
};
use serde_json::{Value, json};

use crate::{Workspace, package, succeed, text_of};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The families to compile, each in all combinations with the families before it.
    #[arg(long, value_delimiter = ',', default_values = FAMILIES)]
    families: Vec<String>,
    /// Compile with the CUDA toolkit in this folder instead of the pinned one, for drivers that are
    /// older than the pinned release.
    #[arg(long)]
    toolkit: Option<PathBuf>,
    /// Only check the sizes and the order of packages that were compiled before.
    #[arg(long)]
    check: bool,
}

/// The families, in order. Objects of sources in no family's folder differ between combinations of
/// families. They are in the package of a combination's last family.
const FAMILIES: [&str; 3] = ["sm80", "sm90", "sm100"];

/// The packages that contain only a part of a family's objects, and the prefix of these objects'
/// sources. The other objects of the family are in the package with its name.
const DIVIDED: &[(&str, &str, &str)] = &[("sm80", "sm80-decode", "cuda/sm80/decode/")];

/// The maximum size of a package. crates.io accepts 10 MiB, and kernels grow.
const MAX: u64 = 8 << 20;

/// The file in a family's package about the sources and compilers of its objects.
const PROVENANCE: &str = "PROVENANCE.json";

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
    let toolkit = arguments.toolkit.as_deref().map(Path::canonicalize);
    let toolkit = toolkit.transpose().context("toolkit: no such folder")?;
    if !arguments.check {
        let folder = workspace.target.join("release-objects");
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        for combination in combinations(&families) {
            compile(&workspace, &combination, &folder, toolkit.as_deref())?;
        }
        for (family, package) in packages(&families) {
            fill(&workspace, (family, package), &folder, toolkit.is_none())?;
        }
    }
    for (_, package) in packages(&families) {
        check_size(&workspace, package)?;
    }
    package::run()?;
    println!(
        "to publish, in this order: {}",
        order(&workspace.metadata()?)?.join(", ")
    );
    Ok(())
}

/// Returns the packages of some families, each paired with its family.
fn packages<'a>(families: &'a [&'a str]) -> impl Iterator<Item = (&'a str, &'a str)> {
    families.iter().flat_map(|family| {
        let divided = DIVIDED.iter().filter(move |(of, ..)| of == family);
        [(*family, *family)]
            .into_iter()
            .chain(divided.map(|(_, package, _)| (*family, *package)))
    })
}

/// True if the object of a source belongs in a package. No other family compiles the source, and
/// no other package of the family contains the object.
fn holds((family, package): (&str, &str), source: &str) -> bool {
    let of_other = |other: &&str| source.starts_with(&format!("cuda/{other}/"));
    if FAMILIES.iter().any(|it| *it != family && of_other(it)) {
        return false;
    }
    let mut divided = DIVIDED.iter();
    let own = divided.find(|(of, _, start)| *of == family && source.starts_with(start));
    own.map_or(family, |(_, own, _)| *own) == package
}

/// Returns every set of families that a build may turn on.
fn combinations<'a>(families: &[&'a str]) -> Vec<Vec<&'a str>> {
    let chosen = |bits: usize| {
        let one = |(place, family): (usize, &&'a str)| (bits >> place & 1 == 1).then_some(*family);
        families.iter().enumerate().filter_map(one).collect()
    };
    (1..1 << families.len()).map(chosen).collect()
}

/// Builds mla-kernels, which adds its objects to a folder named after the last family.
fn compile(
    workspace: &Workspace,
    combination: &[&str],
    folder: &Path,
    toolkit: Option<&Path>,
) -> anyhow::Result<()> {
    let last = combination.last().context("a combination is empty")?;
    println!("compiling for {}", combination.join(", "));
    let mut cargo = workspace.cargo();
    cargo
        .args(["build", "--quiet", "--package", "mla-kernels", "--features"])
        .arg(combination.join(","))
        .env("MLA_BUILD_EXPORT", folder.join(last));
    if let Some(toolkit) = toolkit {
        cargo.env("MLA_CUDA_HOME", toolkit).env_remove("NVCC");
    }
    succeed(&mut cargo)
}

/// Puts the objects of a family into its package, together with a notice of their contents.
fn fill(
    workspace: &Workspace,
    (family, name): (&str, &str),
    from: &Path,
    is_pinned: bool,
) -> anyhow::Result<()> {
    let from = from.join(family);
    let package = workspace.root.join("prebuilt").join(name);
    let to = package.join("objects");
    if to.exists() {
        fs::remove_dir_all(&to)?;
    }
    fs::create_dir_all(&to)?;
    let mut description = read(&from.join(DESCRIPTION))?;
    if is_pinned {
        pinned(&description)?;
    }
    let is_here = |object: &Value| {
        let source = object["source"].as_str().unwrap_or_default();
        holds((family, name), source)
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
    fs::write(package.join("NOTICE"), notice(name, &description)?)?;
    let provenance = provenance(&description, &revision(&workspace.root)?)?;
    println!(
        "{name}: {}",
        provenance["driver"].as_str().unwrap_or_default()
    );
    let text = serde_json::to_string_pretty(&provenance)?;
    fs::write(package.join(PROVENANCE), text)?;
    println!("{}: {} files", to.display(), files.len());
    Ok(())
}

/// The revision of a checkout, and the tracked files that were changed.
struct Revision {
    commit: String,
    changed: Vec<String>,
}

fn revision(root: &Path) -> anyhow::Result<Revision> {
    let git = |arguments: &[&str]| -> anyhow::Result<String> {
        let text = text_of(Command::new("git").current_dir(root).args(arguments))?;
        Ok(text.trim().to_owned())
    };
    let changed = git(&["diff", "--name-only", "HEAD"])?;
    Ok(Revision {
        commit: git(&["rev-parse", "HEAD"])?,
        changed: changed.lines().map(str::to_owned).collect(),
    })
}

/// Returns the origin of a family's objects: the revision with its changes, the compilers, the
/// minimum driver, and the hash of each file.
fn provenance(description: &Value, revision: &Revision) -> anyhow::Result<Value> {
    let objects = description["objects"].as_array().into_iter().flatten();
    let parts = objects
        .map(|object| &object["part"])
        .chain([&description["runtime"]]);
    let files: serde_json::Map<String, Value> = parts
        .filter_map(|part| Some((part["file"].as_str()?.to_owned(), part["hash"].clone())))
        .collect();
    Ok(json!({
        "commit": revision.commit,
        "clean": revision.changed.is_empty(),
        "changed": revision.changed,
        "sources": description["key"],
        "compilers": description["compilers"],
        "driver": driver(description)?,
        "blake3": files,
    }))
}

/// Returns a sentence about the driver that objects need, by the release of CUDA that compiled
/// them.
fn driver(description: &Value) -> anyhow::Result<String> {
    let compilers = description["compilers"].as_array().into_iter().flatten();
    let mut cuda = compilers.filter(|it| it[0] == "CUDA");
    let version = cuda
        .next()
        .and_then(|it| it[1].as_str())
        .context("CUDA has no version")?;
    let release = Version::from_start(version);
    let release = release.with_context(|| format!("no release of CUDA: {version}"))?;
    let Version { major, minor } = release;
    let ptx = drivers::first([major, minor]).with_context(|| {
        format!("CUDA {version}: DRIVERS of src/drivers.rs does not know its driver")
    })?;
    let first = drivers::first([major, 0]).unwrap_or(ptx);
    Ok(format!(
        "compiled by CUDA {version}: machine code needs driver {first} or later, PTX {ptx}"
    ))
}

fn read(path: &Path) -> anyhow::Result<Value> {
    let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("cannot understand {}", path.display()))
}

/// Checks that the pinned compilers made the objects of a release.
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

/// Describes the contents of the objects and their licences.
fn notice(package: &str, description: &Value) -> anyhow::Result<String> {
    let folder = Pins::current()
        .folder()
        .context("no folder of the toolkit")?;
    let mut text = format!(
        "mla-kernels-{package}: what its objects contain\n\n\
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

/// Packs a package of kernels as Cargo would, and checks its size.
fn check_size(workspace: &Workspace, package: &str) -> anyhow::Result<()> {
    let objects = workspace
        .root
        .join("prebuilt")
        .join(package)
        .join("objects");
    ensure!(
        objects.join(DESCRIPTION).is_file(),
        "{} is empty: `cargo xtask release` compiles what belongs there",
        objects.display()
    );
    let name = format!("mla-kernels-{package}");
    let mut cargo = workspace.cargo();
    cargo.args(["package", "--quiet", "--no-verify", "--allow-dirty"]);
    succeed(cargo.args(["--package", &name]))?;
    let packed: PathBuf = workspace.target.join("package");
    let version = env!("CARGO_PKG_VERSION");
    let packed = packed.join(format!("{name}-{version}.crate"));
    let bytes = fs::metadata(&packed)
        .with_context(|| format!("cannot read {}", packed.display()))?
        .len();
    println!("{name}: {} packed, at most {}", size(bytes), size(MAX));
    ensure!(
        bytes <= MAX,
        "{name} is too large: DIVIDED of xtask/src/release.rs divides a family among packages"
    );
    Ok(())
}

/// Returns the packages in an order in which each comes after the packages that it needs from the
/// registry.
fn order(metadata: &Metadata) -> anyhow::Result<Vec<String>> {
    let mut left = package::published(metadata);
    let mut order = Vec::new();
    while !left.is_empty() {
        let names: BTreeSet<String> = left.iter().map(|it| it.name.to_string()).collect();
        // Cargo leaves a development dependency without a version out of a package.
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

    #[test]
    fn every_object_of_a_family_is_in_one_of_its_packages() {
        let of = |source: &str| -> Vec<_> {
            let all = packages(&FAMILIES).filter(|package| holds(*package, source));
            all.map(|(_, package)| package).collect()
        };
        assert_eq!(
            of("cuda/sm80/decode/instantiations/f16.cu"),
            ["sm80-decode"]
        );
        assert_eq!(of("cuda/sm80/prefill/api.cu"), ["sm80"]);
        assert_eq!(of("cuda/sm90/decode/dense/api.cu"), ["sm90"]);
        // Each combination has its own object, in the package of its last family.
        assert_eq!(of("cuda/all/copy.cu"), ["sm80", "sm90", "sm100"]);
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../prebuilt");
        let folders = fs::read_dir(root).unwrap();
        let folders = folders.map(|it| it.unwrap().file_name().into_string().unwrap());
        let named: BTreeSet<_> = packages(&FAMILIES).map(|(_, it)| it.to_owned()).collect();
        assert_eq!(folders.collect::<BTreeSet<_>>(), named);
    }

    fn description(cuda: &str) -> Value {
        json!({
            "key": "abc",
            "compilers": [["CUTLASS", "4.2.0"], ["CUDA", cuda]],
            "runtime": { "file": "libcudart_static.a", "hash": "r" },
            "objects": [{ "part": { "file": "1.o", "hash": "o" } }],
        })
    }

    #[test]
    fn a_package_says_what_its_objects_are_made_of() {
        let revision = Revision {
            commit: "c0ffee".to_owned(),
            changed: vec!["cuda/all/lse.cu".to_owned()],
        };
        let made = provenance(&description("13.0.88"), &revision).unwrap();
        assert_eq!(made["commit"], "c0ffee");
        assert_eq!(made["clean"], false);
        assert_eq!(made["changed"][0], "cuda/all/lse.cu");
        assert_eq!(made["sources"], "abc");
        assert_eq!(made["compilers"][1][1], "13.0.88");
        assert_eq!(
            made["blake3"],
            json!({ "1.o": "o", "libcudart_static.a": "r" })
        );
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        assert_eq!(super::revision(root).unwrap().commit.len(), 40);
    }

    #[test]
    fn the_driver_is_that_of_the_release_that_compiled() {
        let of = |cuda| driver(&description(cuda));
        let start = "compiled by CUDA 13.0.88: machine code needs driver R580 or later, PTX R580";
        assert_eq!(of("13.0.88").unwrap(), start);
        assert!(of("12.9.41").unwrap().ends_with("R525 or later, PTX R575"));
        let unknown = of("14.7").unwrap_err().to_string();
        assert!(unknown.contains("does not know its driver"), "{unknown}");
    }
}
