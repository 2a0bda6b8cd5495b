//! Unusual paths for the package, its target folder, its sources, its headers and its tools.

use std::{fs, path::PathBuf, process::Command};

use crate::stub::{ALL, Says, World, succeeded};
use mla_build::Kernels;

const NONE: [&str; 0] = [];

/// A folder name with all characters that have a meaning for a shell or nvcc.
const STRANGE: &str = "my $(touch ran) `touch ran` \"kernels\" (it's) & more, a=b";

/// Moves the package into a folder with a strange name, and its output below it.
fn strange(world: &World) -> (String, String) {
    let package = format!("{STRANGE}/package");
    fs::create_dir(world.at(STRANGE)).unwrap();
    fs::rename(world.at("package"), world.at(&package)).unwrap();
    (package.clone(), format!("{package}/target/out"))
}

/// Returns the file names. If the package's path is strange, nvcc compiles a file that includes the
/// source.
fn names(paths: Vec<String>) -> Vec<String> {
    let name = |path: String| path.rsplit('/').next().unwrap_or_default().to_owned();
    paths.into_iter().map(name).collect()
}

/// True if a command in a path's name ran.
fn ran(world: &World) -> bool {
    walkdir::WalkDir::new(world.at(""))
        .into_iter()
        .any(|entry| entry.unwrap().file_name() == "ran")
        || PathBuf::from("ran").exists()
}

#[test]
fn any_package_place() {
    let world = World::new();
    assert_eq!(world.compiled(), ALL);
    let (package, out) = strange(&world);
    // A folder of generated files in OUT_DIR may be an include root, since it lies in the package.
    world.write(&format!("{out}/generated/made.h"), "made-1\n");
    world.write(
        &format!("{package}/cuda/sm90/d.cu"),
        "#include <made.h>\nbody-d\n",
    );
    let kernels = || {
        world
            .kernels_of(&package, &out)
            .cache(world.at("second cache"))
            .include("target/out/generated")
    };
    assert_eq!(world.compiled_by(kernels()).len(), 4);
    for text in ["body-a", "body-d", "made-1", "layout-1"] {
        assert!(world.library(&out).contains(text), "{text}");
    }
    assert_eq!(world.compiled_by(kernels()), NONE);
    world.write(&format!("{package}/cuda/common/shared.h"), "shared-2\n");
    assert_eq!(names(world.compiled_by(kernels())), ["a.cu", "b.cu"]);
    assert!(!ran(&world), "no part of a name is a command");
}

#[test]
fn strange_checkout_shares_objects() {
    let world = World::new();
    world.compiled();
    let (package, out) = strange(&world);
    assert_eq!(world.compiled_by(world.kernels_of(&package, &out)), NONE);
}

#[test]
fn cargo_in_a_strange_folder() {
    let world = World::new();
    let (package, _) = strange(&world);
    world.write(
        &format!("{package}/Cargo.toml"),
        "[package]\nname = \"strange\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[workspace]\n",
    );
    world.write(
        &format!("{package}/cuda/all/c.cu"),
        "// symbol: kernels_answer\n",
    );
    let host = format!("--host-compiler={}", world.at("host").display());
    world.write(
        &format!("{package}/build.rs"),
        &format!(
            "fn main() {{\n    let status = std::process::Command::new({:?})\
             .args([\"--include=cuda\", {host:?}]).status();\n    \
             assert!(status.unwrap().success());\n}}\n",
            crate::stub::driver()
        ),
    );
    world.write(&format!("{package}/src/main.rs"), "fn main() {}\n");
    let output = Command::new(env!("CARGO"))
        .args(["run", "--offline", "--quiet"])
        .current_dir(world.at(&package))
        .env_remove("CARGO_TARGET_DIR")
        .env("MLA_BUILD_CACHE", world.at("cache"))
        .env("MLA_CUDA_HOME", world.at("toolkit"))
        .output()
        .unwrap();
    succeeded(&output);
    assert_eq!(names(world.calls()), ["a.cu", "b.cu", "c.cu"]);
    assert!(!ran(&world));
}

#[test]
fn bad_path_characters() {
    let world = World::new();
    let says = |kernels: Kernels, expected: &str| {
        let message = kernels.compile("kernels").unwrap_err().to_string();
        message.says(expected);
        assert_eq!(world.calls(), NONE);
    };
    world.write("head$ers/x.h", "");
    says(
        world.kernels().include(world.at("head$ers")),
        "accepted a path without '$', which nvcc hands to a shell",
    );
    world.write("package/it's/x.h", "");
    says(
        world.kernels().include("it's"),
        "include: given \"it's\", accepted a path without '\\''",
    );
    world.write("package/odd/a,b.cu", "");
    says(
        world.kernels().sources("odd/*.cu"),
        "sources: given \"a,b.cu\", accepted a path without ','",
    );
    fs::remove_file(world.at("package/odd/a,b.cu")).unwrap();
    world.write("package/$(touch ran)/x.cu", "");
    says(
        world.kernels().sources("$*/*.cu"),
        "sources: given \"$(touch ran)/x.cu\", accepted a path without '$'",
    );
    fs::remove_dir_all(world.at("package/$(touch ran)")).unwrap();
    std::os::unix::fs::symlink(world.at("toolkit"), world.at("tool`kit")).unwrap();
    says(
        world.kernels().cuda_home(world.at("tool`kit")),
        "accepted a path without '`'",
    );
    says(
        world.kernels().define("NAME=$(touch ran)"),
        "define: given \"NAME=$(touch ran)\", accepted a macro without '$'",
    );
    says(
        world
            .kernels()
            .define_for("cuda/**/*.cu", "NAME=`touch ran`"),
        "define: given \"NAME=`touch ran`\", accepted a macro without '`'",
    );
    says(world.kernels_of("package", "out\nput"), "OUT_DIR: given");
    assert!(!ran(&world));
}
