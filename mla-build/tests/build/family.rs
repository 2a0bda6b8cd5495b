//! The targets of each source, and what the package is told about them.

use std::fs;

use crate::stub::{Says, World};
use mla_build::{Family, Kernels};

const PORTABLE: [&str; 5] = ["sm_80", "sm_90", "sm_100", "sm_120", "compute_80"];

/// Returns the targets that nvcc was asked for, by source.
fn gencodes(world: &World, kernels: Kernels) -> Vec<(String, Vec<String>)> {
    world.calls();
    kernels.compile("kernels").unwrap();
    let calls = fs::read_to_string(world.at("calls")).unwrap_or_default();
    let mut asked: Vec<_> = calls
        .lines()
        .map(|line| {
            let codes = line
                .split(' ')
                .filter_map(|word| word.strip_prefix("-gencode=")?.split_once(",code="))
                .map(|(_, code)| code.to_owned())
                .collect();
            (line.split(' ').next().unwrap_or_default().to_owned(), codes)
        })
        .collect();
    asked.sort();
    asked
}

/// Returns the value of a constant in the file that the package includes.
fn constant(world: &World, name: &str) -> String {
    let text = fs::read_to_string(world.at("out/kernels_compiled.rs")).unwrap();
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
    let asked = gencodes(&world, world.kernels().enable("sm80"));
    let of = |source: &str| {
        let calls: Vec<_> = asked.iter().filter(|(known, _)| known == source).collect();
        assert_eq!(calls.len(), 1, "{asked:?}");
        calls[0].1.clone()
    };
    assert_eq!(of("cuda/sm80/p.cu"), PORTABLE);
    assert_eq!(of("cuda/sm90/a.cu"), ["sm_90a"]);
    // Sources of no family are compiled for the targets of every family. sm_90a takes the place of
    // sm_90.
    let all = ["sm_80", "sm_100", "sm_120", "compute_80", "sm_90a"];
    assert_eq!(of("cuda/all/c.cu"), all);
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
    let off = gencodes(&world, world.kernels().family(own.clone()));
    assert!(off.iter().all(|(source, _)| !source.contains("geforce")));
    assert_eq!(constant(&world, "GEFORCE_12"), "[]");
    let on = gencodes(&world, world.kernels().family(own).enable("geforce-12"));
    assert!(on.contains(&(
        "cuda/geforce-12/g.cu".into(),
        vec!["sm_120a".into(), "compute_120".into()]
    )));
    assert_eq!(
        constant(&world, "GEFORCE_12"),
        "[\"sm_120a\", \"compute_120\"]"
    );
}

#[test]
fn additional_target() {
    let world = World::new();
    world.write("package/cuda/sm80/p.cu", "body-p\n");
    let more = Family::sm80().target("sm_89");
    let asked = gencodes(&world, world.kernels().family(more).enable("sm80"));
    let of = |source: &str| asked.iter().find(|(known, _)| known == source).unwrap();
    assert_eq!(of("cuda/sm80/p.cu").1.last().unwrap(), "sm_89");

    let built = world
        .command("out")
        .arg("--family=sm80")
        .env("MLA_BUILD_TARGETS_SM80", "sm_86")
        .output()
        .unwrap();
    assert!(built.status.success(), "{built:?}");
    assert_eq!(constant(&world, "SM80"), "[\"sm_86\"]");
    assert_eq!(constant(&world, "ALL"), "[\"sm_86\"]");
    let refused = world
        .command("out")
        .arg("--family=sm80")
        .env("MLA_BUILD_TARGETS_SM80", "sm_85")
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&refused.stderr);
    message.says("MLA_BUILD_TARGETS_SM80: given \"sm_85\", accepted sm_75, sm_80");
}

#[test]
fn no_family() {
    let world = World::new();
    let none = || {
        Kernels::new()
            .sources("cuda/**/*.cu")
            .include("cuda")
            .root(world.at("package"))
            .out_dir(world.at("out"))
            .cache(world.at("cache"))
            .cuda_home(world.at("toolkit"))
            .host_compiler(world.at("host"))
    };
    let message = none().compile("kernels").unwrap_err().to_string();
    assert!(
        message.starts_with(
            "family: none is turned on; enable a feature of this package named one of sm80, sm90"
        ),
        "{message}"
    );
    assert_eq!(none().enabled().unwrap(), [""; 0]);
    none().constants("kernels").unwrap();
    assert_eq!(constant(&world, "SM90"), "[]");
    let on = none().enable("sm100").enable("sm90");
    assert_eq!(on.enabled().unwrap(), ["sm90", "sm100"]);
    on.constants("kernels").unwrap();
    assert_eq!(constant(&world, "ALL"), "[\"sm_90a\", \"sm_100f\"]");
    assert!(world.calls().is_empty());
}
