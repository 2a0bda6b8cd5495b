//! The backend is found, chosen and replaced, without a GPU.

use std::any::TypeId;
use std::process::Command;

use backend_crate::Naive;
use mla_kernels::backends::sm90::WgmmaMla;
use mla_kernels::{DecodeBackends, PrefillBackends};
use mla_runtime::backend::DecodeBackend;
use mla_runtime::dispatch::backends;
use mla_runtime::model::{DType, MlaDims};
use mla_runtime::select::{Registry, SelectionRequest};
use mla_runtime::spec::{Capability, Phase, Problem, Target};
use mla_runtime::{best_decode, best_prefill};

const HOPPER: Target = Target::dry_run(Capability::new(9, 0));
const R1: Problem = Problem::new(MlaDims::R1, 128, DType::BF16);
const MANY_HEADS: Problem = R1.with_heads(256);

type Decode = backends![Naive, ..DecodeBackends];

// These are types that an engine for one GPU would write.
type ForR1 = best_decode!(Decode, HOPPER, R1);
type ForManyHeads = best_decode!(Decode, HOPPER, MANY_HEADS);
type Prefill = best_prefill!(PrefillBackends, HOPPER, R1);

#[test]
fn the_compiler_chooses_among_built_in_and_foreign_backends() {
    assert_eq!(TypeId::of::<ForR1>(), TypeId::of::<WgmmaMla>());
    assert_eq!(TypeId::of::<ForManyHeads>(), TypeId::of::<Naive>());
    assert_eq!(
        TypeId::of::<Prefill>(),
        TypeId::of::<mla_kernels::backends::sm90::WgmmaAttn>()
    );
}

fn request(problem: Problem) -> SelectionRequest {
    SelectionRequest::new(HOPPER, problem)
}

#[test]
fn the_registry_finds_it_and_selects_it_where_the_others_do_not_fit() {
    let registry = Registry::linked().unwrap();
    assert_eq!(
        registry.get(Phase::Decode, "NAIVE").unwrap().origin(),
        "backend_crate::Naive"
    );
    assert_eq!(registry.select(&request(R1)).unwrap().decode, WgmmaMla::SPEC);
    assert_eq!(registry.select(&request(MANY_HEADS)).unwrap().decode, Naive::SPEC);
}

#[test]
fn it_takes_the_place_of_a_built_in_backend_by_name_until_that_is_reset() {
    let mut registry = Registry::linked().unwrap();
    let origin = |registry: &Registry| registry.get(Phase::Decode, "WGMMA_MLA").unwrap().origin();
    registry.replace(Naive::ENTRY.named("WGMMA_MLA")).unwrap();
    assert_eq!(origin(&registry), "backend_crate::Naive");
    let asked = request(R1).with_decode("WGMMA_MLA");
    let selection = registry.select(&asked).unwrap();
    assert_eq!(
        (selection.decode.name, selection.decode.provider),
        ("WGMMA_MLA", "backend-crate")
    );
    assert!(registry.reset(Phase::Decode, "WGMMA_MLA").unwrap());
    assert_eq!(
        origin(&registry),
        "mla_kernels::backends::sm90::wgmma_mla::WgmmaMla"
    );
    assert_eq!(registry.select(&asked).unwrap().decode.provider, "native");
}

#[test]
fn the_command_of_a_program_that_links_it_explains_it() {
    // Examples are beside the folder of the tests. Cargo gives no path to them.
    let test = std::env::current_exe().unwrap();
    let folder = test.ancestors().nth(2).unwrap();
    let output = Command::new(folder.join("examples/mla"))
        .args([
            "explain",
            "--sm",
            "9.0",
            "--model",
            "deepseek-r1",
            "--heads",
            "256",
        ])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success() && text.contains("\ndecode: NAIVE\n"),
        "{text}"
    );
    assert!(text.contains("selected, by backend-crate"), "{text}");
}
