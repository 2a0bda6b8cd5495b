//! Tests the rules of selection and of the registry, with made-up entries.

use mla_runtime::backend::Entry;
use mla_runtime::model::{DType, KvFormat, MlaDims};
use mla_runtime::select::{Registry, SelectionError, SelectionRequest};
use mla_runtime::spec::{
    BackendSpec, Capability, CapabilityMatch, Cause, PageSizes, Phase, Platform, Priority, Problem,
    Target,
};

const SM80: Target = Target::dry_run(Capability::new(8, 0));
const SM90: Target = Target::dry_run(Capability::new(9, 0));
const HERE: Target = Target::present_gpu(Capability::new(9, 0));

fn available() -> Result<(), Cause> {
    Ok(())
}

fn no_driver() -> Result<(), Cause> {
    Err(Cause::NoDriver)
}

fn feature_off() -> Result<(), Cause> {
    Err(Cause::FeatureOff {
        package: "here",
        feature: "sm90",
    })
}

const fn prefill(name: &'static str) -> BackendSpec {
    BackendSpec::new(name, Phase::Prefill, Platform::Cuda)
}

const fn decode(name: &'static str, priority: i32) -> BackendSpec {
    BackendSpec::new(name, Phase::Decode, Platform::Cuda)
        .with_priority(Priority::everywhere(priority))
}

fn registry(specs: &[BackendSpec]) -> Registry {
    let mut registry = Registry::empty();
    for spec in specs {
        registry.add(Entry::known(*spec, available)).unwrap();
    }
    registry
}

const R1: Problem = Problem::new(MlaDims::R1, 16, DType::BF16);

fn request(target: Target) -> SelectionRequest {
    SelectionRequest::new(target, R1)
}

fn selected_decode(registry: &Registry, request: &SelectionRequest) -> Option<&'static str> {
    let explanation = registry.explain(request).unwrap();
    explanation.selected(Phase::Decode).map(|c| c.spec.name)
}

fn order(registry: &Registry, request: &SelectionRequest) -> Vec<&'static str> {
    let explanation = registry.explain(request).unwrap();
    let candidates = explanation.candidates(Phase::Decode).iter();
    candidates.map(|candidate| candidate.spec.name).collect()
}

/// The reasons against the decode backend that is tried first.
fn against_first(registry: &Registry, request: &SelectionRequest) -> String {
    let explanation = registry.explain(request).unwrap();
    explanation.candidates(Phase::Decode)[0].reasons.to_string()
}

#[test]
fn priority_then_name() {
    let mut specs = [
        decode("B", 1),
        decode("A", 1),
        decode("AB", 1),
        decode("Z", 2),
    ];
    for _ in 0..specs.len() {
        specs.rotate_left(1);
        assert_eq!(
            order(&registry(&specs), &request(SM90)),
            ["Z", "A", "AB", "B"]
        );
    }
}

#[test]
fn priority_is_that_of_the_target() {
    const SPECS: [BackendSpec; 2] = [
        decode("HOPPER", 0).with_priority(Priority {
            by_capability: &[(CapabilityMatch::Exact(Capability::new(9, 0)), 5)],
            otherwise: -5,
        }),
        decode("PLAIN", 0),
    ];
    let registry = registry(&SPECS);
    assert_eq!(order(&registry, &request(SM90)), ["HOPPER", "PLAIN"]);
    assert_eq!(order(&registry, &request(SM80)), ["PLAIN", "HOPPER"]);
}

#[test]
fn inapplicable_candidates_come_last() {
    const ONLY_80: BackendSpec =
        decode("C", 9).with_capabilities(&[CapabilityMatch::Exact(Capability::new(8, 0))]);
    let mut registry = registry(&[ONLY_80, decode("B", 1), decode("A", 0)]);
    let off = Entry::known(decode("OFF", 5), feature_off);
    registry.add(off).unwrap();
    // A backend that is merely unavailable still applies. It is tried, and its absence is the
    // reason against it.
    assert_eq!(order(&registry, &request(SM90)), ["OFF", "B", "A", "C"]);
    assert_eq!(selected_decode(&registry, &request(SM90)), Some("B"));
}

#[test]
fn dry_run_ignores_local_causes() {
    let mut registry = registry(&[prefill("P")]);
    let absent = |cause| Entry::known(decode("D", 0), cause);
    registry.add(absent(no_driver)).unwrap();
    assert_eq!(selected_decode(&registry, &request(SM90)), Some("D"));
    assert_eq!(selected_decode(&registry, &request(HERE)), None);
    assert_eq!(
        against_first(&registry, &request(HERE)),
        "no driver on this machine; install the driver"
    );
    // A feature that is off is missing from the program, on whatever machine it runs.
    let mut registry = Registry::empty();
    registry.add(absent(feature_off)).unwrap();
    assert_eq!(selected_decode(&registry, &request(SM90)), None);
}

#[test]
fn unknown_capability() {
    let target = Target {
        capability: None,
        ..HERE
    };
    let registry = registry(&[decode("D", 0)]);
    assert_eq!(
        against_first(&registry, &request(target)),
        "capability: given unknown, accepted any"
    );
}

#[test]
fn no_cpu_fallback() {
    const CPU: BackendSpec = decode("CPU", 1000).with_platform(Platform::Cpu);
    let registry = registry(&[CPU, decode("D", 0)]);
    assert_eq!(selected_decode(&registry, &request(SM90)), Some("D"));
    assert_eq!(
        selected_decode(&registry, &request(Target::CPU)),
        Some("CPU")
    );
    let asked = request(SM90).with_decode("CPU");
    let explanation = registry.explain(&asked).unwrap();
    let asked = explanation.preferred(Phase::Decode).unwrap();
    assert_eq!(
        asked.reasons.to_string(),
        "platform: given cuda, accepted cpu"
    );
}

#[test]
fn formats_in_requested_order() {
    const FP8: BackendSpec = decode("FP8", 9).with_kv_formats(&[KvFormat::Fp8]);
    let registry = registry(&[prefill("P"), decode("PLAIN", 0), FP8]);
    for (kv_formats, name, kv_format) in [
        (vec![KvFormat::BF16, KvFormat::Fp8], "PLAIN", KvFormat::BF16),
        (vec![KvFormat::Fp8, KvFormat::BF16], "FP8", KvFormat::Fp8),
        (
            vec![KvFormat::Fp8DsMla, KvFormat::BF16],
            "PLAIN",
            KvFormat::BF16,
        ),
    ] {
        let request = request(SM90).with_kv_formats(&kv_formats);
        let selection = registry.select(&request).unwrap();
        assert_eq!(
            (selection.decode.name, selection.problem.kv_format),
            (name, kv_format)
        );
        assert_eq!(selection.config(0.5).problem, selection.problem);
    }
    // If a backend is asked for by name, its formats decide.
    let request = request(SM90)
        .with_kv_formats(&[KvFormat::BF16, KvFormat::Fp8])
        .with_decode("FP8");
    assert_eq!(
        registry.select(&request).unwrap().problem.kv_format,
        KvFormat::Fp8
    );
}

#[test]
fn formats_need_both_phases() {
    let registry = registry(&[decode("D", 0)]);
    let request = request(SM90).with_kv_formats(&[KvFormat::Fp8, KvFormat::BF16]);
    // Without a prefill backend no format fits, so the explanation is for the first format.
    let explanation = registry.explain(&request).unwrap();
    assert!(!explanation.fits());
    assert_eq!(explanation.problem.kv_format, KvFormat::Fp8);
    assert_eq!(explanation.candidates(Phase::Decode)[0].reasons.len(), 1);
}

#[test]
fn page_size_of_best_decode() {
    const PAGE_128: BackendSpec = decode("PAGE_128", 5).with_page_sizes(PageSizes::List(&[128]));
    const PAGE_16: BackendSpec = decode("PAGE_16", 0).with_page_sizes(PageSizes::MultipleOf(16));
    let registry = registry(&[prefill("P"), PAGE_128, PAGE_16]);
    for (page_sizes, name, page_size) in [
        (vec![64, 128], "PAGE_128", 128),
        (vec![16, 64], "PAGE_16", 16),
        (vec![64, 16], "PAGE_16", 64),
        (vec![7, 48], "PAGE_16", 48),
    ] {
        let request = request(SM90).with_page_sizes(&page_sizes);
        let selection = registry.select(&request).unwrap();
        assert_eq!(
            (selection.decode.name, selection.problem.page_size),
            (name, page_size)
        );
    }
    let none = request(SM90).with_page_sizes(&[7, 9]);
    assert_eq!(registry.explain(&none).unwrap().problem.page_size, 7);
}

#[test]
fn a_request_that_no_backend_could_serve_is_an_error() {
    let registry = registry(&[prefill("P"), decode("D", 0)]);
    let odd = MlaDims::new(100, MlaDims::R1.head);
    for (request, message) in [
        (
            SelectionRequest::new(SM90, R1.with_heads(0)),
            "heads: given 0, accepted 1 to 65536",
        ),
        (
            request(SM90).with_page_sizes(&[64, 0]),
            "page_size: given 0, accepted 1 to 2147483647",
        ),
        (
            SelectionRequest::new(SM90, R1.with_dims(odd).with_kv_format(KvFormat::Fp8DsMla)),
            "kv_format: given fp8_ds_mla for a latent of 100, accepted latents that are multiples \
             of 128 in fp8_ds_mla, and of 4 in fp8_per_token",
        ),
    ] {
        assert_eq!(registry.explain(&request).unwrap_err().to_string(), message);
        assert_eq!(registry.select(&request).unwrap_err().to_string(), message);
    }
}

#[test]
fn two_claims_to_a_name() {
    let mut registry = registry(&[decode("D", 0)]);
    const OTHER: BackendSpec = decode("D", 1).with_provider("elsewhere");
    let error = registry.add(Entry::known(OTHER, available)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "name: given D for two decode backends, `unknown` and `elsewhere`, accepted one backend of \
         a name. Give one of them another name in its crate, or settle it in this program with \
         `Registry::linked_by`"
    );
    // The first backend is unchanged. The same name in the other phase is a different name.
    assert_eq!(
        registry.get(Phase::Decode, "D").unwrap().spec.provider,
        "unknown"
    );
    registry.add(Entry::known(prefill("D"), available)).unwrap();
}

#[test]
fn override_until_reset() {
    const OTHER: BackendSpec = decode("TRITON_MLA", 1)
        .with_provider("elsewhere")
        .with_capabilities(&[CapabilityMatch::Exact(Capability::new(9, 0))]);
    let mut registry = Registry::known();
    registry
        .add(Entry::known(decode("TRITON_MLA", 0), available))
        .unwrap();
    let provider = |registry: &Registry, target| {
        let entry = registry.get_on(target, Phase::Decode, "TRITON_MLA");
        entry.unwrap().spec.provider
    };
    assert!(!registry.is_overridden(Phase::Decode, "TRITON_MLA").unwrap());
    registry.replace(Entry::known(OTHER, available)).unwrap();
    assert!(registry.is_overridden(Phase::Decode, "TRITON_MLA").unwrap());
    // An override applies on all hardware, even where only the backend that it replaces would run.
    assert_eq!(provider(&registry, SM90), "elsewhere");
    assert_eq!(provider(&registry, SM80), "elsewhere");
    // A second override replaces the first one, but not the original.
    registry.replace(Entry::known(OTHER, no_driver)).unwrap();
    assert!(registry.reset(Phase::Decode, "TRITON_MLA").unwrap());
    assert!(!registry.is_overridden(Phase::Decode, "TRITON_MLA").unwrap());
    assert_eq!(provider(&registry, SM90), "unknown");
    assert!(!registry.reset(Phase::Decode, "TRITON_MLA").unwrap());

    // A known name without an implementation can be overridden. A name that does not exist cannot.
    registry
        .replace(Entry::known(decode("FLASHMLA", 0), available))
        .unwrap();
    assert_eq!(selected_decode(&registry, &request(SM80)), Some("FLASHMLA"));
    registry.reset(Phase::Decode, "FLASHMLA").unwrap();
    let error = registry.replace(Entry::known(decode("NEW", 0), available));
    assert!(matches!(error, Err(SelectionError::Unknown { .. })));
    assert!(registry.is_overridden(Phase::Decode, "NEW").is_err());
    assert!(registry.reset(Phase::Decode, "NEW").is_err());
}

const INSTEAD_OF_FLASH_ATTN: &str = "not built here: in its place mla-kernels has WGMMA_ATTN on \
     Hopper, MMA_ATTN on every GPU since Ampere; ask for that by its name, or for none";

#[test]
fn known_name_needs_its_hardware() {
    const NATIVE: BackendSpec =
        prefill("FLASH_ATTN").with_capabilities(&[CapabilityMatch::Exact(Capability::new(9, 0))]);
    let mut registry = Registry::known();
    registry.add(Entry::known(NATIVE, available)).unwrap();
    let row = |target| {
        let explanation = registry.explain(&request(target)).unwrap();
        let mut candidates = explanation.candidates(Phase::Prefill).iter();
        let row = candidates.find(|c| c.spec.name == "FLASH_ATTN").unwrap();
        (row.spec.provider, row.reasons.to_string())
    };
    assert_eq!(row(SM90), ("unknown", String::new()));
    assert_eq!(
        row(SM80),
        ("flash-attention", INSTEAD_OF_FLASH_ATTN.to_owned())
    );
    // If neither runs on the hardware, the name means the linked backend.
    assert_eq!(
        row(Target::CPU),
        ("unknown", "platform: given cpu, accepted cuda".to_owned())
    );
}

#[test]
fn unknown_name_suggests_one() {
    let registry = Registry::known();
    let error = |phase, name: &str| {
        let request = match phase {
            Phase::Prefill => request(SM90).with_prefill(name),
            Phase::Decode => request(SM90).with_decode(name),
        };
        let error = registry.explain(&request).unwrap_err();
        assert_eq!(
            error.to_string(),
            registry.get(phase, name).unwrap_err().to_string()
        );
        error.to_string()
    };
    assert_eq!(
        error(Phase::Prefill, "flash_atn"),
        "prefill: given \"flash_atn\", accepted CPU, CUDNN, CUSTOM, FLASHINFER, FLASH_ATTN, \
         ROCM_AITER_FA, TOKENSPEED_MLA, TRTLLM_RAGGED; did you mean FLASH_ATTN?"
    );
    // FLASHMLA exists, but in the other phase.
    assert!(
        error(Phase::Prefill, "FLASHMLA").starts_with("prefill: given \"FLASHMLA\", accepted ")
    );
    assert!(!error(Phase::Decode, "\n").contains('\n'));
    assert!(!error(Phase::Decode, "zzz").contains("did you mean"));
    assert!(error(Phase::Decode, &"x".repeat(1 << 20)).len() < 400);
}

#[test]
fn nothing_linked_says_how_to_link() {
    for registry in [Registry::empty(), Registry::known()] {
        let error = registry.select(&request(SM90)).unwrap_err();
        assert!(matches!(error, SelectionError::NothingLinked));
        assert_eq!(
            error.to_string(),
            "no backend is linked into this program; link a backend crate, such as \
             `use mla_kernels as _;`, or add a backend's ENTRY with `Registry::add`; a C program \
             links a staticlib whole (-Wl,--whole-archive)"
        );
    }
    let explanation = Registry::empty().explain(&request(SM90)).unwrap();
    assert!(explanation.to_string().contains("use mla_kernels as _;"));
    let error = Registry::empty()
        .get(Phase::Decode, "FLASHMLA")
        .unwrap_err();
    assert!(
        error.to_string().contains("use mla_kernels as _;"),
        "{error}"
    );
}

#[test]
fn refused_preference_has_reasons() {
    let registry = Registry::known();
    let request = request(Target::dry_run(Capability::new(10, 0)))
        .with_decode("FLASHMLA")
        .with_page_sizes(&[16]);
    let explanation = registry.explain(&request).unwrap();
    assert!(explanation.selected(Phase::Decode).is_none());
    assert_eq!(
        explanation.preferred(Phase::Decode).unwrap().spec.name,
        "FLASHMLA"
    );
    let mut registry = registry;
    registry.add(Entry::known(prefill("P"), available)).unwrap();
    assert_eq!(
        registry.select(&request).unwrap_err().to_string(),
        "decode: FLASHMLA was asked for, but does not fit on sm 10.0: capability: given 10.0, \
         accepted 9.0; page_size: given 16, accepted 64; not linked: the crate \
         mla-flashmla has it; depend on mla-flashmla, for a GPU with the feature of its family, \
         and name it in the program"
    );
}

#[test]
fn a_selection_reads_as_sentences() {
    let mut registry = registry(&[prefill("P"), decode("D", 3)]);
    registry
        .add(Entry::known(decode("OFF", 5), feature_off))
        .unwrap();
    let selection = registry.select(&request(SM90)).unwrap();
    assert_eq!(
        selection.explanation.to_string(),
        "On sm 9.0, for L=512 (P,R,V)=(128,64,128), 16 heads, bf16, bf16 cache in pages of 64:\n\
         prefill: P, the first that fits (priority 0)\n  \
           P (unknown) fits\n\
         decode: D, the first that fits (priority 3)\n  \
           OFF (unknown) does not: feature `sm90` of here is off; build with `--features sm90`\n  \
           D (unknown) fits"
    );
}
