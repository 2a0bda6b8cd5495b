//! A machine's maximum throughput, as stated for known GPUs or as measured by `cargo lab ceilings`.

use std::fmt;
use std::path::Path;

use mla_runtime::model::DType;
use serde::{Deserialize, Serialize};

use crate::args::input::read_json;
use crate::error::CliError;
use crate::run::cost::Cost;
use crate::table::number;

/// The maximum arithmetic and traffic of a machine, and the source of the figures.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the limits of a machine")]
pub struct Ceilings {
    pub device: String,
    /// The dtype of the GEMMs.
    pub dtype: String,
    pub flop_per_second: f64,
    pub bytes_per_second: f64,
    pub source: String,
}

/// Known GPUs: a part of the name, FLOP/s of GEMMs in bf16 and f16, bytes/s of streaming reads, and
/// the source.
const STATED: [(&str, f64, f64, &str); 1] = [(
    "H200",
    794e12,
    4.26e12,
    "as cargo lab ceilings measured them on another one",
)];

impl Ceilings {
    /// Returns the ceilings in a file, or those stated for a device.
    pub fn find(file: Option<&Path>, device: &str) -> Result<Option<Self>, CliError> {
        let Some(path) = file else {
            let known = STATED.iter().find(|(name, ..)| device.contains(name));
            return Ok(known.map(|(_, flop, bytes, source)| Self {
                device: device.to_owned(),
                dtype: DType::BF16.to_string(),
                flop_per_second: *flop,
                bytes_per_second: *bytes,
                source: (*source).to_owned(),
            }));
        };
        let refused = |message| CliError::file("--ceilings", path, message);
        let accepted = "what `cargo lab ceilings --json` writes";
        let ceilings: Self = read_json(path, accepted).map_err(refused)?;
        for (field, given) in [
            ("flop_per_second", ceilings.flop_per_second),
            ("bytes_per_second", ceilings.bytes_per_second),
        ] {
            if !(given.is_finite() && given > 0.0) {
                return Err(refused(format!(
                    "{field}: given {given}, accepted a number above 0"
                )));
            }
        }
        if ceilings.device != device {
            return Err(refused(format!(
                "device: given {:?}, accepted {device:?}",
                ceilings.device
            )));
        }
        Ok(Some(ceilings))
    }

    /// True if GEMMs in this dtype are equally fast. All 16-bit dtypes have the same ceiling.
    pub fn hold_for(&self, dtype: DType) -> bool {
        let wide = |name: &str| name == DType::F32.name();
        wide(&self.dtype) == wide(dtype.name())
    }

    /// Returns the minimum of seconds for a cost: that of arithmetic or of traffic, whichever is
    /// slower.
    pub fn seconds(&self, cost: Cost) -> f64 {
        (cost.flop / self.flop_per_second).max(cost.bytes / self.bytes_per_second)
    }
}

impl fmt::Display for Ceilings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "limits: {} TFLOP/s in {}, {} GB/s ({})",
            number(self.flop_per_second / 1e12),
            self.dtype,
            number(self.bytes_per_second / 1e9),
            self.source
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stated_ceilings_are_found_by_name() {
        let known = Ceilings::find(None, "GPU 0: NVIDIA H200, sm 9.0")
            .unwrap()
            .unwrap();
        // Kernels for this GPU are designed for this balance, about 190 FLOP per byte.
        assert!((known.flop_per_second / known.bytes_per_second - 190.0).abs() < 5.0);
        assert!(known.hold_for(DType::F16) && !known.hold_for(DType::F32));
        let cost = Cost {
            flop: 794e12,
            bytes: 4.26e12 * 2.0,
        };
        assert_eq!(known.seconds(cost), 2.0);
        assert_eq!(Ceilings::find(None, "cpu (2 threads)").unwrap(), None);
    }
}
