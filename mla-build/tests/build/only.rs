//! A check of the Rust code, which compiles no kernels and needs no CUDA.

use std::{fs, process::Command};

use crate::stub::{NONE, Says, World, fails, succeeds};

/// Makes a build without a toolkit. The machine's own must not be used.
fn build(world: &World, arguments: &[&str], (variable, value): (&str, &str)) -> Command {
    let mut build = world.command("out");
    build.env("MLA_CUDA_HOME", world.at("none"));
    build.args(arguments).env(variable, value);
    build
}

#[test]
fn bindings_need_no_toolkit() {
    let world = World::new();
    world.write("package/declared.rs", "pub fn declared();\n");
    let arguments = ["--declarations=declared.rs"];
    for variable in [("MLA_BUILD_ONLY", "bindings"), ("DOCS_RS", "1")] {
        succeeds(&mut build(&world, &arguments, variable));
        assert_eq!(world.read("out/kernels.rs"), "pub fn declared();\n");
        let constants = world.read("out/kernels_compiled.rs");
        constants.says("SM90: &[&str] = &[\"sm_90a\"]");
        assert!(!world.at("out/libpackage_kernels.a").exists());
        fs::remove_dir_all(world.at("out")).unwrap();
    }
    assert_eq!(world.calls(), NONE);
    let off = ("MLA_BUILD_ONLY", "");
    fails(&mut build(&world, &arguments, off)).says("MLA_CUDA_HOME: given");
}

#[test]
fn declarations_of_enabled_families() {
    let world = World::new();
    world.write("package/declared.rs", "pub fn shared();\n");
    world.write("package/cuda/sm80/own.rs", "pub fn portable();\n");
    world.write("package/cuda/sm90/own.rs", "pub fn hopper();\n");
    let with = |argument| {
        let arguments = [
            "--declarations=declared.rs",
            "--family-header=sm80=cuda/sm80/own.h",
            "--family-header=sm90=cuda/sm90/own.h",
            argument,
        ];
        build(&world, &arguments, ("MLA_BUILD_ONLY", "bindings"))
    };
    for (family, own) in [
        ("--family=sm90", "pub fn hopper();\n"),
        ("--family=sm100", ""),
    ] {
        succeeds(&mut with(family));
        let bindings = world.read("out/kernels.rs");
        assert_eq!(bindings, format!("pub fn shared();\n{own}"));
    }
    fails(&mut with("--family-header=sm91=own.h")).says("\"sm91\"");
}

#[test]
fn bad_switch_value() {
    let stderr = fails(&mut build(&World::new(), &[], ("MLA_BUILD_ONLY", "check")));
    stderr.says("MLA_BUILD_ONLY: given \"check\", accepted bindings, or new-bindings ");
}
