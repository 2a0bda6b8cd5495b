//! Headers of a wheel that the package pins.

use std::{fs, process::Output};

use crate::stub::{Says, World};

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
        let site = format!("wheels/flash-infer-{version}");
        world.write(
            &format!("{site}/flash_infer-{version}.dist-info/METADATA"),
            "",
        );
        world.write(
            &format!("{site}/flash/include/cutlass/cutlass.h"),
            &header(&format!("wheel {version}")),
        );
        world.write(
            &format!("{site}/flash/include/only/here.h"),
            "#define HERE \"here\"\n",
        );
    }
    world
}

fn build(world: &World, pin: &str) -> Output {
    world
        .command("out")
        .args(["--sources=shim/*.cc", "--cutlass", "--wheel"])
        .arg(format!("{pin}:flash/include"))
        .env("MLA_WHEELS", world.at("wheels"))
        .env("MLA_CUTLASS", world.at("cutlass"))
        .output()
        .unwrap()
}

#[test]
fn the_pinned_version_is_taken_and_comes_before_cutlass() {
    let world = world();
    for version in ["1.1.post1", "1.0"] {
        let built = build(&world, &format!("Flash_Infer=={version}"));
        let text = String::from_utf8_lossy(&built.stderr);
        assert!(built.status.success(), "{text}");
        let expected = format!("cutlass of wheel {version}, here");
        assert!(world.library("out").contains(&expected), "{expected}");
        text.says("0 cached, 1 to compile");
    }
    // A wheel in another place counts as the same, since only its content matters.
    fs::rename(world.at("wheels"), world.at("moved")).unwrap();
    let moved = world.at("moved/flash-infer-1.0");
    let built = world
        .command("out")
        .args(["--sources=shim/*.cc", "--cutlass"])
        .arg("--wheel=flash-infer==1.0:flash/include")
        .env("MLA_WHEEL_FLASH_INFER", moved)
        .env("MLA_CUTLASS", world.at("cutlass"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{text}");
    text.says("1 cached, 0 to compile");
    let report = fs::read_to_string(world.at("out/kernels.report.json")).unwrap();
    report.says("MLA_WHEEL_FLASH_INFER");
}

#[test]
fn a_version_that_is_not_there_is_refused_with_the_command_that_installs_it() {
    let world = world();
    let built = build(&world, "flash-infer==2.0");
    let text = String::from_utf8_lossy(&built.stderr);
    assert!(!built.status.success());
    let target = world.at("wheels/flash-infer-2.0");
    for part in [
        "the wheel flash-infer 2.0 is nowhere to be found",
        &format!(
            "python3 -m pip install --no-deps --target {} flash-infer==2.0",
            target.display()
        ),
    ] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
}
