//! The result of a benchmark in the form of its JSON: rows, each for one contender on one case, and
//! further findings.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::ceilings::Ceilings;
use super::environment::Environment;
use crate::device::statistics::Summary;
use crate::device::stopwatch::{Conditions, Loaded, Protocol};
use crate::run::cost::Cost;
use crate::run::deviation::Errors;
use crate::table::number;

/// The version of the JSON, raised when a field changes its meaning.
pub(crate) const SCHEMA: u32 = 1;

/// The whole result.
#[derive(Serialize, Deserialize)]
pub struct Report {
    pub schema: u32,
    pub device: String,
    pub environment: Environment,
    /// All settings that were given, by arguments or file.
    pub settings: serde_json::Value,
    pub protocol: Protocol,
    pub ceilings: Option<Ceilings>,
    pub rows: Vec<Row>,
    /// The number of rows that were not measured because the run was interrupted.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub missing: usize,
    #[serde(default)]
    pub crossovers: Vec<Crossover>,
}

// serde calls the function with a reference.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

impl Report {
    pub fn pass(&self) -> bool {
        self.rows.iter().all(|row| row.errors.pass)
    }

    /// Returns the code that was loaded for the kernels of all rows.
    pub fn loaded(&self) -> impl Iterator<Item = &Loaded> {
        self.rows.iter().flat_map(|row| &row.loaded)
    }
}

/// One contender on one case.
#[derive(Clone, Serialize, Deserialize)]
pub struct Row {
    /// The description of the case. Rows of the same case compete with each other.
    pub id: String,
    /// `decode`, `sparse` or `prefill` for attention alone, or `layer`.
    pub kind: String,
    /// The name of the contender.
    #[serde(rename = "impl")]
    pub contender: String,
    /// The batch in words.
    pub batch: String,
    pub parameters: BTreeMap<String, String>,
    pub requests: usize,
    pub tokens: usize,
    pub max_query_len: u32,
    pub max_kv_len: u32,
    /// The median, in microseconds and per layer, with everything that a step has to enqueue.
    pub e2e_us: f64,
    /// The median if the schedule exists already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub planned_us: Option<f64>,
    /// The statistics of `e2e_us`.
    pub us: Summary,
    pub tokens_per_second: f64,
    pub tflops: f64,
    pub gbps: f64,
    /// The time at the ceilings, relative to the median. Absent without ceilings.
    pub of_limit: Option<f64>,
    pub peak_bytes: Option<u64>,
    pub errors: Errors,
    pub conditions: Conditions,
    /// The code that the driver loaded for the kernels, if they were replayed as a graph.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub loaded: Vec<Loaded>,
    pub cost: Cost,
    pub samples_us: Vec<f64>,
}

/// One pair of curves, whose requests differ only in their query length.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Crossover {
    /// The description of everything that the rows have in common.
    pub series: String,
    /// Query length, microseconds absorbed, microseconds expanded.
    pub points: Vec<(u32, f64, f64)>,
    /// The query length at which the drawn curves cross.
    pub measured: Option<f64>,
    /// The query length that the model of the machine predicts. Absent if absorbing always wins, or
    /// if the machine is not known.
    pub predicted: Option<f64>,
    /// The basis of `predicted`.
    #[serde(default)]
    pub basis: Basis,
    /// The query length at which both paths take the same number of multiply-adds.
    pub predicted_by_arithmetic: Option<f64>,
}

/// The basis of a prediction.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// The machine's known ceilings.
    #[default]
    Figures,
    /// A run of both forms on this machine, of `seconds` seconds.
    Run { seconds: f64 },
    /// Nothing, so there is no prediction.
    Nothing,
}

impl fmt::Display for Crossover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "crossover of {}: ", self.series)?;
        match (self.measured, self.points.first(), self.points.last()) {
            (Some(q), ..) => write!(f, "{} query tokens measured", number(q))?,
            (None, Some((first, a, e)), Some((last, ..))) => write!(
                f,
                "none between {first} and {last} query tokens, {} is faster",
                if a <= e { "absorbing" } else { "expanding" }
            )?,
            _ => f.write_str("nothing measured")?,
        }
        let predicted = |length: Option<f64>| length.map_or("never".to_owned(), number);
        match self.basis {
            Basis::Nothing => f.write_str("; no prediction for this machine")?,
            _ => write!(f, "; predicted {}", predicted(self.predicted))?,
        }
        if let Basis::Run { seconds } = self.basis {
            write!(f, " from a run of {seconds:.1} s on this machine")?;
        }
        let by_arithmetic = predicted(self.predicted_by_arithmetic);
        write!(f, ", by multiply-adds alone {by_arithmetic}")
    }
}
