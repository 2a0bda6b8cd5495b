//! Packages of Cargo whose kernels have equal names, linked into one program.

use std::{fs, process::Command};

use crate::stub::{Says, World, fails, succeeds};

/// Writes a package whose build script runs the example `compile`.
///
/// Like every package made here, its library is called `decode` and has a host function `decode`
/// that returns `number`. A file with the extension `cu` has kernels as well.
fn package(world: &World, name: &str, [family, extension]: [&str; 2], number: u32, needs: &str) {
    let write = |file: &str, text: &str| world.write(&format!("{name}/{file}"), text);
    let arguments = [
        "--host-compiler=c++".to_owned(),
        format!("--family={family}"),
        format!("--library=decode=kernels/**/*.{extension}"),
        format!("--library=extra=extra/*.{extension}"),
    ];
    world.package(name, needs, "", &arguments);
    write(
        &format!("kernels/{family}/decode.{extension}"),
        &format!(
            "namespace decode_kernel {{ template <int> int which() {{ return {number}; }} }}\n\
             #ifdef __CUDACC__\n\
             template <int> __global__ void kernel(int *x) {{ *x = {number}; }}\n\
             __global__ void plain(int *x) {{ *x = {number}; }}\n\
             extern \"C\" int launch(int *x) {{\n  plain<<<1, 1>>>(x);\n  \
             kernel<1><<<1, 1>>>(x);\n  return cudaGetLastError();\n}}\n\
             #endif\n\
             int helper();\n\
             extern \"C\" int decode() {{\n  \
             return decode_kernel::which<1>() == helper() ? helper() : -1;\n}}\n"
        ),
    );
    write(
        &format!("kernels/{family}/helper.{extension}"),
        &format!("int helper() {{ return {number}; }}\n"),
    );
    // The second library has the same names.
    write(
        &format!("extra/decode.{extension}"),
        &format!("extern \"C\" int decode() {{ return 1000 + {number}; }}\n"),
    );
    write(
        "src/lib.rs",
        "mod compiled {\n    #![allow(dead_code)]\n    \
         include!(concat!(env!(\"OUT_DIR\"), \"/decode_compiled.rs\"));\n}\n\
         mod ffi {\n    unsafe extern \"C\" {\n        \
         #[link_name = concat!(env!(\"MLA_BUILD_PREFIX_DECODE\"), \"decode\")]\n        \
         pub fn decode() -> i32;\n        \
         #[link_name = concat!(env!(\"MLA_BUILD_PREFIX_EXTRA\"), \"decode\")]\n        \
         pub fn extra() -> i32;\n    }\n}\n\
         pub fn tell() -> String {\n    \
         let (decode, extra) = unsafe { (ffi::decode(), ffi::extra()) };\n    \
         format!(\"{decode} {extra} {:?}{:?}{:?} {}\", compiled::SM80.len(), compiled::SM90, \
         compiled::SM100, option_env!(\"MLA_BUILD_COMPILED\").unwrap_or(\"-\"))\n}\n",
    );
}

/// Makes a program of three packages, each with two libraries, and the command that runs it.
fn three_packages(world: &World, extension: &str) -> Command {
    package(world, "first", ["sm80", extension], 80, "");
    package(world, "second", ["sm90", extension], 90, "");
    let both = "first = { path = \"../first\" }\nsecond = { path = \"../second\" }\n";
    package(world, "program", ["sm100", extension], 100, both);
    world.write(
        "program/src/main.rs",
        "fn main() {\n    println!(\"{}\\n{}\\n{}\", first::tell(), program::tell(), \
         second::tell());\n}\n",
    );
    let mut run = world.cargo("program", "run");
    run.env("CARGO_TARGET_DIR", world.at("target"));
    run
}

/// Returns the program's expected output. For each package it names the library of its functions,
/// the compiled targets, and what its attribute is told.
fn each_its_own(told: [&str; 3]) -> String {
    let [first, program, second] = told;
    format!(
        "80 1080 5[][] {first}\n100 1100 0[][\"sm_100f\"] {program}\n\
         90 1090 0[\"sm_90a\"][] {second}\n"
    )
}

#[test]
#[ignore = "needs nvcc: cargo xtask toolkit && cargo test -p mla-build -- --ignored real"]
fn packages_with_real_kernels() {
    let world = World::new();
    let told = [
        "sm80:on:sm_80,sm_90,sm_100,sm_120,compute_80",
        "sm100:on:sm_100f",
        "sm90:on:sm_90a",
    ];
    let ran = succeeds(&mut three_packages(&world, "cu"));
    assert_eq!(ran.stdout, each_its_own(told));
}

#[test]
fn packages_with_two_libraries() {
    let world = World::new();
    // This is an archive without members, as the system's archiver makes it.
    let archive = world.at("toolkit/lib/libcudart_static.a");
    fs::remove_file(&archive).unwrap();
    succeeds(Command::new("ar").arg("crs").arg(&archive));
    let mut run = three_packages(&world, "cc");
    let ran = succeeds(run.env("MLA_CUDA_HOME", world.at("toolkit")));
    // C++ sources alone tell nothing.
    assert_eq!(ran.stdout, each_its_own(["-"; 3]));
    let report = |name: &str| world.at(&format!("target/mla-build/{name}.json"));
    for name in [
        "first-decode",
        "first-extra",
        "second-extra",
        "program-decode",
    ] {
        assert!(report(name).exists(), "{name}");
    }
}

#[test]
fn libraries_of_one_name() {
    let world = World::new();
    package(&world, "program", ["sm90", "cc"], 90, "");
    let script = world.read("program/build.rs");
    let script = script.replace("--library=extra=", "--library=decode=");
    world.write("program/build.rs", &script);
    let mut build = world.cargo("program", "build");
    fails(build.env("MLA_CUDA_HOME", world.at("toolkit"))).says(
        "library: given \"decode\", accepted a name that no other library of this build script \
         has",
    );
}
