//! The output of a build for people and tools to read.

use std::{collections::BTreeMap, fs};

use crate::stub::{ALL, Says, World};
use mla_build::{
    budget::Budget,
    report::{self, Outcome, Report},
};

#[test]
fn report_is_complete() {
    let world = World::new();
    let built = world.build().unwrap();
    let read = Report::load(&world.at("out/kernels.report.json")).unwrap();
    assert_eq!(read, built.report);
    assert_eq!(
        read.units
            .iter()
            .map(|unit| unit.source.as_str())
            .collect::<Vec<_>>(),
        ALL
    );
    let kernel = &read.units[2].kernels[0];
    assert_eq!(
        (kernel.name.as_str(), kernel.target.as_str()),
        ("b_kernel", "sm_90a")
    );
    assert_eq!(
        (
            kernel.registers,
            kernel.spill_stores,
            kernel.shared,
            kernel.barriers
        ),
        (40, 0, 2048, 1)
    );
    assert_eq!(read.toolkit[0].version.as_deref(), Some("13.0.88"));
    assert_eq!(read.toolkit[0].path, world.at("toolkit"));
    assert_eq!(read.host_compiler.1, "(Stub) 12.2.0");

    // Units from the cache are described like compiled ones.
    let again = world.build().unwrap().report;
    assert_eq!(again.count(Outcome::Cached), 3);
    assert_eq!(again.units[2].kernels, read.units[2].kernels);
    assert_eq!(
        again.units[2].compile_seconds,
        read.units[2].compile_seconds
    );
    assert!(again.units[2].peak > 0);
}

#[test]
fn newest_report() {
    let world = World::new();
    fs::create_dir_all(world.at("target")).unwrap();
    assert!(
        report::newest(&world.at("target"))
            .unwrap_err()
            .to_string()
            .contains("target/mla-build")
    );
    // Cargo marks its target folder with this file.
    world.write("target/CACHEDIR.TAG", "");
    for (package, library) in [("package", "older"), ("package", "newer")] {
        world
            .kernels_of(package, "target/debug/build/p-1/out")
            .compile(library)
            .unwrap();
    }
    let newest = report::newest(&world.at("target")).unwrap();
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
        assert!(table.contains(part), "{part}:\n{table}");
    }
}

#[test]
fn unmarked_target_folder() {
    // The folder existed before Cargo's first build, so Cargo leaves it unmarked.
    let world = World::new();
    world
        .kernels_of("package", "target/debug/build/p-1/out")
        .compile("kernels")
        .unwrap();
    let newest = report::newest(&world.at("target")).unwrap();
    assert_eq!(newest.library, "kernels");
}

#[test]
fn failed_build_has_a_report() {
    let world = World::new();
    world.write("package/cuda/sm90/a.cu", "// error: no\n");
    // The units are in the order of the sources. The first is compiled, and the last has not begun.
    world.kernels().jobs(1).compile("kernels").unwrap_err();
    let report = Report::load(&world.at("out/kernels.report.json")).unwrap();
    assert_eq!(report.count(Outcome::Failed), 1);
    assert_eq!(report.count(Outcome::Compiled), 1);
}

#[test]
fn a_spill_breaks_the_budget() {
    let world = World::new();
    world.write("budget.toml", "[default]\nspill = 0\n");
    let budget = Budget::load(&world.at("budget.toml")).unwrap();
    assert_eq!(budget.check(&world.build().unwrap().report), [""; 0]);
    world.write("package/cuda/sm90/a.cu", "// kernel: a_kernel 168 8\n");
    let violations = budget.check(&world.build().unwrap().report);
    assert_eq!(violations.len(), 1);
    assert_eq!(
        violations[0].to_string(),
        "a_kernel (sm_90a): spill: 16, allowed: at most 0"
    );
}

#[test]
fn clangd_commands() {
    let world = World::new();
    world
        .kernels()
        .compile_commands("compile_commands.json")
        .define("TILE=64")
        .flag("-lineinfo")
        .flag("-Xcompiler=-Wall")
        .flag_for("cuda/sm90/a.cu", "-maxrregcount=128")
        .compile("kernels")
        .unwrap();
    let text = fs::read_to_string(world.at("package/compile_commands.json")).unwrap();
    let commands: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    assert_eq!(
        commands
            .iter()
            .map(|command| command["file"].as_str().unwrap())
            .collect::<Vec<_>>(),
        ALL
    );
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
    let output = world
        .command("out")
        .env("MLA_BUILD_PROGRESS", world.at("events"))
        .env("MLA_BUILD_KEEP_GOING", "1")
        .output()
        .unwrap();
    assert!(!output.status.success());
    let text = fs::read_to_string(world.at("events")).unwrap();
    let mut finished = BTreeMap::new();
    for line in text.lines() {
        match serde_json::from_str(line).unwrap() {
            mla_build::progress::Event::Planned { units, cached, .. } => {
                assert_eq!((units, cached), (3, 0))
            }
            mla_build::progress::Event::Finished {
                unit,
                outcome,
                error,
                ..
            } => {
                finished.insert(unit, (outcome, error.is_some()));
            }
            _ => {}
        }
    }
    let (good, bad) = ((Outcome::Compiled, false), (Outcome::Failed, true));
    assert_eq!(
        finished.into_values().collect::<Vec<_>>(),
        [good, bad, good]
    );
    let stderr = String::from_utf8_lossy(&output.stderr);
    stderr.says("failed    cuda/sm90/a.cu (sm_90a)");
}
