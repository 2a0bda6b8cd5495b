//! Times of attention from docs/benchmarks, by the shapes of a rank.

use mla_runtime::model::{HeadDims, MlaDims, ModelConfig};
use serde::{Deserialize, Serialize};

/// The time of one case on one GPU, in the run of a commit.
#[derive(Serialize, Deserialize)]
pub(super) struct Measured {
    /// The name of the case in lab/cases and in docs/benchmarks.
    pub(super) case: String,
    /// The batch, in the form of `mla bench`.
    pub(super) batch: String,
    /// The number of heads of the rank.
    pub(super) heads: u32,
    pub(super) kv_format: String,
    pub(super) form: Form,
    pub(super) micros: f64,
    pub(super) gpu: String,
    pub(super) date: String,
    pub(super) commit: String,
}

/// The form of attention that a case times, which a model has or does not have.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "snake_case")]
pub(super) enum Form {
    /// Absorbed attention to all context.
    Decode,
    /// Expanded attention with R1's dimensions.
    Prefill,
    /// Absorbed attention to lists of 2048 slots.
    Sparse,
}

/// Returns the times on file.
pub(super) fn measured() -> Vec<Measured> {
    // A test reads the file.
    serde_json::from_str(include_str!("measured.json")).expect("the file is right")
}

impl Measured {
    /// Returns the number of ranks over which a model's heads have to be divided to have this
    /// shape, if that is possible.
    pub(super) fn ranks(&self, model: &ModelConfig) -> Option<u32> {
        let MlaDims { latent, head, .. } = model.dims;
        let same_row = (latent, head.rope) == (512, 64);
        let slots = model.index_topk;
        let has_form = match self.form {
            Form::Decode => slots.is_none() && same_row,
            Form::Prefill => slots.is_none() && same_row && head == HeadDims::R1,
            Form::Sparse => slots == Some(2048) && same_row && !model.sinks,
        };
        let divides = model.heads.is_multiple_of(self.heads);
        (has_form && divides).then(|| model.heads / self.heads)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::Value;

    use super::*;
    use crate::batch::BatchSpec;

    fn text(path: &str) -> String {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"))
    }

    fn cases() -> Vec<Value> {
        let files = ["hopper", "sparse"].map(|name| text(&format!("lab/cases/{name}.json")));
        let lists = files.iter().flat_map(|text| {
            let all: Value = serde_json::from_str(text).unwrap();
            ["decode", "prefill", "sparse"].map(|key| all[key].as_array().cloned())
        });
        lists.flatten().flatten().collect()
    }

    #[test]
    fn times_are_those_of_the_benchmarks() {
        let records = ["hopper", "heads-20", "sparse"].map(|name| -> Value {
            serde_json::from_str(&text(&format!("docs/benchmarks/{name}-h200.json"))).unwrap()
        });
        for it in measured() {
            let mut records = records.iter();
            let record = records.find(|of| of["commit"] == it.commit && of["date"] == it.date);
            let record = record.unwrap_or_else(|| panic!("no record of {}", it.commit));
            assert_eq!(record["card"], format!("NVIDIA {}", it.gpu));
            let [columns, rows] = ["columns", "rows"].map(|list| record[list].as_array().unwrap());
            let row = rows.iter().find(|row| row[0] == it.case);
            let row = row.unwrap_or_else(|| panic!("the record has no {}", it.case));
            let ours = columns.iter().position(|name| name == "ours").unwrap();
            let ours = row[ours].as_str().unwrap().split(' ').next().unwrap();
            assert_eq!(ours.parse(), Ok(it.micros), "{row}");
        }
    }

    #[test]
    fn shapes_are_those_of_the_cases() {
        let cases = cases();
        for it in measured() {
            let case = cases.iter().find(|case| case["id"] == it.case);
            let case = case.unwrap_or_else(|| panic!("no case {}", it.case));
            assert_eq!(case["h"], it.heads, "{}", it.case);
            if it.form == Form::Sparse {
                assert_eq!(case["cache"], it.kv_format, "{}", it.case);
                assert_eq!(case["topk"], 2048, "{}", it.case);
            }
            let batch: BatchSpec = it.batch.parse().unwrap();
            let requests: Vec<_> = batch.requests().iter().map(|it| (it.q, it.kv)).collect();
            let number = |value: &Value| value.as_u64().unwrap() as u32;
            let expected: Vec<_> = match case["q"].as_array() {
                Some(lens) => lens.iter().map(|q| (number(q), number(q))).collect(),
                None => {
                    let request = (number(&case["s_q"]), number(&case["kv"]));
                    vec![request; number(&case["b"]) as usize]
                }
            };
            assert_eq!(requests, expected, "{}", it.case);
        }
    }
}
