//! Headers of a wheel that the package pins.

use std::{fs, process::Command};

use crate::stub::{Says, World, fails, succeeds};

/// Makes a package whose source shows which CUTLASS it was compiled with, and a wheel with its own
/// CUTLASS.
fn world() -> World {
    let world = World::new();
    world.program(
        "host",
        "#!/bin/sh\n[ \"$1\" = --version ] && echo 'c++ (Stub) 12.2.0' && exit\nexec c++ \"$@\"\n",
    );
    world.write(
        "package/shim/which.cc",
        "#include <cutlass/cutlass.h>\n#include <only/here.h>\n\
         extern \"C\" const char *which_cutlass() { return CUTLASS HERE; }\n",
    );
    let header = |of: &str| format!("#define CUTLASS \"cutlass of {of}, \"\n");
    world.write("cutlass/include/cutlass/cutlass.h", &header("the toolkit"));
    for version in ["1.0", "1.1.post1"] {
        let write = |file: &str, text: &str| {
            world.write(&format!("wheels/flash-infer-{version}/{file}"), text);
        };
        write(&format!("flash_infer-{version}.dist-info/METADATA"), "");
        let own = header(&format!("wheel {version}"));
        write("flash/include/cutlass/cutlass.h", &own);
        write("flash/include/only/here.h", "#define HERE \"here\"\n");
    }
    world
}

/// Builds with a wheel that a variable leads to, and returns what the build printed.
fn build(world: &World, pin: &str, place: (&str, &str)) -> String {
    succeeds(&mut with_wheel(world, pin, place)).stderr
}

fn with_wheel(world: &World, pin: &str, (variable, folder): (&str, &str)) -> Command {
    let mut build = world.command("out");
    build
        .args(["--sources=shim/*.cc", "--cutlass", "--wheel"])
        .arg(format!("{pin}:flash/include"))
        .env(variable, world.at(folder))
        .env("MLA_CUTLASS", world.at("cutlass"));
    build
}

#[test]
fn the_pinned_version_is_taken_and_comes_before_cutlass() {
    let world = world();
    for version in ["1.1.post1", "1.0"] {
        let pin = format!("Flash_Infer=={version}");
        let text = build(&world, &pin, ("MLA_WHEELS", "wheels"));
        text.says("0 cached, 1 to compile");
        let library = world.library("out");
        library.says(&format!("cutlass of wheel {version}, here"));
    }
    // A wheel in another place counts as the same, since only its content matters.
    fs::rename(world.at("wheels"), world.at("moved")).unwrap();
    let moved = ("MLA_WHEEL_FLASH_INFER", "moved/flash-infer-1.0");
    build(&world, "flash-infer==1.0", moved).says("1 cached, 0 to compile");
    let report = world.read("out/kernels.report.json");
    report.says("MLA_WHEEL_FLASH_INFER");

    // The folder in which a wheel is looked for is the one into which the command installs it.
    let missing = ("MLA_WHEELS", "moved");
    let folder = world.named("moved/flash-infer-2.0");
    fails(&mut with_wheel(&world, "flash-infer==2.0", missing)).says(&format!(
        "python3 -m pip install --no-deps --target {folder} flash-infer==2.0"
    ));
}
