//! A check of the Rust code, which compiles no kernels and needs no CUDA.

use std::{fs, process::Output};

use crate::stub::{Says, World};

fn build(world: &World, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut build = world.command("out");
    build
        .args(arguments)
        .envs(variables.iter().copied())
        // There is no toolkit, and the machine's own must not be used.
        .env("MLA_CUDA_HOME", world.at("none"))
        .output()
        .unwrap()
}

#[test]
fn bindings_need_no_toolkit() {
    let world = World::new();
    world.write("package/declared.rs", "pub fn declared();\n");
    let arguments = ["--declarations=declared.rs"];
    for variables in [[("MLA_BUILD_ONLY", "bindings")], [("DOCS_RS", "1")]] {
        let output = build(&world, &arguments, &variables);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        let bindings = fs::read_to_string(world.at("out/kernels.rs")).unwrap();
        assert_eq!(bindings, "pub fn declared();\n");
        let constants = fs::read_to_string(world.at("out/kernels_compiled.rs")).unwrap();
        constants.says("SM90: &[&str] = &[\"sm_90a\"]");
        assert!(!world.at("out/libpackage_kernels.a").exists());
        fs::remove_dir_all(world.at("out")).unwrap();
    }
    assert_eq!(world.calls(), [""; 0]);
    let output = build(&world, &arguments, &[("MLA_BUILD_ONLY", "")]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{stderr}");
    stderr.says("MLA_CUDA_HOME: given");
}

#[test]
fn declarations_of_enabled_families() {
    let world = World::new();
    world.write("package/declared.rs", "pub fn shared();\n");
    world.write("package/cuda/sm80/own.rs", "pub fn portable();\n");
    world.write("package/cuda/sm90/own.rs", "pub fn hopper();\n");
    let arguments = |third: &'static str| {
        [
            "--declarations=declared.rs",
            "--family-header=sm80=cuda/sm80/own.h",
            "--family-header=sm90=cuda/sm90/own.h",
            third,
        ]
    };
    let only = [("MLA_BUILD_ONLY", "bindings")];
    for (families, own) in [
        ("--family=sm90", "pub fn hopper();\n"),
        ("--family=sm100", ""),
    ] {
        let output = build(&world, &arguments(families), &only);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        let bindings = fs::read_to_string(world.at("out/kernels.rs")).unwrap();
        assert_eq!(bindings, format!("pub fn shared();\n{own}"));
    }
    let output = build(&world, &arguments("--family-header=sm91=own.h"), &only);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{stderr}");
    stderr.says("\"sm91\"");
}

#[test]
fn bad_switch_value() {
    let output = build(&World::new(), &[], &[("MLA_BUILD_ONLY", "check")]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    stderr.says("MLA_BUILD_ONLY: given \"check\", accepted bindings, or new-bindings ");
}
