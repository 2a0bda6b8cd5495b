//! Unusual paths for the package, its target folder, its sources, its headers and its tools.

use std::{fs, os::unix::fs::symlink, path::Path};

use crate::stub::{ALL, NONE, Says, World, refusal, succeeds};

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
    let mut files = world.files("").into_iter();
    files.any(|file| file.ends_with("ran")) || Path::new("ran").exists()
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
        world.library(&out).says(text);
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
    let arguments = ["--include=cuda".to_owned(), world.host_argument()];
    world.package(&package, "", "", &arguments);
    let symbol = "// symbol: kernels_answer\n";
    world.write(&format!("{package}/cuda/all/c.cu"), symbol);
    world.write(&format!("{package}/src/main.rs"), "fn main() {}\n");
    let mut run = world.cargo(&package, "run");
    succeeds(run.env("MLA_CUDA_HOME", world.at("toolkit")));
    assert_eq!(names(world.calls()), ["a.cu", "b.cu", "c.cu"]);
    assert!(!ran(&world));
}

#[test]
fn bad_path_characters() {
    let world = World::new();
    for file in [
        "head$ers/x.h",
        "package/it's/x.h",
        "package/odd/a,b.cu",
        "package/lines/a\nb.cu",
    ] {
        world.write(file, "");
    }
    world.write("package/$(touch ran)/x.cu", "");
    symlink(world.at("toolkit"), world.at("tool`kit")).unwrap();
    for (kernels, expected) in [
        (
            world.kernels().include(world.at("head$ers")),
            "accepted a path without '$', which nvcc hands to a shell",
        ),
        (
            world.kernels().include("it's"),
            "include: given \"it's\", accepted a path without '\\''",
        ),
        (
            world.kernels().sources("odd/*.cu"),
            "sources: given \"a,b.cu\", accepted a path without ','",
        ),
        (
            world.kernels().sources("lines/*.cu"),
            "accepted a path without '\\n'",
        ),
        (
            world.kernels().sources("$*/*.cu"),
            "sources: given \"$(touch ran)/x.cu\", accepted a path without '$'",
        ),
        (
            world.kernels().cuda_home(world.at("tool`kit")),
            "accepted a path without '`'",
        ),
        (
            world.kernels().define("NAME=$(touch ran)"),
            "define: given \"NAME=$(touch ran)\", accepted a macro without '$'",
        ),
        (
            world.kernels().define_for("cuda/**", "NAME=`touch ran`"),
            "define: given \"NAME=`touch ran`\", accepted a macro without '`'",
        ),
        (world.kernels_of("package", "out\nput"), "OUT_DIR: given"),
    ] {
        refusal(kernels).says(expected);
        assert_eq!(world.calls(), NONE);
    }
    assert!(!ran(&world));
}
