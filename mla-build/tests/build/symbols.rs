//! Names of a library: they are unique to it, and it defines each of them once.

use std::{fs, path::Path, process::Command};

use crate::stub::{Says, World, refusal, succeeds};
use mla_build::{Built, Family, Kernels};

/// Makes a package whose sources, names and library are called the same as in every other. The real
/// C++ compiler compiles it.
fn package(world: &World, name: &str, number: u32) -> Kernels {
    let at = |file: &str| format!("{name}/kernels/{file}");
    // One weak name has different bodies. Of two in one program, a linker keeps one.
    world.write(
        &at("common/which.h"),
        &format!(
            "namespace kernels {{\n\
             template <int> int which() {{ static int called = 0; return {number} + called++ * 0; \
             }}\n\
             struct Base {{ virtual ~Base() {{}} virtual int which() {{ return {number}; }} }};\n\
             inline int table[] = {{ {number} }};\n}}\n"
        ),
    );
    world.write(
        &at("own/decode.cc"),
        "#include \"which.h\"\nint helper();\nint common_value;\n\
         extern \"C\" int decode(void) {\n  kernels::Base base;\n  \
         return kernels::which<1>() == base.which() && helper() == kernels::table[0] ? helper() : \
         -1;\n}\n",
    );
    world.write(
        &at("own/helper.cc"),
        "#include \"which.h\"\nint helper() { return kernels::which<1>(); }\n",
    );
    world
        .bare(name, &format!("{name}/out"))
        .host_compiler("c++")
        .sources("kernels/**/*.cc")
        .include("kernels/common")
        .family(Family::new("own", [format!("sm_{number}")]))
        .enable("own")
}

fn link(world: &World, main: &str, libraries: &[&Path]) -> Command {
    world.write("main.c", main);
    let program = world.at("program");
    let mut compiler = Command::new("c++");
    compiler.arg("-o").arg(&program).args(["-x", "c"]);
    compiler.arg(world.at("main.c")).args(["-x", "none"]);
    succeeds(compiler.args(libraries));
    Command::new(program)
}

#[test]
fn packages_with_equal_names() {
    let world = World::new();
    let numbers = [("first", 80), ("second", 90), ("third", 120)];
    let built: Vec<Built> = numbers
        .iter()
        .map(|&(name, number)| package(&world, name, number).compile("decode").unwrap())
        .collect();
    let main = "extern int first_decode__decode(void), second_decode__decode(void),\n\
                third_decode__decode(void);\n#include <stdio.h>\n\
                int main(void) { printf(\"%d %d %d\", first_decode__decode(), \
                second_decode__decode(), third_decode__decode()); return 0; }\n";
    let mut libraries: Vec<_> = built.iter().map(|built| built.library.as_path()).collect();
    // Every order is tried, since a linker takes what it finds first.
    for _ in 0..3 {
        libraries.rotate_left(1);
        let ran = succeeds(&mut link(&world, main, &libraries));
        assert_eq!(ran.stdout, "80 90 120");
    }
    let names: Vec<_> = libraries.iter().map(|path| path.file_name()).collect();
    assert!(names[0] != names[1] && names[1] != names[2], "{names:?}");
}

#[test]
fn shared_library_exports() {
    let world = World::new();
    let built = package(&world, "first", 80).compile("decode").unwrap();
    let shared = world.at("libshared.so");
    let mut linker = Command::new("c++");
    linker.arg("-shared").arg("-o").arg(&shared);
    linker.arg("-Wl,--whole-archive").arg(&built.library);
    succeeds(linker.arg("-Wl,--no-whole-archive"));
    let mut list = Command::new("nm");
    list.args(["--dynamic", "--defined-only", "--format=just-symbols"]);
    let listed = succeeds(list.arg(&shared)).stdout;
    let names: Vec<_> = listed.lines().collect();
    // A C++ variable outside any namespace is not mangled, so it counts as C.
    assert_eq!(
        names,
        ["first_decode__common_value", "first_decode__decode"]
    );
}

#[test]
fn double_definition_is_refused() {
    let world = World::new();
    world.write("package/cuda/sm90/a.cu", "// symbol: twice\n");
    world.write("package/cuda/sm90/b.cu", "// symbol: twice\n");
    refusal(world.kernels()).begins(
        "symbol twice: given definitions in cuda/sm90/a.cu and cuda/sm90/b.cu, accepted one in a \
         library",
    );
    assert!(!world.at("out/libpackage_kernels.a").exists());
    world.write("package/cuda/sm90/b.cu", "// symbol: once\n");
    assert_eq!(world.compiled(), ["cuda/sm90/b.cu"]);
    world.library("out").says("package_kernels__twice");

    let same = package(&world, "first", 80);
    world.write(
        "first/kernels/own/other.cc",
        "namespace deep { int helper(float) { return 1; } }\nint helper() { return 2; }\n",
    );
    refusal(same).begins(
        "symbol helper(): given definitions in kernels/own/helper.cc and kernels/own/other.cc",
    );
}

#[test]
fn kernels_of_one_name() {
    let world = World::new();
    let kernel = |source: &str, registers: u32| {
        let text = format!("// kernel: _Z6decodeILi64EEvPf {registers} 0\n");
        world.write(&format!("package/cuda/sm90/{source}.cu"), &text);
    };
    // Two sources instantiate the same template.
    kernel("a", 40);
    kernel("b", 40);
    world.build().unwrap();
    kernel("b", 48);
    refusal(world.kernels()).begins(
        "kernel void decode<64>(float*): given different code in cuda/sm90/a.cu and cuda/sm90/b.cu",
    );
}

#[test]
fn no_object_is_named() {
    let world = World::new();
    world.program(
        "toolkit/bin/nvcc",
        "#!/bin/sh\n[ \"$1\" = --version ] && exec cat \"$(dirname \"$0\")/../version\"\n\
         while [ $# -gt 0 ]; do case $1 in -o) echo text >\"$2\" ;; -MF) echo 'unit.o:' >\"$2\" ;; \
         esac; shift; done\n",
    );
    refusal(world.kernels()).begins("cuda/all/c.cu: what the compiler made of it is no ELF object");
    assert!(fs::read_dir(world.at("out")).unwrap().count() > 0);
}
