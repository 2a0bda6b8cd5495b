//! A file of cases with a protocol, in the form that all contenders of a benchmark read.

use std::path::Path;

use mla_runtime::batch::Request;
use mla_runtime::model::{DType, KvFormat, MAX_DIM, MlaDims};
use serde::Deserialize;

use super::dims::{DIMS, read_dims};
use super::lists::{ListKind, Lists};
use crate::args::MAX_LIST_WIDTH;
use crate::args::input::read_text;
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
    let found = all.iter().copied().find(|value| name(*value) == given);
    found.ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|value| name(*value)).collect();
        format!("{field}: given {given:?}, accepted {}", names.join(", "))
    })
}

/// Returns a dtype by its name, or bf16 without a name.
fn dtype_of(name: Option<&str>) -> Result<DType, String> {
    name.map_or(Ok(DType::BF16), |name| {
        named("dtype", name, DType::ALL, DType::name)
    })
}

/// Returns the dimensions that a text says, R1's if there is none.
fn dims_of(text: Option<&str>) -> Result<MlaDims, String> {
    text.map_or(Ok(MlaDims::R1), |text| {
        read_dims(text).ok_or_else(|| format!("dims: given {text:?}, accepted {DIMS}"))
    })
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
        Case {
            id: self.id,
            heads: self.h,
            dtype: dtype_of(self.dtype.as_deref())?,
            dims: dims_of(self.dims.as_deref())?,
            requests: lens.into_iter().map(request).collect(),
            kind: CaseKind::Decode,
        }
        .checked()
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
        let request = Request::new(self.s_q, self.kv);
        Case {
            id: self.id,
            heads: self.h,
            dtype: DType::BF16,
            dims: dims_of(self.dims.as_deref())?,
            requests: vec![request; self.b as usize],
            kind: CaseKind::Sparse {
                kv_format,
                lists: Lists {
                    kind: self.lists,
                    topk: self.topk,
                    valid,
                },
            },
        }
        .checked()
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
        Case {
            id: self.id,
            heads: self.h,
            dtype: dtype_of(self.dtype.as_deref())?,
            dims: dims_of(self.dims.as_deref())?,
            requests: requests.collect(),
            kind: CaseKind::Prefill {
                causal: self.causal,
            },
        }
        .checked()
    }
}

impl Layer {
    fn read(self) -> Result<Case, String> {
        let spec: BatchSpec = self.batch.parse().map_err(|error| format!("{error}"))?;
        Case {
            id: self.id,
            heads: self.h,
            dtype: DType::BF16,
            dims: MlaDims::R1,
            requests: spec.requests().to_vec(),
            kind: CaseKind::Layer,
        }
        .checked()
    }
}

impl Case {
    fn checked(self) -> Result<Self, String> {
        check("h", self.heads, MAX_DIM)?;
        if self.requests.len() > MAX_REQUESTS {
            return Err(format!(
                "given {} requests, accepted: at most {MAX_REQUESTS}",
                self.requests.len()
            ));
        }
        if self.requests.is_empty() {
            return Err("given no request, accepted: at least one".to_owned());
        }
        for Request { q, kv, .. } in &self.requests {
            if !(1..=*kv).contains(q) || *kv > MAX_LEN {
                return Err(format!(
                    "given a query of {q} and kv of {kv} tokens, accepted: 1 ≤ query ≤ kv ≤ \
                     {MAX_LEN}, since kv includes the query tokens"
                ));
            }
        }
        Ok(self)
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
        let refusals = [
            (r#", "valid": 9}"#, "valid: given 9, accepted 1 to topk"),
            (r#", "lists": "odd"}"#, "unknown variant `odd`"),
        ];
        for (rest, message) in refusals {
            let error = sparse(&format!("{case}{rest}")).unwrap_err();
            assert!(error.contains(message), "{rest}: {error}");
        }
        let refusals = [
            ("fp8_ds_mla", "odd", r#"cache: given "odd", accepted "#),
            (
                "\"topk\": 8",
                "\"topk\": 4000000000",
                "topk: given 4000000000, accepted 1 to 1048576",
            ),
            ("\"topk\": 8", "\"topk\": 0", "topk: given 0, accepted 1 to"),
            (
                "\"b\": 2",
                "\"b\": 1048577",
                "b: given 1048577, accepted 1 to 1048576",
            ),
            (
                "\"h\": 16",
                "\"h\": 4000000000",
                "h: given 4000000000, accepted 1 to 65536",
            ),
        ];
        for (from, to, message) in refusals {
            let error = sparse(&format!("{}}}", case.replace(from, to))).unwrap_err();
            assert!(error.contains(message), "{to}: {error}");
        }

        let case = r#"{"id": "d", "b": 1, "h": 1, "s_q": 1, "kv": 3}"#;
        let twice = format!("{case}, {case}");
        for (from, to, message) in [
            ("3}", r#"3, "x": 1}"#, "unknown field `x`"),
            (r#""b": 1"#, r#""b": 0"#, "given no request"),
            (
                r#""b": 1"#,
                r#""b": 1048577"#,
                "b: given 1048577, accepted 1 to 1048576",
            ),
            (r#""s_q": 1"#, r#""s_q": 4"#, "kv includes the query tokens"),
            (r#""s_q": 1"#, r#""s_q": 0"#, "1 ≤ query ≤ kv"),
            (r#""h": 1"#, r#""h": 0"#, "h: given 0"),
            (
                "3}",
                r#"3, "dtype": "f8"}"#,
                "dtype: given \"f8\", accepted f32, f16, bf16",
            ),
            (
                "3}",
                r#"3, "dims": "512x0x64x128"}"#,
                "dims: given \"512x0x64x128\", accepted LxPxRxV",
            ),
            (
                r#""kv": 3"#,
                r#""lens": [3]"#,
                "accepted: either lens, or b and kv",
            ),
            (case, &twice, "given d twice"),
        ] {
            let case = case.replace(from, to);
            let error = parse(&format!(r#"{{"protocol": "", "decode": [{case}]}}"#)).unwrap_err();
            assert!(error.contains(message), "{case}: {error}");
        }
    }
}
