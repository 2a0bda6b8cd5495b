//! Changes after which something is compiled again, and changes after which nothing is.

use std::{
    fs,
    os::unix::fs::symlink,
    thread,
    time::{Duration, SystemTime},
};

use crate::stub::{ALL, NONE, Says, World, fails, succeeds, version};
use mla_build::{Kernels, report::Outcome};

const A: &str = "cuda/sm90/a.cu";
const B: &str = "cuda/sm90/b.cu";
const C: &str = "cuda/all/c.cu";
const NEW: &str = "cuda/sm90/new.cu";

/// Changes something, and describes the build after it.
type Change = fn(&World) -> Kernels;

#[test]
fn nothing_is_compiled_again() {
    let changes: [(&str, Change); 6] = [
        ("a second build", World::kernels),
        ("new times of all files", |world| {
            let later = SystemTime::now() + Duration::from_secs(3600);
            world.set_times("package", later);
            world.set_times("toolkit", later);
            world.kernels()
        }),
        ("a deleted target folder", |world| {
            fs::remove_dir_all(world.at("out")).unwrap();
            world.kernels()
        }),
        ("a moved checkout", |world| {
            fs::create_dir_all(world.at("some/where")).unwrap();
            fs::rename(world.at("package"), world.at("some/where/else")).unwrap();
            world.kernels_of("some/where/else", "out")
        }),
        ("a link to the toolkit", |world| {
            symlink(world.at("toolkit"), world.at("link")).unwrap();
            world.kernels().cuda_home(world.at("link"))
        }),
        ("a moved toolkit", |world| {
            fs::rename(world.at("toolkit"), world.at("moved")).unwrap();
            world.kernels().cuda_home(world.at("moved"))
        }),
    ];
    for (change, kernels) in changes {
        let world = World::new();
        assert_eq!(world.compiled(), ALL);
        assert_eq!(world.compiled_by(kernels(&world)), NONE, "{change}");
        for text in ["body-a", "body-b", "body-c", "shared-1", "layout-1"] {
            world.library("out").says(text);
        }
    }
}

/// Each change compiles the units that it concerns, and a change back finds their old objects.
#[test]
fn changes_compile_what_they_concern() {
    let world = World::new();
    assert_eq!(world.compiled(), ALL);
    let shared = "package/cuda/common/shared.h";
    let layout = "toolkit/include/cute/layout.hpp";
    let hiding = "package/cuda/cute/layout.hpp";
    let (a, new) = ("package/cuda/sm90/a.cu", "package/cuda/sm90/new.cu");
    let release = "toolkit/version";
    let (old, other) = (version("13.0"), version("13.1"));
    for (file, text, compiled, here, gone) in [
        (shared, "shared-2\n", &[A, B][..], "shared-2", "shared-1"),
        (shared, "shared-1\n", &[], "shared-1", "shared-2"),
        (layout, "layout-2\n", &[C, B], "layout-2", "layout-1"),
        (layout, "layout-1\n", &[], "layout-1", "layout-2"),
        // Include roots are searched before the toolkit's own headers.
        (hiding, "hiding\n", &[C, B], "hiding", "layout-1"),
        (hiding, "", &[], "layout-1", "hiding"),
        (a, "body-a2\n", &[A], "body-a2", "body-a\n"),
        (new, "body-new\n", &[NEW], "body-new", "body-a\n"),
        // The object of a removed source is not linked.
        (new, "", &[], "body-a2", "body-new"),
        (release, &other, &ALL, "body-a2", "body-new"),
        (release, &old, &[], "body-a2", "body-new"),
    ] {
        match text {
            "" => fs::remove_file(world.at(file)).unwrap(),
            text => world.write(file, text),
        }
        assert_eq!(world.compiled(), compiled, "{file}: {text}");
        let library = world.library("out");
        library.says(here);
        assert!(!library.contains(gone), "{file}: {gone}");
    }
    world.host("(Stub) 13.1.0", &[]);
    assert_eq!(world.compiled(), ALL);
    world.host("(Stub) 12.2.0", &[]);
    assert_eq!(world.compiled(), NONE);
    let flag = world.kernels().flag("--use_fast_math");
    assert_eq!(world.compiled_by(flag), ALL);
    let define = world.kernels().define("MLA_TILE=64");
    assert_eq!(world.compiled_by(define), ALL);
    assert_eq!(world.compiled(), NONE);
    world.write(shared, "shared-3\n");
    let units = world.build().unwrap().report.units;
    assert_eq!((units[0].outcome, &*units[0].reason), (Outcome::Cached, ""));
    assert_eq!(units[2].outcome, Outcome::Compiled);
    assert_eq!(units[2].reason, "cuda/common/shared.h changed");
}

#[test]
fn second_checkout() {
    let world = World::new();
    world.compiled();
    world.copy("package", "second");
    let second = || world.compiled_by(world.kernels_of("second", "out-2"));
    assert_eq!(second(), NONE);
    world.write("second/cuda/common/shared.h", "shared-2\n");
    assert_eq!(second(), [A, B]);
    assert_eq!(world.compiled(), NONE, "the first checkout keeps its own");
    for (out, here, gone) in [
        ("out-2", "shared-2", "shared-1"),
        ("out", "shared-1", "shared-2"),
    ] {
        let library = world.library(out);
        assert!(library.contains(here) && !library.contains(gone), "{out}");
    }
}

#[test]
fn another_profile_compiles_nothing() {
    let world = World::new();
    for (profile, level, debug) in [("debug", "0", "true"), ("release", "3", "false")] {
        let mut build = world.command(&format!("target/{profile}"));
        build.env("PROFILE", profile).env("OPT_LEVEL", level);
        succeeds(build.env("DEBUG", debug));
    }
    assert_eq!(world.calls(), ALL, "two builds, and each unit once");
    // Line numbers for a profiler are asked for by name, and need a separate compilation.
    let with = |value: &str| {
        let mut build = world.command("target/debug");
        build.env("MLA_BUILD_LINE_INFO", value);
        build
    };
    succeeds(&mut with("1"));
    let calls = world.arguments();
    let with_lines = calls.lines().filter(|call| call.contains(" -lineinfo "));
    assert_eq!(with_lines.count(), 3, "{calls}");
    succeeds(&mut with("0"));
    assert_eq!(world.calls(), NONE);
    fails(&mut with("yes")).says("MLA_BUILD_LINE_INFO: given \"yes\", accepted 1 or 0");
}

#[test]
fn cutlass_headers_count_like_any_other() {
    let world = World::new();
    world.write("cutlass/include/cute/tensor.hpp", "tensor-1\n");
    world.write(
        "package/cuda/sm90/d.cu",
        "#include <cute/tensor.hpp>\nbody-d\n",
    );
    // CUTLASS is a plain include root here. The search for it has its own tests, and reads the
    // environment.
    let build = |folder: &str| world.compiled_by(world.kernels().include(world.at(folder)));
    build("cutlass/include");
    fs::rename(world.at("cutlass"), world.at("cutlass-4")).unwrap();
    assert_eq!(build("cutlass-4/include"), NONE, "it may lie elsewhere");
    world.write("cutlass-4/include/cute/tensor.hpp", "tensor-2\n");
    assert_eq!(build("cutlass-4/include"), ["cuda/sm90/d.cu"]);
}

#[test]
fn equal_sources_stay_apart() {
    let world = World::new();
    for folder in ["x", "y"] {
        let at = |file: &str| format!("package/cuda/sm90/{folder}/{file}");
        world.write(&at("same.cu"), "#include \"local.h\"\nsame\n");
        world.write(&at("local.h"), &format!("local-{folder}\n"));
    }
    world.compiled();
    let library = world.library("out");
    assert!(library.contains("local-x") && library.contains("local-y"));
}

#[test]
fn additional_family() {
    let world = World::new();
    world.write("package/cuda/sm100/d.cu", "body-d\n");
    assert_eq!(world.compiled(), ALL);
    let both = || world.compiled_by(world.kernels().enable("sm100"));
    assert_eq!(both(), [C, "cuda/sm100/d.cu"]);
    assert_eq!(both(), NONE);
    assert_eq!(world.compiled(), NONE);
}

#[test]
fn header_edited_during_compile() {
    let world = World::new();
    world.write(
        "package/cuda/sm90/a.cu",
        "#include \"../common/shared.h\"\nbody-a\n// sleep: 0.5\n",
    );
    thread::scope(|scope| {
        let build = scope.spawn(|| world.build().unwrap());
        let calls = || fs::read_to_string(world.at("calls")).unwrap_or_default();
        while !calls().contains("a.cu") {
            thread::sleep(Duration::from_millis(5));
        }
        thread::sleep(Duration::from_millis(100));
        world.write("package/cuda/common/shared.h", "shared-2\n");
        build.join().unwrap();
    });
    world.calls();
    assert!(world.compiled().contains(&A.to_owned()));
    let library = world.library("out");
    assert!(library.contains("shared-2") && !library.contains("shared-1"));
}
