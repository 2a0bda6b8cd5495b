//! Finds, selects and makes the backends that the attribute links.

#[macro_use]
mod common;

use std::any::type_name;

use mla_cpu::Cpu;
use mla_runtime::Error;
use mla_runtime::backend::{DecodeBackend, DecodeStage, LayerConfig, PrefillBackend, PrefillStage};
use mla_runtime::device::Device;
use mla_runtime::model::{DType, KvFormat, MlaDims};
use mla_runtime::select::{Registry, SelectionError, SelectionRequest};
use mla_runtime::spec::{Phase, Problem, Target};

type Gpu = common::Bytes<false>;
const GPU: Gpu = common::Bytes;
const ANY_GPU: &[&str] = &["compute_80"];

// This backend replaces the known one on 9.0, the only capability that it accepts.
prefill_backend! {
    FlashAttn on Gpu:
        sm = "90", compiled = ANY_GPU, dtypes = "bf16", requires_r1 = true, priority = 100
}

decode_backend! {
    Foreign on Gpu:
        name = "FOREIGN", provider = "elsewhere", sm = "80+", compiled = ANY_GPU, dtypes = "bf16",
        kv = "bf16"
}

// This backend would be tried before all others, but it lacks the key `compiled`.
decode_backend!(Unsaid on Gpu: sm = "80+", dtypes = "bf16", kv = "bf16", priority = 1000);

#[test]
fn unsaid_targets_need_a_name() {
    let registry = Registry::linked().unwrap();
    let asked = request(GPU.target()).with_decode(Unsaid::SPEC.name);
    let selection = registry.select(&asked).unwrap();
    assert_eq!(selection.decode, Unsaid::SPEC);
    let explanation = registry.explain(&request(GPU.target())).unwrap();
    let mut candidates = explanation.candidates(Phase::Decode).iter();
    let unsaid = candidates.find(|it| it.spec.name == Unsaid::SPEC.name);
    assert_eq!(
        unsaid.unwrap().reasons.to_string(),
        "nothing says what its kernels are compiled for; say it by the key `compiled`, or ask for \
         the backend by name"
    );
}

fn request(target: Target) -> SelectionRequest {
    SelectionRequest::new(target, Problem::new(MlaDims::R1, 16, DType::BF16))
}

#[test]
fn linked_backends_are_selected() {
    let registry = Registry::linked().unwrap();
    assert!(registry.is_implemented());
    let selection = registry.select(&request(GPU.target())).unwrap();
    assert_eq!(selection.prefill, FlashAttn::SPEC);
    assert_eq!(selection.decode, Foreign::SPEC);
    // On 8.0 FLASH_ATTN is only a known name.
    let ampere = Target::dry_run("8.0".parse().unwrap());
    let message = registry.select(&request(ampere)).unwrap_err().to_string();
    let begin = "prefill: no backend fits on sm 8.0\n";
    assert!(message.starts_with(begin), "{message}");
    let known = "\n  FLASH_ATTN: not built here: in its place mla-kernels has WGMMA_ATTN";
    assert!(message.contains(known), "{message}");
}

#[test]
fn selection_makes_a_backend() {
    let registry = Registry::linked().unwrap();
    let selection = registry.select(&request(GPU.target())).unwrap();
    let config = selection.config(0.07);
    // The bodies refuse to be made, with errors of their own. Such an error shows that they were
    // called.
    let refused = |result: Result<(), SelectionError>| match result {
        Err(SelectionError::Runtime(Error::Argument { field, .. })) => field,
        other => panic!("{other:?}"),
    };
    let made = registry.instantiate_prefill(selection.prefill.name, &GPU, &config);
    assert_eq!(refused(made.map(drop)), "backend");
    let decode =
        |name, config: &LayerConfig| registry.instantiate_decode(name, &GPU, config).map(drop);
    assert_eq!(refused(decode(selection.decode.name, &config)), "backend");

    // The backend was not selected for this configuration.
    let mut other: LayerConfig = config;
    other.problem.dtype = DType::F32;
    assert_eq!(
        decode("FOREIGN", &other).unwrap_err().to_string(),
        "decode: FOREIGN was asked for, but does not fit on sm 9.0: dtype: given f32, accepted \
         bf16; kv_format: given bf16, accepted f32 (the dtype's own), or a quantised format"
    );
    // A backend with only a known name cannot be made, and an unknown name is not found.
    let error = decode("FLASHMLA", &config).unwrap_err();
    assert!(matches!(error, SelectionError::Refused { .. }), "{error}");
    let error = decode("FOREIGM", &config).unwrap_err().to_string();
    assert!(error.ends_with("did you mean FOREIGN?"), "{error}");
}

#[test]
fn types_of_one_name() {
    struct Another;
    impl DecodeBackend for Another {
        decode_body!(Gpu);
        const SPEC: mla_runtime::spec::BackendSpec = Foreign::SPEC;
    }
    let mut registry = Registry::linked().unwrap();
    let message = registry.add(Another::ENTRY).unwrap_err().to_string();
    assert!(message.contains("`selection_linked::Foreign`"), "{message}");
    assert!(message.contains("::Another`"), "{message}");
    registry.replace(Another::ENTRY).unwrap();
    let origin = |registry: &Registry| registry.get(Phase::Decode, "FOREIGN").unwrap().origin();
    assert!(origin(&registry).ends_with("Another"));
    assert!(registry.reset(Phase::Decode, "FOREIGN").unwrap());
    assert_eq!(origin(&registry), "selection_linked::Foreign");
}

#[test]
fn cpu_backends_are_selected() {
    let registry = Registry::linked().unwrap();
    for dtype in DType::ALL {
        for kv_format in [KvFormat::of(*dtype), KvFormat::Fp8, KvFormat::Fp8DsMla] {
            let request =
                SelectionRequest::new(Cpu::new().target(), Problem::new(MlaDims::R1, 16, *dtype))
                    .with_kv_formats(&[kv_format]);
            let selection = registry.select(&request).unwrap();
            assert_eq!(
                (selection.prefill.name, selection.decode.name),
                ("CPU", "CPU")
            );
            let config = selection.config(0.07);
            let prefill = registry.instantiate_prefill("CPU", &Cpu::new(), &config);
            assert_eq!(*prefill.unwrap().spec(), selection.prefill);
            let decode = registry.instantiate_decode("CPU", &Cpu::new(), &config);
            assert_eq!(*decode.unwrap().spec(), selection.decode);
        }
    }
}

#[test]
fn foreign_device_is_refused() {
    let registry = Registry::linked().unwrap();
    let selection = registry.select(&request(Target::CPU)).unwrap();
    let config = selection.config(0.07);
    // The device is of another kind, so the error is about the platform.
    let error = registry.instantiate_decode("FOREIGN", &Cpu::new(), &config);
    let error = error.map(drop).unwrap_err().to_string();
    assert!(
        error.contains("platform: given cpu, accepted cuda"),
        "{error}"
    );
    // The device is of the same kind but of another type.
    let other = common::Bytes::<true>;
    let error = registry
        .instantiate_decode("CPU", &other, &config)
        .map(drop)
        .unwrap_err();
    assert!(
        matches!(error, SelectionError::OtherDevice { .. }),
        "{error}"
    );
    let error = error.to_string();
    assert!(
        error.contains(type_name::<common::Bytes<true>>()),
        "{error}"
    );
}
