//! The targets of each source, and what the package is told about them.

use crate::stub::{NONE, Says, World, refusal};
use mla_build::{Family, Kernels};

const PORTABLE: [&str; 5] = ["sm_80", "sm_90", "sm_100", "sm_120", "compute_80"];

/// Returns the targets that nvcc was asked for in the one call for a source.
fn targets(calls: &str, source: &str) -> Vec<String> {
    let mut of_source = calls.lines().filter(|line| line.starts_with(source));
    let call = of_source.next().unwrap_or_else(|| panic!("{calls}"));
    assert_eq!(of_source.next(), None, "{calls}");
    let codes = call.split(' ').filter_map(|word| {
        let (_, code) = word.strip_prefix("-gencode=")?.split_once(",code=")?;
        Some(code.to_owned())
    });
    codes.collect()
}

/// Builds, and returns the calls of nvcc.
fn calls(world: &World, kernels: Kernels) -> String {
    kernels.compile("kernels").unwrap();
    world.arguments()
}

/// Returns the value of a constant in the file that the package includes.
fn constant(world: &World, name: &str) -> String {
    let text = world.read("out/kernels_compiled.rs");
    let start = format!("pub const {name}: &[&str] = &");
    let line = text.lines().find_map(|line| line.strip_prefix(&start));
    line.unwrap_or_else(|| panic!("{name}:\n{text}"))
        .trim_end_matches(';')
        .to_owned()
}

#[test]
fn several_targets_one_object() {
    let world = World::new();
    world.write("package/cuda/sm80/p.cu", "body-p\n");
    world.write("package/cuda/plain.cu", "body-plain\n");
    let calls = calls(&world, world.kernels().enable("sm80"));
    assert_eq!(targets(&calls, "cuda/sm80/p.cu"), PORTABLE);
    let constants = world.read("out/kernels_compiled.rs");
    constants.says("/// Targets that the family `sm80` was compiled for, under nvcc's names.\n");
    assert_eq!(targets(&calls, "cuda/sm90/a.cu"), ["sm_90a"]);
    // Sources of no family are compiled for the targets of every family. sm_90a takes the place of
    // sm_90.
    let all = ["sm_80", "sm_100", "sm_120", "compute_80", "sm_90a"];
    for source in ["cuda/all/c.cu", "cuda/plain.cu"] {
        assert_eq!(targets(&calls, source), all);
    }
    assert_eq!(constant(&world, "SM80"), format!("{PORTABLE:?}"));
    assert_eq!(constant(&world, "SM90"), "[\"sm_90a\"]");
    assert_eq!(constant(&world, "SM100"), "[]");
    assert_eq!(constant(&world, "ALL"), format!("{all:?}"));
}

#[test]
fn own_family() {
    let world = World::new();
    world.write("package/cuda/geforce-12/g.cu", "body-g\n");
    let own = Family::new("geforce-12", ["sm_120a", "compute_120"]);
    // A family that is declared and off leaves out its folder.
    let off = calls(&world, world.kernels().family(own.clone()));
    assert!(!off.contains("geforce"), "{off}");
    assert_eq!(constant(&world, "GEFORCE_12"), "[]");
    let on = calls(&world, world.kernels().family(own).enable("geforce-12"));
    let both = ["sm_120a", "compute_120"];
    assert_eq!(targets(&on, "cuda/geforce-12/g.cu"), both);
    assert_eq!(constant(&world, "GEFORCE_12"), format!("{both:?}"));
    // A built-in family can be replaced.
    world.write("package/cuda/sm80/p.cu", "body-p\n");
    let more = Family::sm80().target("sm_89");
    calls(&world, world.kernels().family(more).enable("sm80"));
    let more = [&PORTABLE[..], &["sm_89"]].concat();
    assert_eq!(constant(&world, "SM80"), format!("{more:?}"));
}

#[test]
fn no_family() {
    let world = World::new();
    let none = || {
        let bare = world.bare("package", "out").host_compiler(world.at("host"));
        bare.sources("cuda/**/*.cu")
    };
    refusal(none()).begins(
        "family: none is turned on; enable a feature of this package named one of sm80, sm90",
    );
    assert_eq!(none().enabled().unwrap(), NONE);
    none().constants("kernels").unwrap();
    assert_eq!(constant(&world, "SM90"), "[]");
    let on = none().enable("sm100").enable("sm90");
    assert_eq!(on.enabled().unwrap(), ["sm90", "sm100"]);
    on.constants("kernels").unwrap();
    assert_eq!(constant(&world, "ALL"), "[\"sm_90a\", \"sm_100f\"]");
    assert!(world.calls().is_empty());
}
