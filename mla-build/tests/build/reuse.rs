//! Changes after which something is compiled again, and changes after which nothing is.

use std::{
    fs::{self, File},
    process::Command,
    time::{Duration, SystemTime},
};

use crate::stub::{ALL, Says, World, version};
use mla_build::report::Outcome;

const NONE: [&str; 0] = [];

#[test]
fn second_build_compiles_nothing() {
    let world = World::new();
    assert_eq!(world.compiled(), ALL);
    assert_eq!(world.compiled(), NONE);
    for text in ["body-a", "body-b", "body-c", "shared-1", "layout-1"] {
        assert!(world.library("out").contains(text), "{text}");
    }
}

#[test]
fn touching_every_file_compiles_nothing() {
    let world = World::new();
    world.compiled();
    for entry in walkdir::WalkDir::new(world.at("package"))
        .into_iter()
        .chain(walkdir::WalkDir::new(world.at("toolkit")))
    {
        let entry = entry.unwrap();
        if entry.file_type().is_file() {
            let later = SystemTime::now() + Duration::from_secs(3600);
            File::open(entry.path())
                .unwrap()
                .set_modified(later)
                .unwrap();
        }
    }
    assert_eq!(world.compiled(), NONE);
}

#[test]
fn a_moved_checkout_compiles_nothing() {
    let world = World::new();
    world.compiled();
    fs::create_dir_all(world.at("some/where")).unwrap();
    fs::rename(world.at("package"), world.at("some/where/else")).unwrap();
    assert_eq!(
        world.compiled_by(world.kernels_of("some/where/else", "out")),
        NONE
    );
}

#[test]
fn second_checkout() {
    let world = World::new();
    world.compiled();
    let copied = Command::new("cp")
        .arg("-r")
        .arg(world.at("package"))
        .arg(world.at("second"))
        .status()
        .unwrap();
    assert!(copied.success());
    assert_eq!(world.compiled_by(world.kernels_of("second", "out-2")), NONE);

    world.write("second/cuda/common/shared.h", "shared-2\n");
    assert_eq!(
        world.compiled_by(world.kernels_of("second", "out-2")),
        ["cuda/sm90/a.cu", "cuda/sm90/b.cu"]
    );
    assert!(
        world.library("out-2").contains("shared-2") && !world.library("out-2").contains("shared-1")
    );
    assert_eq!(world.compiled(), NONE, "the first checkout keeps its own");
    assert!(
        world.library("out").contains("shared-1") && !world.library("out").contains("shared-2")
    );
}

#[test]
fn moved_toolkit() {
    let world = World::new();
    world.compiled();
    std::os::unix::fs::symlink(world.at("toolkit"), world.at("link")).unwrap();
    assert_eq!(
        world.compiled_by(world.kernels().cuda_home(world.at("link"))),
        NONE
    );
    fs::rename(world.at("toolkit"), world.at("moved")).unwrap();
    assert_eq!(
        world.compiled_by(world.kernels().cuda_home(world.at("moved"))),
        NONE
    );
}

#[test]
fn another_profile_compiles_nothing() {
    let world = World::new();
    for (profile, level, debug) in [
        ("debug", "0", "true"),
        ("release", "3", "false"),
        ("debug", "0", "true"),
    ] {
        let status = world
            .command(&format!("target/{profile}"))
            .env("PROFILE", profile)
            .env("OPT_LEVEL", level)
            .env("DEBUG", debug)
            .output()
            .unwrap();
        assert!(status.status.success(), "{status:?}");
    }
    assert_eq!(
        world.calls(),
        ALL,
        "three builds, and each unit compiled once"
    );
    // Line numbers for a profiler are asked for by name, and need a separate compilation.
    let with = |value: &str| {
        let mut command = world.command("target/debug");
        command.env("MLA_BUILD_LINE_INFO", value).output().unwrap()
    };
    assert!(with("1").status.success());
    let calls = fs::read_to_string(world.at("calls")).unwrap();
    assert!(
        calls.lines().all(|call| call.contains(" -lineinfo ")),
        "{calls}"
    );
    assert_eq!(world.calls(), ALL);
    assert!(with("0").status.success());
    assert_eq!(world.calls(), NONE);
    let message = String::from_utf8_lossy(&with("yes").stderr).into_owned();
    message.says("MLA_BUILD_LINE_INFO: given \"yes\", accepted 1 or 0");
}

#[test]
fn a_deleted_target_folder_compiles_nothing() {
    let world = World::new();
    world.compiled();
    fs::remove_dir_all(world.at("out")).unwrap();
    assert_eq!(world.compiled(), NONE);
    assert!(world.library("out").contains("body-a"));
}

#[test]
fn edited_header() {
    let world = World::new();
    world.compiled();
    world.write("package/cuda/common/shared.h", "shared-2\n");
    assert_eq!(world.compiled(), ["cuda/sm90/a.cu", "cuda/sm90/b.cu"]);
    assert!(!world.library("out").contains("shared-1"));
    world.write("toolkit/include/cute/layout.hpp", "layout-2\n");
    assert_eq!(world.compiled(), ["cuda/all/c.cu", "cuda/sm90/b.cu"]);
    assert!(!world.library("out").contains("layout-1"));

    let reasons: Vec<_> = {
        world.write("package/cuda/common/shared.h", "shared-3\n");
        let built = world.build().unwrap();
        built
            .report
            .units
            .iter()
            .map(|unit| (unit.outcome, unit.reason.clone()))
            .collect()
    };
    assert_eq!(reasons[0], (Outcome::Cached, String::new()));
    assert_eq!(
        reasons[1],
        (Outcome::Compiled, "cuda/common/shared.h changed".into())
    );
}

#[test]
fn header_changed_back() {
    let world = World::new();
    world.compiled();
    world.write("package/cuda/common/shared.h", "shared-2\n");
    world.compiled();
    world.write("package/cuda/common/shared.h", "shared-1\n");
    assert_eq!(world.compiled(), NONE);
    assert!(
        world.library("out").contains("shared-1") && !world.library("out").contains("shared-2")
    );
}

#[test]
fn cutlass_headers_count_like_any_other() {
    let world = World::new();
    world.write("cutlass/include/cutlass/cutlass.h", "");
    world.write("cutlass/include/cute/tensor.hpp", "tensor-1\n");
    world.write(
        "package/cuda/sm90/d.cu",
        "#include <cute/tensor.hpp>\nbody-d\n",
    );
    // CUTLASS is a plain include root here. The search for it has its own tests, and reads the
    // environment.
    let kernels = || world.kernels().include(world.at("cutlass/include"));
    world.compiled_by(kernels());
    fs::rename(world.at("cutlass"), world.at("cutlass-4")).unwrap();
    let kernels = || world.kernels().include(world.at("cutlass-4/include"));
    assert_eq!(world.compiled_by(kernels()), NONE, "it may lie elsewhere");
    world.write("cutlass-4/include/cute/tensor.hpp", "tensor-2\n");
    assert_eq!(world.compiled_by(kernels()), ["cuda/sm90/d.cu"]);
}

#[test]
fn new_hiding_header() {
    let world = World::new();
    world.compiled();
    // Include roots are searched before the toolkit's own headers.
    world.write("package/cuda/cute/layout.hpp", "hiding\n");
    assert_eq!(world.compiled(), ["cuda/all/c.cu", "cuda/sm90/b.cu"]);
    assert!(world.library("out").contains("hiding") && !world.library("out").contains("layout-1"));
    fs::remove_file(world.at("package/cuda/cute/layout.hpp")).unwrap();
    assert_eq!(world.compiled(), NONE);
    assert!(!world.library("out").contains("hiding"));
}

#[test]
fn equal_sources_stay_apart() {
    let world = World::new();
    let source = "#include \"local.h\"\nsame\n";
    world.write("package/cuda/sm90/x/same.cu", source);
    world.write("package/cuda/sm90/y/same.cu", source);
    world.write("package/cuda/sm90/x/local.h", "local-x\n");
    world.write("package/cuda/sm90/y/local.h", "local-y\n");
    world.compiled();
    let library = world.library("out");
    assert!(library.contains("local-x") && library.contains("local-y"));
}

#[test]
fn changed_sources() {
    let world = World::new();
    world.compiled();
    world.write("package/cuda/sm90/a.cu", "body-a2\n");
    assert_eq!(world.compiled(), ["cuda/sm90/a.cu"]);
    world.write("package/cuda/sm90/new.cu", "body-new\n");
    assert_eq!(world.compiled(), ["cuda/sm90/new.cu"]);
    fs::remove_file(world.at("package/cuda/sm90/new.cu")).unwrap();
    assert_eq!(world.compiled(), NONE);
    assert!(
        !world.library("out").contains("body-new"),
        "the object of a removed source is not linked"
    );
}

#[test]
fn other_compiler_versions() {
    let world = World::new();
    world.compiled();
    world.write("toolkit/version", &version("13.1"));
    assert_eq!(world.compiled(), ALL);
    world.host("(Stub) 13.1.0");
    assert_eq!(world.compiled(), ALL);
    world.write("toolkit/version", &version("13.0"));
    world.host("(Stub) 12.2.0");
    assert_eq!(
        world.compiled(),
        NONE,
        "and the old ones find what they made"
    );
}

#[test]
fn another_flag_or_macro_compiles_all() {
    let world = World::new();
    world.compiled();
    assert_eq!(
        world.compiled_by(world.kernels().flag("--use_fast_math")),
        ALL
    );
    assert_eq!(
        world.compiled_by(world.kernels().define("MLA_TILE=64")),
        ALL
    );
    assert_eq!(world.compiled(), NONE);
}

#[test]
fn additional_family() {
    let world = World::new();
    world.write("package/cuda/sm100/d.cu", "body-d\n");
    assert_eq!(world.compiled(), ALL);
    let both = || world.kernels().enable("sm100");
    assert_eq!(
        world.compiled_by(both()),
        ["cuda/all/c.cu", "cuda/sm100/d.cu"]
    );
    assert_eq!(world.compiled_by(both()), NONE);
    assert_eq!(world.compiled(), NONE);
}

#[test]
fn header_edited_during_compile() {
    let world = World::new();
    world.write(
        "package/cuda/sm90/a.cu",
        "#include \"../common/shared.h\"\nbody-a\n// sleep: 0.5\n",
    );
    std::thread::scope(|scope| {
        let build = scope.spawn(|| world.build().unwrap());
        while !world.at("calls").exists()
            || !fs::read_to_string(world.at("calls"))
                .unwrap()
                .contains("a.cu")
        {
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(100));
        world.write("package/cuda/common/shared.h", "shared-2\n");
        build.join().unwrap();
    });
    world.calls();
    assert!(world.compiled().contains(&"cuda/sm90/a.cu".to_owned()));
    assert!(
        world.library("out").contains("shared-2") && !world.library("out").contains("shared-1")
    );
}
