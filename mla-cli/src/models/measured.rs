//! Times of attention from docs/benchmarks, by the shapes of a rank.

use mla_runtime::model::{HeadDims, MlaDims, ModelConfig};
use serde::Serialize;

/// The time of one case on one GPU.
#[derive(Serialize)]
pub(super) struct Measured {
    /// The name of the case in lab/cases and in docs/benchmarks.
    pub(super) case: &'static str,
    /// The batch, in the form of `mla bench`.
    pub(super) batch: &'static str,
    /// The number of heads of the rank.
    pub(super) heads: u32,
    pub(super) kv_format: &'static str,
    pub(super) form: Form,
    pub(super) micros: f64,
    #[serde(flatten)]
    pub(super) session: &'static Session,
}

/// The form of attention that a case times, which a model has or does not have.
#[derive(Serialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "snake_case")]
pub(super) enum Form {
    /// Absorbed attention to all context.
    Decode,
    /// Expanded attention with R1's dimensions.
    Prefill,
    /// Absorbed attention to lists of 2048 slots.
    Sparse,
}

/// The run in which the cases were timed.
#[derive(Serialize)]
pub(super) struct Session {
    pub(super) gpu: &'static str,
    pub(super) date: &'static str,
    pub(super) commit: &'static str,
}

const DENSE: Session = Session {
    gpu: "H200",
    date: "2026-11-23",
    commit: "7461515",
};

const TWENTY_HEADS: Session = Session {
    gpu: "H200",
    date: "2026-11-29",
    commit: "a074889",
};

const LISTS: Session = Session {
    gpu: "H200",
    date: "2026-11-24",
    commit: "a2ead4f",
};

const fn dense(
    case: &'static str,
    batch: &'static str,
    heads: u32,
    form: Form,
    micros: f64,
) -> Measured {
    Measured {
        case,
        batch,
        heads,
        kv_format: "bf16",
        form,
        micros,
        session: if heads == 20 { &TWENTY_HEADS } else { &DENSE },
    }
}

const fn sparse(
    case: &'static str,
    batch: &'static str,
    heads: u32,
    kv_format: &'static str,
    micros: f64,
) -> Measured {
    Measured {
        case,
        batch,
        heads,
        kv_format,
        form: Form::Sparse,
        micros,
        session: &LISTS,
    }
}

pub(super) const MEASURED: &[Measured] = &[
    dense("d-b1-h16-8k", "1q1s8k", 16, Form::Decode, 13.5),
    dense("d-b1-h20-8k", "1q1s8k", 20, Form::Decode, 15.1),
    dense("d-b32-h20-4k", "32q1s4k", 20, Form::Decode, 52.7),
    dense("d-b128-h20-4k", "128q1s4k", 20, Form::Decode, 154.0),
    dense("d-b32-h16-4k", "32q1s4k", 16, Form::Decode, 51.6),
    dense("d-b128-h16-4k", "128q1s4k", 16, Form::Decode, 157.0),
    dense("d-b32-h32-32k", "32q1s32k", 32, Form::Decode, 296.0),
    dense("d-b64-h64-1k", "64q1s1k", 64, Form::Decode, 36.5),
    dense("d-b128-h64-4k", "128q1s4k", 64, Form::Decode, 160.0),
    dense("d-b1-h128-8k", "1q1s8k", 128, Form::Decode, 18.2),
    dense("d-b32-h128-4k", "32q1s4k", 128, Form::Decode, 70.2),
    dense("d-b128-h128-8k", "128q1s8k", 128, Form::Decode, 462.0),
    dense("p-h16-4x2k", "4q2k", 16, Form::Prefill, 134.0),
    dense("p-h16-1x16k", "1q16k", 16, Form::Prefill, 1722.0),
    dense("p-h128-1x2k", "1q2k", 128, Form::Prefill, 250.0),
    dense("p-h128-1x8k", "1q8k", 128, Form::Prefill, 3629.0),
    sparse("sd-b128-h8", "128q1s32k", 8, "fp8_ds_mla", 64.0),
    sparse("sd-b1-h16", "1q1s32k", 16, "fp8_ds_mla", 12.9),
    sparse("sd-b32-h16", "32q1s32k", 16, "fp8_ds_mla", 28.0),
    sparse("sd-b128-h16", "128q1s32k", 16, "fp8_ds_mla", 64.4),
    sparse("sd-b32-h64", "32q1s32k", 64, "fp8_ds_mla", 46.1),
    sparse("sd-b128-h64", "128q1s32k", 64, "fp8_ds_mla", 94.8),
    sparse("sd-b1-h128", "1q1s32k", 128, "fp8_ds_mla", 15.7),
    sparse("sd-b32-h128", "32q1s32k", 128, "fp8_ds_mla", 59.5),
    sparse("sd-b128-h128", "128q1s32k", 128, "fp8_ds_mla", 182.0),
    sparse("sb-b128-h16", "128q1s32k", 16, "bf16", 91.3),
    sparse("sb-b128-h128", "128q1s32k", 128, "bf16", 138.0),
    sparse("sp-h16-32k", "1q4ks32k", 16, "bf16", 1589.0),
    sparse("sp-h64-32k", "1q4ks32k", 64, "bf16", 2094.0),
    sparse("sp-h128-32k", "1q4ks32k", 128, "bf16", 4266.0),
];

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
        for it in MEASURED {
            let Session { gpu, date, commit } = it.session;
            let record = records
                .iter()
                .find(|it| it["commit"] == *commit && it["date"] == *date);
            let record = record.unwrap_or_else(|| panic!("no record of {commit}"));
            assert_eq!(record["card"], format!("NVIDIA {gpu}"));
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
        for it in MEASURED {
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
