//! Checks that the crates that an engine adds, and everything they depend on, need no newer Rust
//! than these crates declare.

use std::collections::{BTreeSet, HashMap};

use cargo_metadata::semver::Version;
use cargo_metadata::{CargoOpt, DependencyKind, Metadata, MetadataCommand, Package, PackageId};

/// The crates that an engine adds, with every feature.
const CRATES: [&str; 5] = [
    "mla-kernels",
    "mla-runtime",
    "mla-macros",
    "mla-build",
    "mla-cpu",
];

fn metadata(folder: &str) -> Metadata {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    MetadataCommand::new()
        .manifest_path(format!("{root}/{folder}/Cargo.toml"))
        .features(CargoOpt::AllFeatures)
        // Packages for other systems need not be downloaded.
        .other_options(
            ["--locked", "--filter-platform", "x86_64-unknown-linux-gnu"].map(String::from),
        )
        .exec()
        .unwrap()
}

/// Returns the crates themselves, and everything that they or their build scripts are compiled
/// with.
fn compiled<'m>(metadata: &'m Metadata, names: &[&str]) -> Vec<&'m Package> {
    let nodes = &metadata.resolve.as_ref().unwrap().nodes;
    let nodes: HashMap<_, _> = nodes.iter().map(|node| (&node.id, node)).collect();
    let members = metadata.workspace_packages();
    let crates = members
        .iter()
        .filter(|it| names.contains(&it.name.as_str()));
    let mut left: Vec<&PackageId> = crates.map(|it| &it.id).collect();
    assert_eq!(left.len(), names.len());
    let mut found = BTreeSet::new();
    while let Some(id) = left.pop() {
        if found.insert(id) {
            let used = nodes[id].deps.iter().filter(|dependency| {
                let mut kinds = dependency.dep_kinds.iter();
                kinds.any(|it| it.kind != DependencyKind::Development)
            });
            left.extend(used.map(|dependency| &dependency.pkg));
        }
    }
    found.into_iter().map(|id| &metadata[id]).collect()
}

/// Returns the packages that need a newer Rust than `declared`.
fn newer(packages: &[&Package], declared: &Version) -> Vec<String> {
    let asks = |it: &&Package| {
        let version = it
            .rust_version
            .as_ref()
            .filter(|version| *version > declared)?;
        Some(format!(
            "{} {} asks for Rust {version}",
            it.name, it.version
        ))
    };
    packages.iter().filter_map(asks).collect()
}

#[test]
fn candle_s_crate_needs_no_newer_rust_than_it_declares() {
    let metadata = metadata("mla-candle");
    let packages = compiled(&metadata, &["mla-candle"]);
    let own = packages.iter().find(|it| it.name == "mla-candle").unwrap();
    let declared = own.rust_version.as_ref().expect("it declares one");
    let newer = newer(&packages, declared);
    assert!(newer.is_empty(), "declared: {declared}; {newer:#?}");
    assert!(packages.iter().any(|it| it.name == "candle-kernels"));
}

#[test]
fn an_engine_needs_no_newer_rust_than_is_declared() {
    let metadata = metadata(".");
    let packages = compiled(&metadata, &CRATES);
    let declared = |name: &str| -> &Version {
        let package = packages.iter().find(|it| it.name == name).unwrap();
        let version = package.rust_version.as_ref();
        version.unwrap_or_else(|| panic!("{name} declares no rust-version"))
    };
    let lowest = CRATES.map(declared).into_iter().min().unwrap();
    // This is the oldest compiler of an engine that these crates support.
    assert!(
        CRATES
            .iter()
            .all(|name| *declared(name) <= Version::new(1, 90, 0))
    );
    let newer = newer(&packages, lowest);
    assert!(newer.is_empty(), "declared: {lowest}; {newer:#?}");
    for known in ["wait4", "cudarc", "bindgen", "gemm", "serde_json"] {
        assert!(packages.iter().any(|it| it.name == known), "{known}");
    }
}
