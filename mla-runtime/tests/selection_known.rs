//! Compares selections among the known backends with published tables, for every capability, dtype,
//! cache format, page size, dims and preference.
//!
//! The expectations below are in words, like the published tables, and this test reads them by
//! rules of its own. They share only the names with the specs that they check.

use mla_runtime::backend::Entry;
use mla_runtime::model::{DType, HeadDims, KvFormat, MlaDims};
use mla_runtime::select::known::KNOWN;
use mla_runtime::select::{Explanation, Registry, SelectionError, SelectionRequest};
use mla_runtime::spec::{
    Capability, Feature, FeatureSet, GraphSupport, LseOutput, Phase, Platform, Problem, QueryLen,
    Target,
};

// The columns are the name, capability, dims as (P,R,V), and the kernel's log-sum-exp. The order is
// the published one, but for 10.x.
const PREFILL: &str = "
    FLASH_ATTN | any | (128,64,128) (192,64,256) (64,64,128) (256,0,256) | ln
    FLASHINFER | any | (128,64,128) | ln
    TRTLLM_RAGGED | 10.x | (128,64,128) (192,64,256) | log2
    TOKENSPEED_MLA | 10.x | (128,64,128) | ln
    ROCM_AITER_FA | AMD | any | ln
    CUDNN | 8.x 9.0 10.x 12.x | (128,64,128) | ln
    CUSTOM | any | any | ln
";

// The columns are the name, capability, cache formats, page sizes, log-sum-exp, graphs, query
// lengths, and other limits: `row` if only cache rows of 512 + 64 are supported, `sparse` if lists
// of slots are required, `128` if at most 128 heads are supported, `bf16` if f16 is not supported.
const DECODE: &str = "
    FLASH_ATTN_MLA | 9.0 | f16 bf16 | x16 | ln | uniform_batch | ragged |
    FLASHMLA | 9.0 | f16 bf16 | 64 | ln | uniform_batch | uniform | row
    FLASHINFER_MLA | any | f16 bf16 | any | ln | uniform_batch | ragged | row
    TOKENSPEED_MLA | 10.x | fp8 | 32 64 | log2 | uniform_batch | uniform |
    CUTLASS_MLA | 10.x | f16 bf16 | 16 32 64 128 | ln | single_token | single | row 128
    TRITON_MLA | any | f16 bf16 fp8 | x16 | ln | uniform_batch | uniform |
    FLASHMLA_SPARSE | 9.0 10.x | bf16 fp8_ds_mla | 64 | ln |  |  | row sparse 128 bf16
    FLASHINFER_MLA_SPARSE | 10.x | bf16 fp8 | x32 | log2 |  |  | sparse
    FLASH_ATTN_MLA_SPARSE | 9.0 | f16 bf16 | any | none |  |  | row sparse
    FLASHINFER_MLA_SPARSE_SM90 | 9.0 | f16 bf16 | any | none |  |  | row sparse
";

const CAPABILITIES: &[&str] = &["8.0", "8.9", "9.0", "10.0", "10.3", "12.0"];

// The dimensions of R1, GLM-5 and MiniCPM3.
const DIMS: &[MlaDims] = &[
    MlaDims::R1,
    MlaDims::new(512, HeadDims::new(192, 64, 256)),
    MlaDims::new(256, HeadDims::new(64, 32, 64)),
];

// Splits a table into rows, and each row into its cells.
fn rows<const N: usize>(table: &'static str) -> impl Iterator<Item = [&'static str; N]> {
    let lines = table.lines().filter(|line| !line.is_empty());
    lines.map(|line| {
        let mut cells = line.split('|').map(str::trim);
        [(); N].map(|()| cells.next().unwrap())
    })
}

fn has(cell: &str, word: &str) -> bool {
    cell.split(' ').any(|part| part == word)
}

fn capability_fits(cell: &str, capability: &str) -> bool {
    let family = format!("{}.x", capability.split('.').next().unwrap());
    has(cell, "any") || has(cell, capability) || has(cell, &family)
}

fn page_fits(cell: &str, page: u32) -> bool {
    if cell == "any" {
        return true;
    }
    match cell.strip_prefix('x') {
        Some(unit) => page.is_multiple_of(unit.parse().unwrap()),
        None => has(cell, &page.to_string()),
    }
}

// The request of one case, in the words of the tables.
struct Case<'a> {
    capability: &'a str,
    dtype: DType,
    dims: MlaDims,
    heads: u32,
    kv: KvFormat,
    page: u32,
    sparse: bool,
}

impl Case<'_> {
    fn request(&self) -> SelectionRequest {
        let target = Target::dry_run(self.capability.parse().unwrap());
        let problem = Problem::new(self.dims, self.heads, self.dtype)
            .with_kv_format(self.kv)
            .with_page_size(self.page)
            .with_sparse(self.sparse);
        SelectionRequest::new(target, problem)
    }

    // The fields that speak against each backend, without those about missing implementations.
    // Backends are in the order in which they are tried.
    fn prefill(&self) -> Vec<(&'static str, Vec<&'static str>)> {
        let mut table: Vec<_> = rows::<4>(PREFILL).collect();
        if self.capability.starts_with("10.") {
            // TRTLLM_RAGGED comes before FLASHINFER.
            table.swap(1, 2);
        }
        table
            .into_iter()
            .map(|[name, capability, dims, _]| {
                let mut fields = Vec::new();
                if capability == "AMD" {
                    fields.push("platform");
                } else if !capability_fits(capability, self.capability) {
                    fields.push("capability");
                }
                if self.dtype == DType::F32 && name != "CUSTOM" {
                    fields.push("dtype");
                }
                if dims != "any" && !has(dims, &self.dims.head.to_string()) {
                    fields.push("dims");
                }
                (name, fields)
            })
            .collect()
    }

    fn decode(&self) -> Vec<(&'static str, Vec<&'static str>)> {
        rows::<8>(DECODE)
            .map(|[name, capability, kv, pages, _, _, _, notes]| {
                let mut fields = Vec::new();
                if !capability_fits(capability, self.capability) {
                    fields.push("capability");
                }
                if self.dtype == DType::F32 || (has(notes, "bf16") && self.dtype == DType::F16) {
                    fields.push("dtype");
                }
                if has(notes, "row") && (self.dims.latent, self.dims.head.rope) != (512, 64) {
                    fields.push("cache_dims");
                }
                if has(notes, "128") && self.heads > 128 {
                    fields.push("heads");
                }
                let quantised = matches!(self.kv, KvFormat::Fp8 | KvFormat::Fp8DsMla);
                if !has(kv, self.kv.name()) || !quantised && self.kv.name() != self.dtype.name() {
                    fields.push("kv_format");
                }
                if !page_fits(pages, self.page) {
                    fields.push("page_size");
                }
                if has(notes, "sparse") != self.sparse {
                    fields.push("sparse");
                }
                (name, fields)
            })
            .collect()
    }
}

// Calls `check` with every combination.
fn for_every_case(mut check: impl FnMut(&Case)) {
    let mut cases = 0;
    for capability in CAPABILITIES {
        for dtype in DType::ALL {
            for dims in DIMS {
                for kv in KvFormat::ALL {
                    for page in [1, 16, 32, 64, 128] {
                        for (heads, sparse) in [(16, false), (128, true), (192, false)] {
                            cases += 1;
                            check(&Case {
                                capability,
                                dtype: *dtype,
                                dims: *dims,
                                heads,
                                kv: *kv,
                                page,
                                sparse,
                            });
                        }
                    }
                }
            }
        }
    }
    assert_eq!(cases, 6 * 3 * 3 * 6 * 5 * 3);
}

// Puts the candidates that apply first. The fields in `missing` follow the other fields of each.
fn ordered(
    tried: Vec<(&'static str, Vec<&'static str>)>,
    missing: &'static [&'static str],
) -> Vec<(&'static str, Vec<&'static str>)> {
    let (apply, rest): (Vec<_>, Vec<_>) = tried.into_iter().partition(|(_, f)| f.is_empty());
    apply
        .into_iter()
        .chain(rest)
        .map(|(name, fields)| (name, [&fields[..], missing].concat()))
        .collect()
}

// Returns the candidates of the tables. The tables are about GPUs; mla-cpu tests the CPU's own
// backends.
fn found(explanation: &Explanation, phase: Phase) -> Vec<(&'static str, Vec<&'static str>)> {
    let candidates = explanation.candidates(phase).iter();
    candidates
        .filter(|candidate| candidate.spec.name != "CPU")
        .map(|candidate| {
            let fields = candidate.reasons.iter().map(|reason| reason.field());
            (candidate.spec.name, fields.collect())
        })
        .collect()
}

// The known backends as if each were built, so that a selection can choose one.
fn all_built() -> Registry {
    let mut registry = Registry::known();
    for entry in KNOWN {
        // CUSTOM is known for every kind of device, but it can be registered only once.
        let is_custom = entry.spec.name == "CUSTOM" && entry.spec.platform != Platform::Cuda;
        if !is_custom {
            let built = Entry::known(entry.spec, || Ok(()));
            registry.add(built).unwrap();
        }
    }
    registry
}

/// Without implementations every backend has the reasons of the tables, and that it is missing.
/// With all of them, the first one without a reason is selected.
#[test]
fn first_allowed_is_selected() {
    let (gaps, built) = (Registry::known(), all_built());
    let mut selected = std::collections::BTreeSet::new();
    for_every_case(|case| {
        let request = case.request();
        let [missing, explanation] = [&gaps, &built].map(|it| it.explain(&request).unwrap());
        for (phase, tried) in [
            (Phase::Prefill, case.prefill()),
            (Phase::Decode, case.decode()),
        ] {
            assert!(missing.selected(phase).is_none());
            assert_eq!(
                found(&missing, phase),
                ordered(tried.clone(), &["availability"]),
                "{request:?}"
            );
            let first = tried.iter().find(|(_, fields)| fields.is_empty());
            let chosen = explanation
                .selected(phase)
                .map(|candidate| candidate.spec.name);
            assert_eq!(chosen, first.map(|(name, _)| *name), "{request:?}");
            assert_eq!(
                found(&explanation, phase),
                ordered(tried, &[]),
                "{request:?}"
            );
            selected.extend(chosen.map(|name| (phase, name)));
        }
    });
    // The cases cover every backend that can be selected at all. Each of the others comes after a
    // backend that supports all that it supports.
    let names = |phase| {
        let of_phase = selected.iter().filter(move |(p, _)| *p == phase);
        of_phase.map(|(_, name)| *name).collect::<Vec<_>>()
    };
    assert_eq!(names(Phase::Prefill), ["CUSTOM", "FLASH_ATTN"]);
    assert_eq!(
        names(Phase::Decode),
        [
            "FLASHINFER_MLA",
            "FLASHINFER_MLA_SPARSE",
            "FLASHMLA_SPARSE",
            "FLASH_ATTN_MLA",
            "FLASH_ATTN_MLA_SPARSE",
            "TOKENSPEED_MLA",
            "TRITON_MLA",
        ]
    );
}

#[test]
fn preference_is_never_replaced() {
    let registry = all_built();
    for_every_case(|case| {
        let automatic = registry.explain(&case.request()).unwrap();
        for (name, fields) in case.decode() {
            let request = case.request().with_decode(name);
            let explanation = registry.explain(&request).unwrap();
            assert_eq!(
                explanation.preferred(Phase::Decode).unwrap().spec.name,
                name
            );
            assert_eq!(
                explanation.candidates(Phase::Decode),
                automatic.candidates(Phase::Decode)
            );
            let prefill = |it: &Explanation| {
                (
                    it.candidates(Phase::Prefill).to_vec(),
                    it.selected(Phase::Prefill).cloned(),
                )
            };
            assert_eq!(prefill(&explanation), prefill(&automatic));
            let chosen = explanation.selected(Phase::Decode).map(|c| c.spec.name);
            assert_eq!(chosen, fields.is_empty().then_some(name), "{request:?}");
        }
        for (name, fields) in case.prefill() {
            let request = case.request().with_prefill(name);
            let explanation = registry.explain(&request).unwrap();
            let chosen = explanation.selected(Phase::Prefill).map(|c| c.spec.name);
            assert_eq!(chosen, fields.is_empty().then_some(name), "{request:?}");
            match registry.select(&request) {
                Ok(selection) => assert_eq!(selection.prefill.name, name),
                Err(SelectionError::Refused {
                    phase: Phase::Prefill,
                    name: refused,
                    reasons,
                    ..
                }) => {
                    assert_eq!(refused, name);
                    let given: Vec<_> = reasons.iter().map(|r| r.field()).collect();
                    assert_eq!(given, fields);
                }
                // The prefill backend is the one asked for. No decode backend fits, and no backend
                // here has an implementation.
                Err(SelectionError::NothingLinked) => {
                    assert!(fields.is_empty());
                    assert!(case.decode().iter().all(|(_, fields)| !fields.is_empty()));
                }
                Err(other) => panic!("{request:?}: {other}"),
            }
        }
    });
}

#[test]
fn outputs_graphs_and_query_lengths() {
    let registry = Registry::known();
    let lse = |cell: &str| match cell {
        "log2" => LseOutput::Log2,
        "none" => LseOutput::None,
        _ => LseOutput::Ln,
    };
    for [name, _, _, produced] in rows(PREFILL) {
        let spec = registry.get(Phase::Prefill, name).unwrap().spec;
        assert_eq!(spec.lse, lse(produced), "{name}");
    }
    for [name, _, _, _, produced, graphs, lens, _] in rows(DECODE) {
        let spec = registry.get(Phase::Decode, name).unwrap().spec;
        assert_eq!(spec.lse, lse(produced), "{name}");
        // If the table is silent, there is nothing to compare.
        if !graphs.is_empty() {
            assert_eq!(spec.graphs.name(), graphs, "{name}");
            assert_eq!(spec.query_len.name(), lens, "{name}");
        }
    }
    // The registry also has the CPU's own backends.
    assert_eq!(
        registry.names(Phase::Prefill).len(),
        rows::<4>(PREFILL).count() + 1
    );
    assert_eq!(
        registry.names(Phase::Decode).len(),
        rows::<8>(DECODE).count() + 1
    );
}

#[test]
fn query_lengths_and_graphs() {
    let registry = all_built();
    let sm100 = Target::dry_run(Capability::new(10, 0));
    let fields = |request: &SelectionRequest, name: &str| {
        let explanation = registry.explain(request).unwrap();
        let (_, fields) = found(&explanation, Phase::Decode)
            .into_iter()
            .find(|(n, _)| *n == name)
            .unwrap();
        fields
    };
    let plain = Problem::new(MlaDims::R1, 128, DType::BF16);
    let ragged = SelectionRequest::new(sm100, plain.with_query_len(QueryLen::Ragged));
    assert_eq!(fields(&ragged, "FLASHINFER_MLA"), Vec::<&str>::new());
    assert_eq!(fields(&ragged, "TRITON_MLA"), ["query_len"]);
    assert_eq!(fields(&ragged, "CUTLASS_MLA"), ["query_len"]);
    let captured = SelectionRequest::new(sm100, plain.with_graphs(GraphSupport::Always));
    assert_eq!(fields(&captured, "FLASHINFER_MLA"), ["graphs"]);
    assert_eq!(fields(&captured, "TRITON_MLA"), ["graphs"]);
}

#[test]
fn kinds_of_devices_stay_apart() {
    let request = SelectionRequest::new(Target::CPU, Problem::new(MlaDims::R1, 16, DType::F32));
    let explanation = Registry::known().explain(&request).unwrap();
    for (name, fields) in [
        found(&explanation, Phase::Prefill),
        found(&explanation, Phase::Decode),
    ]
    .concat()
    {
        // A backend registered as CUSTOM may run on a processor.
        let expected = if name == "CUSTOM" {
            "availability"
        } else {
            "platform"
        };
        assert_eq!(fields.first(), Some(&expected), "{name}");
    }
}

/// A split cache is a reason against decode backends that read only one tensor, under the name of
/// the feature. It does not concern prefill backends.
#[test]
fn split_cache_concerns_decode() {
    let hopper = Target::dry_run(Capability::new(9, 0));
    let one_row = Problem::new(MlaDims::R1, 16, DType::BF16);
    let split = one_row.with_features(FeatureSet::of(&[Feature::SplitCache]));
    for entry in KNOWN {
        let reasons = |problem: &Problem| entry.spec.validate(hopper, problem).to_string();
        let name = entry.spec.name;
        let takes =
            entry.spec.phase == Phase::Prefill || entry.spec.features.contains(Feature::SplitCache);
        if takes {
            assert_eq!(reasons(&split), reasons(&one_row), "{name}");
        } else {
            let added = "features: given split_cache, accepted ";
            assert!(
                reasons(&split).contains(added),
                "{name}: {}",
                reasons(&split)
            );
        }
    }
    let reading = KNOWN.iter().filter(|entry| {
        entry.spec.features.contains(Feature::SplitCache) && entry.spec.phase == Phase::Decode
    });
    let reading: Vec<_> = reading.map(|entry| entry.spec.name).collect();
    assert_eq!(reading, ["FLASHINFER_MLA", "CPU"]);

    let fault = |problem: Problem| problem.fault().map(|reason| reason.to_string());
    assert_eq!(fault(split), None);
    assert_eq!(
        fault(split.with_kv_format(KvFormat::Fp8DsMla)).as_deref(),
        Some(
            "kv_format: given fp8_ds_mla, accepted f32, f16, bf16 or fp8 in a split cache: the \
             others are one row"
        )
    );
    let without_rope = split.with_dims(MlaDims::new(512, HeadDims::new(128, 0, 128)));
    assert_eq!(
        fault(without_rope).as_deref(),
        Some("features: given split_cache, accepted one row, where R is 0")
    );
}
