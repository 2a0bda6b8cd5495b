//! Changes that give a source another meaning without changing any file that it reads. None of them
//! may leave a stale object.

use std::{fs, time::Duration};

use crate::stub::{ALL, World, succeeded};

const NONE: [&str; 0] = [];

#[test]
fn hiding_header_in_nested_roots() {
    let world = World::new();
    // `outer` is searched before `outer/inner`. Both hold a file that `inner/tile.h` could mean.
    world.write("package/outer/inner/tile.h", "tile-inner\n");
    world.write("package/cuda/sm90/d.cu", "#include <tile.h>\nbody-d\n");
    let kernels = || world.kernels().include("outer").include("outer/inner");
    world.compiled_by(kernels());
    world.write("package/outer/tile.h", "tile-outer\n");
    assert_eq!(world.compiled_by(kernels()), ["cuda/sm90/d.cu"]);
    assert!(world.library("out").contains("tile-outer"));
    assert!(!world.library("out").contains("tile-inner"));
    fs::remove_file(world.at("package/outer/tile.h")).unwrap();
    assert_eq!(world.compiled_by(kernels()), NONE);
    assert!(world.library("out").contains("tile-inner"));
}

#[test]
fn header_beside_header_hides() {
    let world = World::new();
    world.write("package/cuda/common/deep/a.h", "#include \"b.h\"\n");
    world.write("package/cuda/b.h", "b-root\n");
    world.write("package/cuda/sm90/d.cu", "#include <common/deep/a.h>\n");
    world.compiled();
    world.write("package/cuda/common/deep/b.h", "b-beside\n");
    assert_eq!(world.compiled(), ["cuda/sm90/d.cu"]);
    assert!(world.library("out").contains("b-beside"));
}

#[test]
fn header_beside_source_hides() {
    let world = World::new();
    world.write("package/cuda/tile.h", "tile-root\n");
    // The stub is told the value of the macro.
    world.write(
        "package/cuda/sm90/d.cu",
        "#define TILE \"tile.h\"\n#include TILE\n// has: tile.h\n",
    );
    world.compiled();
    assert!(world.library("out").contains("tile-root"));
    assert_eq!(world.compiled(), NONE);
    world.write("package/cuda/sm90/tile.h", "tile-beside\n");
    assert_eq!(world.compiled(), ["cuda/sm90/d.cu"]);
    assert!(world.library("out").contains("tile-beside"));
}

#[test]
fn own_header_hides_system_header() {
    let world = World::new();
    world.write("system/stdint.h", "stdint-system\n");
    world.host_with_folders("(Stub) 12.2.0", &[world.at("system")]);
    world.write("package/cuda/sm90/d.cu", "#include <stdint.h>\n");
    world.compiled();
    assert!(world.library("out").contains("stdint-system"));
    world.write("package/cuda/stdint.h", "stdint-own\n");
    assert_eq!(world.compiled(), ["cuda/sm90/d.cu"]);
    assert!(world.library("out").contains("stdint-own"));
}

#[test]
fn has_include_header() {
    let world = World::new();
    world.write(
        "package/cuda/sm90/d.cu",
        "#if __has_include(<extra.h>)\n#endif\n// has: extra.h\n",
    );
    world.compiled();
    world.write("package/cuda/extra.h", "extra-1\n");
    assert_eq!(world.compiled(), ["cuda/sm90/d.cu"]);
    assert!(world.library("out").contains("extra-1"));
    fs::remove_file(world.at("package/cuda/extra.h")).unwrap();
    assert_eq!(world.compiled(), NONE, "its object is still there");
    assert!(!world.library("out").contains("extra-1"));
}

#[test]
fn new_header_in_cpath() {
    let world = World::new();
    world.write("system/stdint.h", "stdint-system\n");
    world.write("package/cuda/sm90/d.cu", "#include <stdint.h>\n");
    fs::create_dir(world.at("mine")).unwrap();
    // The host compiler lists the folders of CPATH before its own.
    world.host_with_folders("(Stub) 12.2.0", &[world.at("mine"), world.at("system")]);
    let build = || {
        let output = world
            .command("out")
            .env("CPATH", world.at("mine"))
            .output()
            .unwrap();
        succeeded(&output);
        world.calls()
    };
    assert_eq!(build().len(), 4);
    assert_eq!(build(), NONE);
    world.write("mine/stdint.h", "stdint-mine\n");
    assert_eq!(build(), ["cuda/sm90/d.cu"]);
    assert!(world.library("out").contains("stdint-mine"));
}

#[test]
fn option_file_content_counts() {
    let world = World::new();
    world.write("package/flags.opt", "-lineinfo --options-file more.opt\n");
    world.write("package/more.opt", "-maxrregcount=128\n");
    let kernels = || world.kernels().flag("--options-file=flags.opt");
    assert_eq!(world.compiled_by(kernels()), ALL);
    assert_eq!(world.compiled_by(kernels()), NONE);
    world.write("package/more.opt", "-maxrregcount=168\n");
    assert_eq!(world.compiled_by(kernels()), ALL);
    world.write("package/flags.opt", "-lineinfo\n");
    assert_eq!(world.compiled_by(kernels()), ALL);
    assert!(!world.library("out").contains("more.opt"));
}

#[test]
fn replaced_toolkit_program() {
    let world = World::new();
    for program in [
        "bin/ptxas",
        "bin/cudafe++",
        "nvvm/bin/cicc",
        "nvvm/libdevice/libdevice.10.bc",
    ] {
        world.program(&format!("toolkit/{program}"), "first");
    }
    world.compiled();
    for program in [
        "bin/ptxas",
        "bin/cudafe++",
        "nvvm/bin/cicc",
        "nvvm/libdevice/libdevice.10.bc",
    ] {
        world.program(&format!("toolkit/{program}"), "other");
        assert_eq!(world.compiled(), ALL, "{program}");
        // A file that was replaced by an equal one with another time counts as the same.
        std::thread::sleep(Duration::from_millis(20));
        world.program(&format!("toolkit/{program}"), "other");
        assert_eq!(world.compiled(), NONE, "{program}");
    }
}

#[test]
fn used_manifest_is_kept() {
    let world = World::new();
    world.compiled();
    let long_ago = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
    for entry in walkdir::WalkDir::new(world.at("cache")) {
        let entry = entry.unwrap();
        if entry.file_type().is_file() {
            fs::File::open(entry.path())
                .unwrap()
                .set_modified(long_ago)
                .unwrap();
        }
    }
    // Both objects are used, and a newer, unrelated one fills the cache.
    assert_eq!(world.compiled(), NONE);
    for entry in walkdir::WalkDir::new(world.at("cache/manifests")) {
        let entry = entry.unwrap();
        if entry.file_type().is_file() {
            let used = entry.metadata().unwrap().modified().unwrap();
            assert!(
                used > long_ago + Duration::from_secs(1),
                "{}",
                entry.path().display()
            );
        }
    }
}
