//! The output of a build for people and tools to read.

use std::{collections::BTreeMap, fs};

use crate::stub::{ALL, NONE, Says, World, fails, refusal};
use mla_build::{
    budget::Budget,
    progress::Event,
    report::{self, Outcome, Report},
};

#[test]
fn report_is_complete() {
    let world = World::new();
    let built = world.build().unwrap();
    let read = Report::load(&world.at("out/kernels.report.json")).unwrap();
    assert_eq!(read, built.report);
    let sources = read.units.iter().map(|unit| &*unit.source);
    assert_eq!(sources.collect::<Vec<_>>(), ALL);
    let kernel = &read.units[2].kernels[0];
    assert_eq!((&*kernel.name, &*kernel.target), ("b_kernel", "sm_90a"));
    assert_eq!((kernel.registers, kernel.spill_stores), (40, 0));
    assert_eq!((kernel.shared, kernel.barriers), (2048, 1));
    assert_eq!(read.toolkit[0].version.as_deref(), Some("13.0.88"));
    assert_eq!(read.toolkit[0].path, world.at("toolkit"));
    assert_eq!(read.host_compiler.1, "(Stub) 12.2.0");

    // Units from the cache are described like compiled ones.
    let again = world.build().unwrap().report;
    assert_eq!(again.count(Outcome::Cached), 3);
    let (now, before) = (&again.units[2], &read.units[2]);
    assert_eq!(now.kernels, before.kernels);
    assert_eq!(now.compile_seconds, before.compile_seconds);
    assert!(now.peak > 0);
}

#[test]
fn newest_report() {
    let world = World::new();
    let target = world.at("target");
    fs::create_dir_all(&target).unwrap();
    let build = |library: &str| {
        let kernels = world.kernels_of("package", "target/debug/build/p-1/out");
        kernels.compile(library).unwrap();
        report::newest(&target).unwrap()
    };
    let none = report::newest(&target).unwrap_err().to_string();
    none.says("target/mla-build");
    // The folder existed before Cargo's first build, so Cargo leaves it unmarked.
    assert_eq!(build("older").library, "older");
    // Cargo marks its other target folders with this file.
    world.write("target/CACHEDIR.TAG", "");
    let newest = build("newer");
    assert_eq!(newest.library, "newer");
    let table = report::table(&newest);
    for part in [
        "cuda/sm90/b.cu",
        "b_kernel",
        "cached",
        "13.0.88",
        "Kernels::cuda_home",
        "3 units: 3 cached",
    ] {
        table.says(part);
    }
}

#[test]
fn failed_build_has_a_report() {
    let world = World::new();
    world.write("package/cuda/sm90/a.cu", "// error: no\n");
    // The units are in the order of the sources. The first is compiled, and the last has not begun.
    refusal(world.kernels().jobs(1));
    let report = Report::load(&world.at("out/kernels.report.json")).unwrap();
    assert_eq!(report.count(Outcome::Failed), 1);
    assert_eq!(report.count(Outcome::Compiled), 1);
}

#[test]
fn a_spill_breaks_the_budget() {
    let world = World::new();
    world.write("budget.toml", "[default]\nspill = 0\n");
    let budget = Budget::load(&world.at("budget.toml")).unwrap();
    assert_eq!(budget.check(&world.build().unwrap().report), NONE);
    world.write("package/cuda/sm90/a.cu", "// kernel: a_kernel 168 8\n");
    let violations = budget.check(&world.build().unwrap().report);
    assert_eq!(
        violations,
        ["a_kernel (sm_90a): spill: 16, allowed: at most 0"]
    );
}

#[test]
fn clangd_commands() {
    let world = World::new();
    let kernels = world.kernels().define("TILE=64").flag("-lineinfo");
    kernels
        .compile_commands("compile_commands.json")
        .flag("-Xcompiler=-Wall")
        .flag_for("cuda/sm90/a.cu", "-maxrregcount=128")
        .compile("kernels")
        .unwrap();
    let text = world.read("package/compile_commands.json");
    let commands: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    let files = commands.iter().map(|it| it["file"].as_str().unwrap());
    assert_eq!(files.collect::<Vec<_>>(), ALL);
    let has = |unit: usize, expected: &str| {
        let arguments = commands[unit]["arguments"].as_array().unwrap();
        arguments.iter().any(|argument| argument == expected)
    };
    for expected in [
        "--cuda-gpu-arch=sm_90a",
        "-DTILE=64",
        "-gline-tables-only",
        "-Wall",
        "-fPIC",
    ] {
        assert!(has(0, expected) && has(1, expected), "{expected}: {text}");
    }
    assert!(
        has(1, "--maxrregcount=128") && !has(0, "--maxrregcount=128"),
        "{text}"
    );
}

#[test]
fn progress_lines() {
    let world = World::new();
    world.write("package/cuda/sm90/a.cu", "// error: no\n");
    let mut build = world.command("out");
    build.env("MLA_BUILD_PROGRESS", world.at("events"));
    let stderr = fails(build.env("MLA_BUILD_KEEP_GOING", "1"));
    let mut finished = BTreeMap::new();
    for line in world.read("events").lines() {
        match serde_json::from_str(line).unwrap() {
            Event::Planned { units, cached, .. } => assert_eq!((units, cached), (3, 0)),
            Event::Finished {
                unit,
                outcome,
                error,
                ..
            } => drop(finished.insert(unit, (outcome, error.is_some()))),
            _ => {}
        }
    }
    let (good, bad) = ((Outcome::Compiled, false), (Outcome::Failed, true));
    assert_eq!(Vec::from_iter(finished.into_values()), [good, bad, good]);
    stderr.says("failed    cuda/sm90/a.cu (sm_90a)");
}
