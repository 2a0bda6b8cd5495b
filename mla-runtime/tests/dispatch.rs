//! Checks the compiler's choice, and the types from a selection. Both must agree with the
//! registry's choice.

#![allow(unexpected_cfgs, reason = "a feature that no package has is off")]

#[macro_use]
mod common;

use std::any::TypeId;
use std::sync::Mutex;

use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::{DecodeBackend, Entry, PrefillBackend};
use mla_runtime::device::Device;
use mla_runtime::dispatch::{LayerVisitor, Listed, backends, choose, with_backends};
use mla_runtime::model::{DType, KvFormat, MlaDims};
use mla_runtime::select::{Registry, SelectionError, SelectionRequest};
use mla_runtime::spec::{
    BackendSpec, Capability, CapabilityMatch, KernelFacts, PageSizes, Phase, Platform, Priority,
    Problem, Run, Target,
};
use mla_runtime::{best_decode, best_prefill};
use proptest::prelude::*;

type Gpu = common::Bytes<false>;

const ANY_GPU: &[&str] = &["compute_80"];

decode_backend!(Hopper on Gpu: sm = "90", dtypes = "bf16", compiled = ANY_GPU, priority = 10);

decode_backend! {
    Every on Gpu: sm = "80+", dtypes = "f16,bf16", compiled = ANY_GPU, priority = "100:20,*:5"
}

prefill_backend!(Prefill on Gpu: sm = "80+", dtypes = "f16,bf16", compiled = ANY_GPU);

// This backend is left out, because no package has this feature.
decode_backend! {
    Blackwell on Gpu: feature = "sm1000", sm = "10x", dtypes = "f16,bf16", priority = 100
}

// This backend is compiled for only one of the GPUs that it declares.
decode_backend! {
    Partly on Gpu:
        sm = "100|120", dtypes = "bf16", compiled = "SM100|SM120", run_on = RUN_ON, priority = 200
}

const SM100: &[&str] = &[];
const SM120: &[&str] = &["sm_120a"];
const RUN_ON: &[Run] = &[];

type Gpus = backends![Blackwell, Partly, Every, Hopper];
type All = backends![CpuDecode, ..Gpus];

const R1: Problem = Problem::new(MlaDims::R1, 16, DType::BF16);
const HALF: Problem = Problem::new(MlaDims::R1, 16, DType::F16);

fn request(target: Target) -> SelectionRequest {
    SelectionRequest::new(target, R1)
}

const fn sm(major: u8, minor: u8) -> Target {
    Target::dry_run(Capability::new(major, minor))
}

fn same<A: 'static, B: 'static>() -> bool {
    TypeId::of::<A>() == TypeId::of::<B>()
}

#[test]
fn compile_time_choice() {
    assert!(same::<best_decode!(All, sm(9, 0), R1), Hopper>());
    assert!(same::<best_decode!(All, sm(8, 0), R1), Every>());
    assert!(same::<best_decode!(All, sm(9, 0), HALF), Every>());
    // The best backend is left out of this build, so the next one is chosen. An error would have
    // named the best one.
    assert!(same::<best_decode!(All, sm(10, 0), R1), Every>());
    // A backend that has run nowhere is not chosen among others. It is chosen if it is the only
    // one.
    assert!(same::<best_decode!(All, sm(12, 0), R1), Every>());
    assert!(same::<best_decode!([Partly], sm(12, 0), R1), Partly>());
    assert!(same::<best_decode!(All, Target::CPU, R1), CpuDecode>());
    assert!(same::<best_decode!([Hopper, Every], sm(9, 0), R1), Hopper>());
    assert!(same::<
        best_prefill!([CpuPrefill, Prefill], sm(12, 0), R1),
        Prefill,
    >());
}

struct Names;

impl LayerVisitor<Gpu> for Names {
    type Output = [&'static str; 2];

    fn visit<P: PrefillBackend<Device = Gpu>, B: DecodeBackend<Device = Gpu>>(
        self,
    ) -> Self::Output {
        [std::any::type_name::<P>(), std::any::type_name::<B>()]
    }
}

#[test]
fn a_selection_becomes_types_again() {
    let registry = Registry::of::<backends![Prefill], Gpus>().unwrap();
    for (target, problem, want) in [
        (sm(9, 0), R1, "dispatch::Hopper"),
        (sm(9, 0), HALF, "dispatch::Every"),
        (sm(10, 0), R1, "dispatch::Every"),
        (sm(12, 0), R1, "dispatch::Every"),
    ] {
        let selection = registry
            .select(&SelectionRequest::new(target, problem))
            .unwrap();
        let names = with_backends::<backends![Prefill], Gpus, Gpu, _>(&selection, Names);
        assert_eq!(names.unwrap(), ["dispatch::Prefill", want]);
    }
}

#[test]
fn missing_arm_lists_the_arms() {
    let mut registry = Registry::of::<backends![Prefill], Gpus>().unwrap();
    // Another backend with the name of a listed one is not accepted as the listed one.
    registry.replace(Every::ENTRY.named("HOPPER")).unwrap();
    let request = request(sm(9, 0)).with_decode("HOPPER");
    let selection = registry.select(&request).unwrap();
    let error = with_backends::<backends![Prefill], Gpus, Gpu, _>(&selection, Names).unwrap_err();
    assert!(matches!(error, SelectionError::NoArm { .. }), "{error:?}");
    assert_eq!(
        error.to_string(),
        "decode: given HOPPER (by mla-runtime), accepted one of the listed types: BLACKWELL, \
         PARTLY, EVERY, HOPPER; add its type to the list, or make it through the registry"
    );
}

#[test]
fn compiler_and_selection_agree() {
    let problem = Problem::new(MlaDims::R1, 16, DType::F32);
    let request = SelectionRequest::new(sm(9, 0), problem);
    let registry = Registry::of::<backends![CpuPrefill], All>().unwrap();
    let explanation = registry.explain(&request).unwrap();
    let list = <All as mla_runtime::dispatch::DecodeList>::LISTED;
    let said = std::panic::catch_unwind(|| choose(Phase::Decode, list, sm(9, 0), &problem))
        .expect_err("nothing fits");
    let said = said.downcast_ref::<String>().unwrap();
    let mut lines = said.lines();
    assert_eq!(lines.next(), Some("decode: no backend fits on sm 9.0"));
    let mut lines: Vec<&str> = lines.collect();
    lines.sort_unstable();
    let mut want: Vec<String> = explanation
        .candidates(Phase::Decode)
        .iter()
        .map(|candidate| format!("  {}: {}", candidate.spec.name, candidate.reasons))
        .collect();
    want.sort_unstable();
    assert_eq!(lines, want);
}

#[test]
fn uncompiled_or_unrun_is_a_reason() {
    let registry = Registry::of::<backends![Prefill], Gpus>().unwrap();
    let why = |target| {
        let explanation = registry.explain(&request(target)).unwrap();
        let mut candidates = explanation.candidates(Phase::Decode).iter();
        let partly = candidates.find(|candidate| candidate.spec.name == "PARTLY");
        partly.unwrap().reasons.to_string()
    };
    let refusal = "compiled for: sm_120a; build with `--features sm100`";
    assert_eq!(why(sm(10, 0)), refusal);
    assert_eq!(
        why(sm(12, 0)),
        "its code for this GPU has run on none yet; ask for it by name, and compare its results"
    );
    // If it is asked for by name, it runs only on the GPUs for which it is compiled.
    let asked = |target, name| registry.select(&request(target).with_decode(name));
    assert_eq!(asked(sm(12, 0), "PARTLY").unwrap().decode, Partly::SPEC);
    let off = "feature `sm1000` of mla-runtime is off; build with `--features sm1000`";
    for (name, refusal) in [("PARTLY", refusal), ("BLACKWELL", off)] {
        assert_eq!(
            asked(sm(10, 0), name).unwrap_err().to_string(),
            format!("decode: {name} was asked for, but does not fit on sm 10.0: {refusal}")
        );
    }
}

fn any_spec(index: usize) -> impl Strategy<Value = BackendSpec> {
    const CAPABILITIES: &[&[CapabilityMatch]] = &[
        &[CapabilityMatch::Any],
        &[CapabilityMatch::Exact(Capability::new(9, 0))],
        &[CapabilityMatch::Family(10)],
        &[CapabilityMatch::Floor(Capability::new(8, 0))],
    ];
    const PRIORITIES: &[Priority] = &[
        Priority::everywhere(0),
        Priority::everywhere(1),
        Priority {
            by_capability: &[(CapabilityMatch::Exact(Capability::new(9, 0)), 2)],
            otherwise: -1,
        },
    ];
    let capability = prop::sample::select(CAPABILITIES);
    let priority = prop::sample::select(PRIORITIES);
    let dtypes = prop::sample::select(vec![&[DType::BF16][..], &[DType::F16, DType::BF16]]);
    let pages = prop::sample::select(vec![PageSizes::Any, PageSizes::List(&[64])]);
    (capability, priority, dtypes, pages, any::<bool>()).prop_map(
        move |(capabilities, priority, dtypes, page_sizes, cuda)| {
            let platform = if cuda { Platform::Cuda } else { Platform::Cpu };
            let name = ["C", "A", "E", "B", "D", "AB"][index];
            BackendSpec::new(name, Phase::Decode, platform)
                .with_capabilities(capabilities)
                .with_priority(priority)
                .with_dtypes(dtypes)
                .with_page_sizes(page_sizes)
                .with_kv_formats(&[KvFormat::F16, KvFormat::BF16])
        },
    )
}

/// Lists that are never freed. This list keeps them reachable, so leak checkers do not report them.
static CONSTANTS: Mutex<Vec<&Listed>> = Mutex::new(Vec::new());

proptest! {
    // Compares the compiler's choice, executed at run time, with a registry's choice.
    #[test]
    fn choice_matches_a_registry(
        specs in (0usize..7).prop_flat_map(|len| (0..len.min(6)).map(any_spec).collect::<Vec<_>>()),
        capability in prop::sample::select(vec![(8, 0), (9, 0), (10, 0), (10, 3)]),
        half: bool,
        page_size in prop::sample::select(vec![16u32, 64]),
    ) {
        let dtype = if half { DType::F16 } else { DType::BF16 };
        let problem = Problem::new(MlaDims::R1, 16, dtype).with_page_size(page_size);
        let target = sm(capability.0, capability.1);
        // A list in a constant lives as long as the program.
        let mut list = None;
        for spec in specs.iter().rev() {
            list = Some(&*Box::leak(Box::new(Listed {
                spec: Box::leak(Box::new(*spec)),
                kernels: KernelFacts::UNKNOWN,
                availability: Ok(()),
                next: list,
            })));
        }
        CONSTANTS.lock().unwrap().extend(list);
        let mut registry = Registry::empty();
        for spec in &specs {
            registry.add(Entry::known(*spec, || Ok(()))).unwrap();
        }
        let explanation = registry.explain(&SelectionRequest::new(target, problem)).unwrap();
        let want = explanation.selected(Phase::Decode).map(|candidate| candidate.spec.name);
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let got = std::panic::catch_unwind(|| choose(Phase::Decode, list, target, &problem));
        std::panic::set_hook(hook);
        prop_assert_eq!(got.ok().map(|index| specs[index].name), want);
    }
}

#[test]
fn cpu_device() {
    struct Here(Cpu);
    impl LayerVisitor<Cpu> for Here {
        type Output = Target;
        fn visit<P: PrefillBackend<Device = Cpu>, B: DecodeBackend<Device = Cpu>>(self) -> Target {
            self.0.target()
        }
    }
    let registry = Registry::of::<backends![CpuPrefill], backends![CpuDecode]>().unwrap();
    let problem = Problem::new(MlaDims::R1, 16, DType::F32);
    let selection = registry.select(&SelectionRequest::new(Target::CPU, problem));
    let here = Here(Cpu::new());
    let target = with_backends::<backends![CpuPrefill], backends![CpuDecode], _, _>(
        &selection.unwrap(),
        here,
    );
    assert_eq!(target.unwrap(), Target::CPU);
}
