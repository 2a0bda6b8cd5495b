//! The code that the driver loaded for kernels, family by family.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::figures::counted;

/// A kernel, and what the driver loaded for it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Loaded {
    /// Its name in the machine code, as the C++ compiler mangled it. Drivers before CUDA 12.3 do
    /// not tell it.
    pub symbol: Option<String>,
    /// The compute capability that the machine code is for, whether nvcc made it or the driver.
    pub machine_code: String,
    /// The compute capability of the PTX that it was made of.
    pub ptx: String,
}

#[cfg(feature = "gpu")]
impl From<mla_kernels::device::LoadedKernel> for Loaded {
    fn from(kernel: mla_kernels::device::LoadedKernel) -> Self {
        Self {
            symbol: kernel.symbol,
            machine_code: kernel.machine_code.to_string(),
            ptx: kernel.ptx.to_string(),
        }
    }
}

/// The kernels of a family for which the same was loaded.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Family {
    /// `helpers` for those of the device, `others` for those of libraries, `unnamed` for those
    /// whose names the driver does not tell.
    pub family: String,
    pub machine_code: String,
    pub ptx: String,
    /// Their symbols.
    pub kernels: Vec<String>,
}

/// Kernels by their families and by what was loaded, each once; `families` are those that this
/// program has.
pub(crate) fn by_family<'a>(
    kernels: impl IntoIterator<Item = &'a Loaded>,
    families: &[&str],
) -> Vec<Family> {
    let mut found: BTreeMap<[&str; 3], Vec<&str>> = BTreeMap::new();
    for kernel in kernels {
        let symbol = kernel.symbol.as_deref();
        let family = symbol.map_or("unnamed", |symbol| family_of(symbol, families));
        let symbols = found.entry([family, &kernel.machine_code, &kernel.ptx]);
        let symbols = symbols.or_default();
        symbols.extend(symbol.filter(|symbol| !symbols.contains(symbol)));
    }
    found
        .into_iter()
        .map(|([family, machine_code, ptx], kernels)| Family {
            family: family.to_owned(),
            machine_code: machine_code.to_owned(),
            ptx: ptx.to_owned(),
            kernels: kernels.into_iter().map(str::to_owned).collect(),
        })
        .collect()
}

/// The family of a mangled name. The kernels of `sm90` lie in the namespace `mla::sm90`.
fn family_of<'a>(symbol: &str, families: &[&'a str]) -> &'a str {
    let Some((_, rest)) = symbol.split_once("3mla") else {
        return "others";
    };
    let is_own = |family: &&&str| rest.starts_with(&format!("{}{family}", family.len()));
    families.iter().find(is_own).copied().unwrap_or("helpers")
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            family,
            machine_code,
            ptx,
            kernels,
        } = self;
        let count = match kernels.len() {
            0 => "kernels".to_owned(),
            number => counted(number as u64, "kernel"),
        };
        write!(
            f,
            "{family}: {count} with code for {machine_code}, made of PTX for {ptx}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loaded(symbol: &str, machine_code: &str, ptx: &str) -> Loaded {
        Loaded {
            symbol: Some(symbol.to_owned()),
            machine_code: machine_code.to_owned(),
            ptx: ptx.to_owned(),
        }
    }

    #[test]
    fn kernels_are_told_apart_by_family_and_by_what_was_loaded() {
        let decode = "_ZN3mla4sm806decode13decode_kernelINS1_6ConfigEEEvNS1_6ParamsE";
        let prefill = "_ZN3mla4sm807prefill14prefill_kernelEv";
        let kernels = [
            loaded(decode, "9.0", "9.0"),
            loaded(prefill, "9.0", "8.0"),
            loaded(decode, "9.0", "9.0"),
            loaded("_ZN3mla4sm905topk6kernelEv", "9.0", "9.0"),
            loaded("_ZN3mla52_GLOBAL__N__copy_cu11copy_kernelEv", "9.0", "9.0"),
            loaded("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "9.0", "9.0"),
        ];
        let found = by_family(&kernels, &["sm80", "sm90"]);
        let lines: Vec<_> = found.iter().map(Family::to_string).collect();
        assert_eq!(
            lines,
            [
                "helpers: 1 kernel with code for 9.0, made of PTX for 9.0",
                "others: 1 kernel with code for 9.0, made of PTX for 9.0",
                "sm80: 1 kernel with code for 9.0, made of PTX for 8.0",
                "sm80: 1 kernel with code for 9.0, made of PTX for 9.0",
                "sm90: 1 kernel with code for 9.0, made of PTX for 9.0",
            ]
        );
        assert_eq!(found[2].kernels, [prefill]);
        // A driver that names no kernel tells what it loaded all the same.
        let unnamed = Loaded {
            symbol: None,
            ..kernels[0].clone()
        };
        let line = by_family([&unnamed, &unnamed], &["sm80"])[0].to_string();
        assert_eq!(
            line,
            "unnamed: kernels with code for 9.0, made of PTX for 9.0"
        );
        // A kernel of a family that the program does not have counts as a helper.
        assert_eq!(by_family(&kernels[..1], &[])[0].family, "helpers");
    }
}
