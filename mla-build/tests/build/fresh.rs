//! Changes that give a source another meaning without changing any file that it reads. None of them
//! may leave a stale object.

use std::{
    fs,
    time::{Duration, SystemTime},
};

use crate::stub::{ALL, NONE, World, succeeds};

/// A new header hides the one that an include found before, or is asked for.
#[test]
fn new_header_hides() {
    for (source, found_before, new) in [
        // `outer` is searched before `outer/inner`.
        (
            "#include <tile.h>\n",
            "package/outer/inner/tile.h",
            "package/outer/tile.h",
        ),
        // A header beside a header is found first.
        (
            "#include <common/deep/a.h>\n",
            "package/cuda/b.h",
            "package/cuda/common/deep/b.h",
        ),
        // The stub is told the value of the macro.
        (
            "#define TILE \"tile.h\"\n#include TILE\n// has: tile.h\n",
            "package/cuda/tile.h",
            "package/cuda/sm90/tile.h",
        ),
        (
            "#include <stdint.h>\n",
            "system/stdint.h",
            "package/cuda/stdint.h",
        ),
        (
            "#if __has_include(<extra.h>)\n#endif\n// has: extra.h\n",
            "package/unrelated.h",
            "package/cuda/extra.h",
        ),
    ] {
        let world = World::new();
        world.write("package/cuda/common/deep/a.h", "#include \"b.h\"\n");
        fs::create_dir_all(world.at("package/outer/inner")).unwrap();
        fs::create_dir(world.at("system")).unwrap();
        world.host("(Stub) 12.2.0", &[world.at("system")]);
        world.write("package/cuda/sm90/d.cu", source);
        world.write(found_before, "found-before\n");
        let kernels = || world.kernels().include("outer").include("outer/inner");
        let has = |text: &str| world.library("out").contains(text);
        world.compiled_by(kernels());
        let is_found = has("found-before");
        assert_eq!(is_found, !found_before.contains("unrelated"), "{source}");
        assert_eq!(world.compiled_by(kernels()), NONE, "{source}");
        world.write(new, "hiding\n");
        assert_eq!(world.compiled_by(kernels()), ["cuda/sm90/d.cu"], "{source}");
        assert!(has("hiding") && !has("found-before"), "{source}");
        // Its object is still there.
        fs::remove_file(world.at(new)).unwrap();
        assert_eq!(world.compiled_by(kernels()), NONE, "{source}");
        assert!(has("found-before") == is_found && !has("hiding"));
    }
}

#[test]
fn new_header_in_cpath() {
    let world = World::new();
    world.write("system/stdint.h", "stdint-system\n");
    world.write("package/cuda/sm90/d.cu", "#include <stdint.h>\n");
    fs::create_dir(world.at("mine")).unwrap();
    // The host compiler lists the folders of CPATH before its own.
    world.host("(Stub) 12.2.0", &[world.at("mine"), world.at("system")]);
    let build = || {
        succeeds(world.command("out").env("CPATH", world.at("mine")));
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
    let programs = [
        "toolkit/bin/ptxas",
        "toolkit/bin/cudafe++",
        "toolkit/nvvm/bin/cicc",
        "toolkit/nvvm/libdevice/libdevice.10.bc",
    ];
    for program in programs {
        world.program(program, "first");
    }
    world.compiled();
    for program in programs {
        world.program(program, "other");
        assert_eq!(world.compiled(), ALL, "{program}");
        // A file that was replaced by an equal one with another time counts as the same.
        std::thread::sleep(Duration::from_millis(20));
        world.program(program, "other");
        assert_eq!(world.compiled(), NONE, "{program}");
    }
}

/// A manifest is kept for as long as the object that it leads to.
#[test]
fn used_manifest_is_kept() {
    let world = World::new();
    world.compiled();
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
    world.set_times("cache", long_ago);
    assert_eq!(world.compiled(), NONE);
    for path in world.files("cache/manifests") {
        let used = fs::metadata(&path).unwrap().modified().unwrap();
        let used = used.duration_since(long_ago).unwrap();
        assert!(used > Duration::from_secs(1), "{}", path.display());
    }
}
