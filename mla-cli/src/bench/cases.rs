//! A file of cases with a protocol, in the form that all contenders of a benchmark read.

use std::path::Path;

use mla_runtime::batch::Request;
use mla_runtime::model::{DType, KvFormat, MAX_DIM, MlaDims};
use serde::Deserialize;

use super::dims::{DIMS, read_dims};
use super::lists::{ListKind, Lists};
use crate::args::input::read_text;
use crate::args::{MAX_LIST_WIDTH, find_named};
use crate::batch::{BatchSpec, MAX_LEN, MAX_REQUESTS};
use crate::error::CliError;

/// The whole file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// A text for people.
    #[serde(rename = "protocol")]
    _protocol: String,
    #[serde(default)]
    decode: Vec<Decode>,
    #[serde(default)]
    prefill: Vec<Prefill>,
    #[serde(default)]
    sparse: Vec<Sparse>,
    #[serde(default)]
    layer: Vec<Layer>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Decode {
    id: String,
    /// The number of requests, which have `kv` tokens each.
    b: Option<u32>,
    kv: Option<u32>,
    /// The tokens of each request, in place of `b` and `kv`.
    lens: Option<Vec<u32>>,
    h: u32,
    s_q: u32,
    /// The dtype, bf16 if absent.
    dtype: Option<String>,
    /// The dimensions as `mla bench --dims` reads them, R1's if absent.
    dims: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Prefill {
    id: String,
    h: u32,
    /// The dtype, bf16 if absent.
    dtype: Option<String>,
    /// The dimensions, as in a decode.
    dims: Option<String>,
    q: Vec<u32>,
    /// One length for each entry of `q`. Absent if the lengths equal `q`.
    kv: Option<Vec<u32>>,
    causal: bool,
}

/// Attention to listed slots.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sparse {
    id: String,
    h: u32,
    /// The number of requests, and the query and kv tokens of each.
    b: u32,
    s_q: u32,
    kv: u32,
    /// The format of the cache. Its pages have 64 tokens.
    cache: String,
    topk: u32,
    /// The number of valid entries, `topk` if absent.
    valid: Option<u32>,
    /// The kind of the lists, random if absent.
    #[serde(default)]
    lists: ListKind,
    /// The dimensions, as in a decode.
    dims: Option<String>,
}

/// A step of the whole layer.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Layer {
    id: String,
    h: u32,
    /// The requests, in the form of `mla spec`.
    batch: String,
}

/// One attention or one step of a layer to time.
#[derive(Clone, PartialEq, Debug)]
pub struct Case {
    pub id: String,
    pub heads: u32,
    pub dtype: DType,
    pub dims: MlaDims,
    pub requests: Vec<Request>,
    pub kind: CaseKind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CaseKind {
    Decode,
    Sparse { kv_format: KvFormat, lists: Lists },
    Prefill { causal: bool },
    Layer,
}

/// Returns a value of a closed set by its name, or refuses the field.
fn named<T: Copy>(
    field: &str,
    given: &str,
    all: &[T],
    name: fn(T) -> &'static str,
) -> Result<T, String> {
    find_named(given, all, name)
        .map_err(|names| format!("{field}: given {given:?}, accepted {names}"))
}

/// Refuses a number outside a range.
fn check(field: &str, given: u32, max: u32) -> Result<(), String> {
    match (1..=max).contains(&given) {
        true => Ok(()),
        false => Err(format!("{field}: given {given}, accepted 1 to {max}")),
    }
}

/// Description of an accepted file of cases.
const FILE: &str = "a file of cases, as in lab/cases of the repository";

/// Reads the cases of a file. If `only` is not empty, their ids must begin with one of its entries.
pub fn read(path: &Path, only: &[String]) -> Result<Vec<Case>, CliError> {
    let refused = |message| CliError::file("--cases", path, message);
    let text = read_text(path, FILE).map_err(refused)?;
    select(parse(&text).map_err(refused)?, only)
}

/// Selects cases. If `only` is not empty, their ids must begin with one of its entries.
pub fn select(cases: Vec<Case>, only: &[String]) -> Result<Vec<Case>, CliError> {
    for prefix in only {
        if !cases.iter().any(|case| case.id.starts_with(prefix)) {
            let ids: Vec<_> = cases.iter().map(|case| case.id.as_str()).collect();
            return Err(CliError::Argument {
                argument: "--only",
                given: prefix.clone(),
                accepted: format!("how an id of the file begins: {}", ids.join(", ")),
            });
        }
    }
    let wanted =
        |case: &Case| only.is_empty() || only.iter().any(|prefix| case.id.starts_with(prefix));
    Ok(cases.into_iter().filter(wanted).collect())
}

/// Parses the cases of a text, in the order of decodes, prefills and sparse decodes.
pub fn parse(text: &str) -> Result<Vec<Case>, String> {
    let file: File = serde_json::from_str(text)
        .map_err(|error| format!("given what is no such file ({error}), accepted {FILE}"))?;
    let mut cases: Vec<Case> = Vec::new();
    macro_rules! read {
        ($($list:ident)*) => {
            $(for case in file.$list {
                let id = case.id.clone();
                cases.push(case.read().map_err(|problem| format!("{id}: {problem}"))?);
            })*
        };
    }
    read!(decode prefill sparse layer);
    for (index, case) in cases.iter().enumerate() {
        if cases[..index].iter().any(|other| other.id == case.id) {
            return Err(format!("id: given {} twice, accepted: once", case.id));
        }
    }
    Ok(cases)
}

impl Decode {
    fn read(self) -> Result<Case, String> {
        let lens = match (self.lens, self.b, self.kv) {
            (Some(lens), None, None) => lens,
            (None, Some(0), Some(_)) => Vec::new(),
            (None, Some(b), Some(kv)) => {
                check("b", b, MAX_REQUESTS as u32)?;
                vec![kv; b as usize]
            }
            _ => return Err("accepted: either lens, or b and kv".to_owned()),
        };
        let request = |kv| Request::new(self.s_q, kv);
        let requests = lens.into_iter().map(request).collect();
        let widths = (self.dtype.as_deref(), self.dims.as_deref());
        Case::new(self.id, self.h, widths, requests, CaseKind::Decode)
    }
}

impl Sparse {
    fn read(self) -> Result<Case, String> {
        check("b", self.b, MAX_REQUESTS as u32)?;
        let kv_format = named("cache", &self.cache, KvFormat::ALL, KvFormat::name)?;
        check("topk", self.topk, MAX_LIST_WIDTH)?;
        let valid = self.valid.unwrap_or(self.topk);
        if !(1..=self.topk).contains(&valid) {
            return Err(format!("valid: given {valid}, accepted 1 to topk"));
        }
        let requests = vec![Request::new(self.s_q, self.kv); self.b as usize];
        let lists = Lists {
            kind: self.lists,
            topk: self.topk,
            valid,
        };
        let kind = CaseKind::Sparse { kv_format, lists };
        let widths = (None, self.dims.as_deref());
        Case::new(self.id, self.h, widths, requests, kind)
    }
}

impl Prefill {
    fn read(self) -> Result<Case, String> {
        let kv = self.kv.unwrap_or_else(|| self.q.clone());
        if kv.len() != self.q.len() {
            return Err(format!(
                "kv: given {} lengths, accepted {}, as many as q",
                kv.len(),
                self.q.len()
            ));
        }
        let requests = self.q.iter().zip(kv).map(|(&q, kv)| Request::new(q, kv));
        let widths = (self.dtype.as_deref(), self.dims.as_deref());
        let kind = CaseKind::Prefill {
            causal: self.causal,
        };
        Case::new(self.id, self.h, widths, requests.collect(), kind)
    }
}

impl Layer {
    fn read(self) -> Result<Case, String> {
        let spec: BatchSpec = self.batch.parse().map_err(|error| format!("{error}"))?;
        let requests = spec.requests().to_vec();
        Case::new(self.id, self.h, (None, None), requests, CaseKind::Layer)
    }
}

impl Case {
    /// Makes a case with a dtype and dimensions by name, those of R1 in bf16 without names.
    fn new(
        id: String,
        heads: u32,
        (dtype, dims): (Option<&str>, Option<&str>),
        requests: Vec<Request>,
        kind: CaseKind,
    ) -> Result<Self, String> {
        check("h", heads, MAX_DIM)?;
        if requests.len() > MAX_REQUESTS {
            return Err(format!(
                "given {} requests, accepted: at most {MAX_REQUESTS}",
                requests.len()
            ));
        }
        if requests.is_empty() {
            return Err("given no request, accepted: at least one".to_owned());
        }
        for Request { q, kv, .. } in &requests {
            if !(1..=*kv).contains(q) || *kv > MAX_LEN {
                return Err(format!(
                    "given a query of {q} and kv of {kv} tokens, accepted: 1 ≤ query ≤ kv ≤ \
                     {MAX_LEN}, since kv includes the query tokens"
                ));
            }
        }
        Ok(Self {
            id,
            heads,
            dtype: dtype.map_or(Ok(DType::BF16), |name| {
                named("dtype", name, DType::ALL, DType::name)
            })?,
            dims: dims.map_or(Ok(MlaDims::R1), |text| {
                read_dims(text).ok_or_else(|| format!("dims: given {text:?}, accepted {DIMS}"))
            })?,
            requests,
            kind,
        })
    }
}

#[cfg(test)]
mod tests {
    use mla_runtime::model::HeadDims;

    use super::*;

    #[test]
    fn files_are_read_strictly() {
        let cases = parse(
            r#"{"protocol": "as agreed",
                "decode": [{"id": "d", "b": 2, "h": 16, "s_q": 1, "kv": 70},
                           {"id": "l", "h": 8, "s_q": 4, "lens": [9, 4]}],
                "prefill": [{"id": "p", "h": 2, "q": [3, 4], "kv": [3, 9], "causal": false,
                             "dtype": "f32", "dims": "512x256x0x256"}],
                "layer": [{"id": "s", "h": 2, "batch": "2q1s5_q3"}]}"#,
        )
        .unwrap();
        let lens = |case: &Case| -> Vec<_> { case.requests.iter().map(|r| (r.q, r.kv)).collect() };
        assert_eq!(lens(&cases[0]), [(1, 70), (1, 70)]);
        assert_eq!(lens(&cases[1]), [(4, 9), (4, 4)]);
        assert_eq!(lens(&cases[2]), [(3, 3), (4, 9)]);
        assert_eq!(cases[2].kind, CaseKind::Prefill { causal: false });
        assert_eq!((cases[0].dtype, cases[2].dtype), (DType::BF16, DType::F32));
        let unrotated = MlaDims::new(512, HeadDims::new(256, 0, 256));
        assert_eq!((cases[0].dims, cases[2].dims), (MlaDims::R1, unrotated));
        assert_eq!(lens(&cases[3]), [(1, 5), (1, 5), (3, 3)]);
        assert_eq!(cases[3].kind, CaseKind::Layer);

        let sparse = |case: &str| parse(&format!(r#"{{"protocol": "", "sparse": [{case}]}}"#));
        let case =
            r#"{"id": "s", "b": 2, "h": 16, "s_q": 1, "kv": 70, "cache": "fp8_ds_mla", "topk": 8"#;
        let read = sparse(&format!("{case}, \"valid\": 5}}")).unwrap();
        let lists = Lists {
            kind: ListKind::Random,
            topk: 8,
            valid: 5,
        };
        let kv_format = KvFormat::Fp8DsMla;
        assert_eq!(read[0].kind, CaseKind::Sparse { kv_format, lists });
        assert_eq!(read[0].requests.len(), 2);
    }
}
