//! The descriptions of this build's kernels.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::LazyLock;

use mla_build::code::describe;
use mla_build::report::Report;
use serde_json::Value;

use super::launcher::number;

/// A kernel's source and its description.
pub(crate) struct Described {
    pub(crate) source: String,
    pub(crate) kernel: Value,
}

/// All kernels by their mangled names.
pub(crate) static ALL: LazyLock<BTreeMap<String, Described>> = LazyLock::new(|| {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let report = Report::load(&Path::new(env!("OUT_DIR")).join("mla.report.json")).unwrap();
    let files = ["cuda/launches.json", "cuda/include/mla.rs"].map(Path::new);
    let all = report.units.iter().flat_map(|unit| {
        let entries = unit.kernels.iter().map(|kernel| kernel.symbol.as_str());
        let entries: BTreeSet<_> = entries.collect();
        entries
            .into_iter()
            .map(|entry| [unit.source.as_str(), "sm_90", entry])
    });
    let all: Vec<_> = all.collect();
    let kernels = describe(root, files, &all).unwrap().into_iter().zip(all);
    let described = kernels.map(|(kernel, [source, _, entry])| {
        let described = Described {
            source: source.to_owned(),
            kernel: serde_json::to_value(kernel).unwrap(),
        };
        (entry.to_owned(), described)
    });
    described.collect()
});

/// Returns the sizes of a kernel's parameters; there are none if it is not described.
pub(crate) fn parameters(entry: &str) -> Vec<usize> {
    let kernel = &ALL[entry].kernel;
    let parameters = kernel["parameters"].as_array().unwrap().iter();
    parameters.map(|it| number(&it["bytes"])).collect()
}
